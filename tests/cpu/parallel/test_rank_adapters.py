"""LoRA adapters whose factors are divided among tensor-parallel ranks on the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.contract.adapter import AdapterRunner
from pegainfer.contract.errors import EngineDeadError, ModelFileError, UnsupportedError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.parallel.group import RankGroup
from pegainfer.parallel.process import RankProcess
from tests.cpu.models.test_lora_lines import LINES
from tests.support.tinylora import ADAPTERS, BASES, write_adapter
from tests.support.tinymodel import token_ids, write_checkpoint
from tests.support.tinyrun import compare

GOLDEN = np.load(Path(__file__).parents[2] / "data" / "lora" / "tiny.npz")
MEAN, MAX = 1e-3, 1e-2  # nat, float32 against float32


@pytest.mark.parametrize(
    ("base", "ranks"), [("llama_untied", 2), ("llama_tied", 4), ("qwen3_tied", 2), ("qwen3_untied", 2)]
)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_ranks_keep_the_bounds_of_one(base: str, ranks: int, adapter: str, tmp_path: Path) -> None:
    """Four ranks have a KV head each, which two of them share where the model has two."""
    model = BASES[base]
    path = write_checkpoint(model, tmp_path / "base")
    folder = write_adapter(ADAPTERS[adapter], model, tmp_path / "adapter")
    found = compare(
        path, token_ids(model), GOLDEN, f"{base}.{adapter}", "cpu", None, folder, tensor_parallel_size=ranks,
        threads=1,
    )  # fmt: skip
    assert found.greedy == found.wanted
    assert found.errors.mean() <= MEAN
    assert found.errors.max() <= MAX


@pytest.mark.parametrize("line", ["qwen3_moe", "qwen3_5"])
def test_a_line_whose_adapters_do_not_divide_is_refused(line: str, tmp_path: Path) -> None:
    path = write_checkpoint(LINES[line][0], tmp_path / "base")
    config = EngineConfig(tensor_parallel_size=2, threads=1, enable_lora=True)
    with pytest.raises(UnsupportedError, match="serves no LoRA adapters on several ranks"):
        build_engine(path, "m", config, SchedulerConfig(max_slots=2))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RankGroup]:
    config = EngineConfig(tensor_parallel_size=2, threads=1, enable_lora=True, max_loras=2, max_lora_rank=4)
    path = write_checkpoint(BASES["llama_tied"], tmp_path / "base")
    runner = build_engine(path, "m", config, SchedulerConfig(max_slots=2)).runner
    assert isinstance(runner, RankGroup)
    yield runner
    runner.close()


def test_a_rank_says_why_an_adapter_is_refused(group: RankGroup, tmp_path: Path) -> None:
    folder = write_adapter(ADAPTERS["plain"], BASES["llama_tied"], tmp_path / "a", r=8)
    (other,) = (rank for rank in group.ranks if isinstance(rank, RankProcess))
    for read in (group.read_adapter, other.read_adapter):
        with pytest.raises(
            UnsupportedError, match=r"the adapter.s rank at .* is above what this engine serves"
        ):
            read("a", str(folder))
        with pytest.raises(ModelFileError):
            read("a", str(tmp_path / "nothing"))


def test_a_rank_forgets_what_nobody_holds(group: RankGroup, tmp_path: Path) -> None:
    folder = write_adapter(ADAPTERS["plain"], BASES["llama_tied"], tmp_path / "a")
    (other,) = (rank for rank in group.ranks if isinstance(rank, RankProcess))
    assert isinstance(other, AdapterRunner)
    sent: list[str] = []
    send = other._channel.send
    other._channel.send = lambda m: sent.append(type(m).__name__) or send(m)  # type: ignore[method-assign,func-returns-value]
    _, read = group.read_adapter("a", str(folder))
    group.install_adapter(1, read)
    group.remove_adapter(1)
    del read
    gc.collect()
    assert sent == ["ReadAdapter", "InstallAdapter", "RemoveAdapter", "ForgetAdapter"]


def test_a_call_ends_with_the_rank(group: RankGroup, tmp_path: Path) -> None:
    folder = write_adapter(ADAPTERS["plain"], BASES["llama_tied"], tmp_path / "a")
    (other,) = (rank for rank in group.ranks if isinstance(rank, RankProcess))
    other.kill()
    end = time.monotonic() + 10
    while other._reader.is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(EngineDeadError, match="rank 1 has ended"):
        other.read_adapter("a", str(folder))
