"""The size and behaviour of a null device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pegainfer.contract.step import KVSpec, PageGroup, RunnerInfo, StepPlan
from pegainfer.contract.tiers import Tier
from pegainfer.null.model import NullModel

# What goes wrong in a step: an exception that `wait` raises, or rows with their own error messages.
Faults = Callable[[StepPlan], Exception | dict[int, str] | None]


def default_kv() -> KVSpec:
    """One full-attention group with blocks of 16 tokens."""
    return KVSpec((PageGroup(name="full", block_size=16, bytes_per_block=16),))


@dataclass(frozen=True, kw_only=True)
class NullConfig:
    """The size and manners of the null device."""

    model: NullModel = field(default_factory=NullModel)
    kv: KVSpec = field(default_factory=default_kv)
    num_blocks: tuple[int, ...] = (1024,)
    max_slots: int = 16
    max_tokens: int = 512
    max_model_len: int = 4096
    max_commit: int = 1
    max_adapters: int = 0
    max_host_adapters: int = 0
    tiers: tuple[Tier, ...] = ()
    transfer_steps: int = 3  # a transfer ends with one of the next so many results
    failed_transfers: float = 0.0  # share of transfers that fail
    zero_commits: float = 0.0  # share of sampling rows that commit nothing
    seed: int = 0  # of what is drawn: tokens that a row commits, and how transfers end
    rank: int = 0  # in a group of ranks, each of which ends transfers at times of its own
    step_seconds: float = 0.0  # latency of each step
    token_seconds: float = 0.0  # and of each token computed in it
    virtual: bool = False  # latencies are told, but nobody sleeps them out
    faults: Faults | None = None

    def runner_info(self) -> RunnerInfo:
        """What the scheduler is told of the device."""
        return RunnerInfo(
            kv=self.kv,
            num_blocks=self.num_blocks,
            max_slots=self.max_slots,
            max_tokens=self.max_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.model.vocab_size,
            max_commit=self.max_commit,
            supports_pooling=True,
            tiers=self.tiers,
            max_adapters=self.max_adapters,
            max_host_adapters=self.max_host_adapters,
        )
