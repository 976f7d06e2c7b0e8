"""LoRA adapters of tiny llama and Qwen3 models: PEFT's values, and no influence of others in the batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.adapter import NO_ADAPTER
from pegainfer.contract.errors import InvariantError, UnsupportedError
from pegainfer.contract.event import TokenLogprob
from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, SlotBlocks, StepPlan, StepResult
from pegainfer.engine.config import SchedulerConfig
from pegainfer.runner.host import HostRunner
from tests.support.tinylora import ADAPTERS, BASES, write_adapter
from tests.support.tinymodel import by_role, token_ids, write_checkpoint
from tests.support.tinyqwen3 import TinyQwen3, write_gguf
from tests.support.tinyrun import BACKENDS, compare

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "lora" / "tiny.npz")
MEAN, MAX = 1e-3, 1e-2  # nat, float32 against float32
NAMES = [None, *ADAPTERS]  # by adapter index - 1: the base first
TOKENS, BLOCKS = 48, 4  # of a prompt


@pytest.mark.parametrize(("backend", "isa"), BACKENDS, ids=lambda v: v or "numpy")
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("base", BASES)
def test_logprobs_and_greedy_tokens(
    base: str, adapter: str, backend: str, isa: str | None, tmp_path: Path
) -> None:
    model = BASES[base]
    path = write_checkpoint(model, tmp_path / "base")
    folder = write_adapter(ADAPTERS[adapter], model, tmp_path / "adapter")
    found = compare(path, token_ids(model), GOLDEN, f"{base}.{adapter}", backend, isa, folder)
    assert found.greedy == found.wanted
    assert found.errors.mean() <= MEAN
    assert found.errors.max() <= MAX


class Served:
    """A runner with all adapters, and steps of one prompt a row."""

    def __init__(self, path: Path, adapters: Sequence[Path], **options: Any) -> None:
        config = EngineConfig(
            kv_cache_memory=1 << 23, enable_lora=True, max_loras=len(adapters), max_lora_rank=8, **options
        )
        scheduler = SchedulerConfig(max_slots=16, max_prefill_tokens=16 * TOKENS)
        runner = build_engine(path, "tiny", config, scheduler).runner
        assert isinstance(runner, HostRunner)
        self.runner, self._steps = runner, itertools.count(1)
        for index, folder in enumerate(adapters):
            self.runner.install_adapter(index, self.runner.read_adapter(folder.name, str(folder))[1])

    def step(self, **parts: Any) -> StepResult:
        return self.runner.sample(self.runner.forward(StepPlan(step=next(self._steps), **parts))).wait()

    def run(
        self, prompts: Sequence[list[int]], adapters: Sequence[int], decodes: int
    ) -> list[list[TokenLogprob]]:
        """What follows each token of each prompt and of its greedy continuation."""
        params = SamplingParams(temperature=0.0, prompt_logprobs=4, logprobs=4)
        news = tuple(
            NewSlot(slot=s, seq=s + 1, tokens=pack_tokens(p), num_prompt=len(p), sampling=params, seed=0,
                    adapter=a)
            for s, (p, a) in enumerate(zip(prompts, adapters, strict=True))
        )  # fmt: skip
        blocks = tuple(
            SlotBlocks(s, 0, tuple(range(BLOCKS * s, BLOCKS * (s + 1)))) for s in range(len(prompts))
        )
        rows = tuple(Row(s, 0, len(p), True) for s, p in enumerate(prompts))
        result = self.step(news=news, blocks=blocks, rows=rows)
        found = [[*result.prompt_logprobs.get(s, ()), *result.logprobs[s]] for s in range(len(prompts))]
        for i in range(decodes):
            result = self.step(rows=tuple(Row(s, len(p) + i, 1, True) for s, p in enumerate(prompts)))
            for s, entries in enumerate(found):
                entries += result.logprobs[s]
        self.step(frees=tuple(range(len(prompts))))
        return found


def folders(base: str, folder: Path) -> list[Path]:
    return [write_adapter(a, BASES[base], folder / name) for name, a in ADAPTERS.items()]


@pytest.fixture(params=["f32", "int8"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """Of the tied Qwen3 on the CPU's kernels; quantised for 8-bit activations."""
    activation = str(request.param)
    base = "qwen3_tied"
    if activation == "int8":
        model = BASES[base]
        assert isinstance(model, TinyQwen3)
        path = write_gguf(model, tmp_path / "m.gguf", by_role("q8_0", "q4_1", "q4_1"))
    else:
        path = write_checkpoint(BASES[base], tmp_path / "base")
    made = Served(path, folders(base, tmp_path), activation=activation, kv_dtype="f32")
    yield made
    made.runner.close()


def prompts(count: int) -> list[list[int]]:
    rng = np.random.RandomState(7)
    return [rng.randint(0, 160, rng.randint(1, TOKENS)).tolist() for _ in range(count)]


def test_a_mixed_batch_equals_each_row_alone_bit_for_bit(served: Served) -> None:
    """Every adapter twice and rows without one, in prefill and in decode."""
    texts = prompts(2 * len(NAMES))
    adapters = [i % len(NAMES) - 1 for i in range(len(texts))]
    together = served.run(texts, adapters, decodes=5)
    for text, adapter, got in zip(texts, adapters, together, strict=True):
        assert served.run([text], [adapter], decodes=5) == [got]


def test_each_adapter_gives_other_values(served: Served) -> None:
    text = prompts(3)[2]
    found = served.run([text] * len(NAMES), range(-1, len(ADAPTERS)), decodes=0)
    assert len({tuple(e.logprob for e in entries) for entries in found}) == len(NAMES)


def test_an_index_that_is_used_again_forgets_the_adapter_before(served: Served, tmp_path: Path) -> None:
    """The later one has smaller ranks and fewer modules; a free index computes as the base does."""
    text, later = prompts(3)[2], list(ADAPTERS).index("one_layer_by_expression")
    wanted, base = served.run([text] * 2, [later, NO_ADAPTER], decodes=3)
    first = list(ADAPTERS).index("rank_stabilised_patterns")
    served.runner.remove_adapter(first)
    assert served.run([text], [first], decodes=3) == [base]
    folder = write_adapter(ADAPTERS["one_layer_by_expression"], BASES["qwen3_tied"], tmp_path / "again")
    served.runner.install_adapter(first, served.runner.read_adapter("again", str(folder))[1])
    assert served.run([text], [first], decodes=3) == [wanted]


def test_wrong_indices_are_faults(served: Served) -> None:
    with pytest.raises(InvariantError, match="is taken or does not exist"):
        served.runner.install_adapter(0, {})
    with pytest.raises(InvariantError, match="is taken or does not exist"):
        served.runner.install_adapter(len(ADAPTERS), {})
    served.runner.remove_adapter(0)
    with pytest.raises(InvariantError, match="removed but not installed"):
        served.runner.remove_adapter(0)
    with pytest.raises(InvariantError, match=f"has adapter {len(ADAPTERS)} of {len(ADAPTERS)}"):
        served.run([[1, 2]], [len(ADAPTERS)], decodes=0)


def test_dora_is_refused_by_name(served: Served, tmp_path: Path) -> None:
    folder = write_adapter(ADAPTERS["plain"], BASES["qwen3_tied"], tmp_path / "dora", use_dora=True)
    with pytest.raises(UnsupportedError, match="use_dora is not supported"):
        served.runner.read_adapter("dora", str(folder))
