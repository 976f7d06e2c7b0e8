"""What a step would run, without loading the weights: the recorded programs of a model and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pegainfer.app.assemble import open_model
from pegainfer.app.bounds import model_groups, runner_info, step_formats
from pegainfer.cli.spec import EngineSpec
from pegainfer.contract.errors import UnsupportedError
from pegainfer.contract.step import RunnerInfo
from pegainfer.ops.program import Program
from pegainfer.ops.spec import Cost
from pegainfer.runner.program import largest_step


@dataclass(frozen=True)
class StepPrograms:
    """The programs of a model by name, and the sizes that they are planned for."""

    info: RunnerInfo
    forward: Program
    sampler: Program

    @property
    def largest(self) -> dict[str, int]:
        """Step sizes that the arena must hold."""
        return largest_step(self.info)

    def cost(self, tokens: int, rows: int) -> Cost:
        """Bytes that must move and FLOPs of a step of `tokens` tokens in `rows` sequences, all sampling."""
        return self.forward.cost(step_sizes(tokens, rows))

    def describe(self, tokens: int, rows: int) -> str:
        return self.forward.describe(step_sizes(tokens, rows), self.largest)


def step_sizes(tokens: int, rows: int) -> dict[str, int]:
    return {"T": tokens, "R": rows, "L": rows}


def step_programs(spec: EngineSpec, num_blocks: int = 1) -> StepPrograms:
    """Reads the model's header only. Raises what opening a model raises, and UnsupportedError without one.

    Args:
        num_blocks: of each KV group on a GPU, whose memory is not looked at.
    """
    if spec.is_null:
        raise UnsupportedError("the null device runs no program", remedy="name a model, leave --device out")
    with open_model(Path(spec.path), spec.engine.load_format) as (model, _):
        info = runner_info(model, spec.engine, spec.scheduler)
        groups = model_groups(model, spec.engine)
        if spec.engine.backend == "cuda":
            info = msgspec.structs.replace(info, num_blocks=(num_blocks,) * len(groups))
        programs = model.programs(info, groups, step_formats(spec.engine), spec.scheduler.max_logprobs)
    return StepPrograms(info, programs["forward"], programs["sampler"])
