"""What a step would run, without loading the weights: the recorded programs of a model and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pegainfer.app.bounds import model_groups, runner_info, step_formats
from pegainfer.app.load import open_model
from pegainfer.cli.spec import EngineSpec
from pegainfer.contract.errors import UnsupportedError
from pegainfer.contract.step import RunnerInfo
from pegainfer.ops.program import Program
from pegainfer.ops.spec import Cost
from pegainfer.runner.program import largest_step
from pegainfer.runtime.cuda.packed import OF_FORMAT

if TYPE_CHECKING:
    from pegainfer.lower.cuda.plan import StepPlan
    from pegainfer.lower.cuda.target import Target

NO_OPTIONS = dict.fromkeys("JEUO", 0)  # logit biases, masks and banned tokens of a sampling step


@dataclass(frozen=True)
class StepPrograms:
    """The programs of a model by name, and the sizes that they are planned for.

    Args:
        packed: those that a GPU runs where its memory asks for packed weights instead.
    """

    info: RunnerInfo
    all: Mapping[str, Program]
    packed: Mapping[str, Program] = field(default_factory=dict)

    @property
    def forward(self) -> Program:
        return self.all["forward"]

    @property
    def sampler(self) -> Program:
        return self.all["sampler"]

    @property
    def largest(self) -> dict[str, int]:
        """Step sizes that the arena must hold."""
        return largest_step(self.info)

    def cost(self, tokens: int, rows: int) -> Cost:
        """Bytes that must move and FLOPs of a step of `tokens` tokens in `rows` sequences, all sampling."""
        return self.forward.cost(step_sizes(tokens, rows))

    def describe(self, tokens: int, rows: int) -> str:
        return self.forward.describe(step_sizes(tokens, rows), self.largest)

    def launches(self, target: Target, tokens: int, rows: int) -> Iterator[StepPlan]:
        """What a GPU launches: the forward pass, then sampling of all rows without options."""
        from pegainfer.lower.cuda.lowering import Step
        from pegainfer.lower.cuda.planning import plan_program

        sizes = step_sizes(tokens, rows)
        yield plan_program(self.forward, Step(target, sizes, tokens == rows))
        yield plan_program(self.sampler, Step(target, {"L": rows, **NO_OPTIONS}, False))

    def kernels(self, target: Target) -> set[str]:
        """Every kernel that a GPU may launch for this model, at the sizes that steps are padded to."""
        from pegainfer.lower.cuda.lowering import Step
        from pegainfer.lower.cuda.planning import SUPPORT, chosen_kernels
        from pegainfer.runner.buckets import Buckets

        buckets = Buckets(self.info)
        steps = {
            "forward": [Step(target, b.env, b.decode) for b in buckets.all()],
            "sampler": [Step(target, {"L": n, **NO_OPTIONS}, False) for n in buckets.batches],
        }
        over = [Step(target, {"T": self.info.max_tokens, "L": self.info.max_slots}, False)]
        programs = (*self.all.items(), *self.packed.items())
        named = (chosen_kernels(p, steps.get(name, over)) for name, p in programs)
        return set(SUPPORT).union(*named)


def step_sizes(tokens: int, rows: int) -> dict[str, int]:
    return {"T": tokens, "R": rows, "L": rows}


def step_programs(spec: EngineSpec, num_blocks: int = 1) -> StepPrograms:
    """Reads the model's header only. Raises what opening a model raises, and UnsupportedError without one.

    Args:
        num_blocks: of each KV group on a GPU, whose memory is not looked at.
    """
    if spec.is_null:
        raise UnsupportedError("the null device runs no program", remedy="name a model, leave --device out")
    with open_model(Path(spec.path), spec.engine.load_format, quantization=spec.engine.quantization) as (
        model,
        _,
    ):
        info = runner_info(model, spec.engine, spec.scheduler)
        groups = model_groups(model, spec.engine)
        if spec.engine.backend == "cuda":
            count = num_blocks or info.num_blocks[0] or 1
            info = msgspec.structs.replace(info, num_blocks=(count,) * len(groups))
        formats, most = step_formats(spec.engine), spec.scheduler.max_logprobs
        programs = model.programs(info, groups, formats, most)
        packs = any(w.dtype in OF_FORMAT for w in model.weights.values())
        if not packs or spec.engine.backend != "cuda" or spec.engine.quantization is not None:
            return StepPrograms(info, programs)
        return StepPrograms(info, model.expanded().programs(info, groups, formats, most), programs)
