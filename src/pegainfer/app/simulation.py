"""From a model's config to a simulated engine: bounds of its runner on a card, recorded programs, prices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pegainfer.app.bounds import model_groups, runner_info, step_formats
from pegainfer.app.config import EngineConfig
from pegainfer.app.gpu_memory import fit, plan_memory, quicker_form
from pegainfer.app.load import cpu_options, open_model
from pegainfer.contract.step import RunnerInfo, StepPolicy
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.scheduler import Scheduler
from pegainfer.measure.cards import PricedDevice
from pegainfer.measure.prices import PriceList, StepWork
from pegainfer.runner.buckets import Buckets
from pegainfer.simulate.host import CPU_HOST, GPU_HOST, HostPrices
from pegainfer.simulate.runner import SimulatedRunner

CONTEXT_BYTES = 600 << 20  # of a GPU's memory that a CUDA context takes


@dataclass(frozen=True)
class SimulatedEngine:
    """What one run needs; a run makes its own scheduler and runner."""

    info: RunnerInfo
    scheduler: SchedulerConfig
    prices: PriceList
    host: HostPrices

    def start(self) -> tuple[StepPolicy, SimulatedRunner]:
        return Scheduler(self.info, self.scheduler), SimulatedRunner(self.info, self.seconds)

    def seconds(self, work: StepWork) -> float:
        """Of a step on the device."""
        return self.prices.seconds(work) + self.host.step


def simulated_engine(
    path: Path, config: EngineConfig, scheduler: SchedulerConfig, device: PricedDevice, case: str
) -> SimulatedEngine:
    """Reads the model's header and sizes its cache as on the device; no weights, no driver.

    Args:
        case: of sampling, a setting of `sample_tokens`.

    Raises what opening a model raises, and ConfigError where the card cannot hold it.
    """
    with open_model(path, config.load_format, quantization=config.quantization) as (model, _):
        info = runner_info(model, config, scheduler)
        groups = model_groups(model, config)
        max_logprobs = min(scheduler.max_logprobs, info.vocab_size)
        if device.cuda:
            free = device.memory - CONTEXT_BYTES
            budget = plan_memory(model, groups, info, config, free, device.memory, max_logprobs)
            model, budget = quicker_form(model, groups, budget, info.max_model_len, config, fp8=False)
            info = fit(model, groups, budget, config, scheduler)
        one = msgspec.structs.replace(info, num_blocks=(1,) * len(groups))
        programs = model.programs(one, groups, step_formats(config), max_logprobs)
    buckets = Buckets(info)

    def pad(tokens: int, rows: int, decode: bool) -> tuple[int, int]:
        bucket = buckets.of(tokens, rows, decode)
        return bucket.tokens, bucket.rows

    prices = device.prices(
        programs["forward"],
        programs["sampler"],
        case,
        pad if device.cuda else None,
        cpu_options(config).activation,
    )
    return SimulatedEngine(info, scheduler, prices, GPU_HOST if device.cuda else CPU_HOST)
