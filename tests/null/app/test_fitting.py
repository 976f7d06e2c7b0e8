"""Models that do not fit into memory: by how much, and what would."""

from __future__ import annotations

import pytest

from pegainfer.app.bounds import model_groups, runner_info
from pegainfer.app.config import EngineConfig
from pegainfer.app.fitting import GIB, Need, check_fits, host_weights, need_of
from pegainfer.app.gpu_memory import Budget, check_weights
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.models.qwen3_5.engine import from_config
from tests.null.models.qwen3_5.test_moe_config import QWEN3_5_35B_A3B

VALUES = 30 * GIB  # of the matrices of a model whose bf16 file has 60 GiB


def bf16(cache: float = 1.0, least: float = 0.5) -> Need:
    return Need(int(60.25 * GIB), int(cache * GIB), int(least * GIB), VALUES, 60 * GIB)


def refused(need: Need, free: float) -> str:
    with pytest.raises(ConfigError) as error:
        check_fits(need, int(free * GIB))
    return str(error.value)


def test_what_fits_is_not_refused() -> None:
    check_fits(bf16(), int(61.25 * GIB))


def test_it_says_by_how_much() -> None:
    message = refused(bf16(), 40)
    assert "expected ≤ 40.00 GiB, which are free" in message
    assert "got 61.25 GiB (weights 60.25, KV cache 1.00): 21.25 GiB too much" in message


def test_a_smaller_cache_would_do() -> None:
    assert "set kv_cache_memory to at most 0.75 GiB" in refused(bf16(), 61)
    assert "kv_cache_memory" not in refused(bf16(), 60)


@pytest.mark.parametrize(
    ("free", "file"), [(40, "use a Q8_0 file, some 32.12 GiB"), (20, "use a Q4_K_M file, some 18.62")]
)
def test_a_quantised_file_would_do(free: float, file: str) -> None:
    assert file in refused(bf16(), free)


def test_only_a_larger_machine_would_do() -> None:
    assert "use a machine with 60.75 GiB free" in refused(bf16(), 10)
    small = Need(18 * GIB, GIB, GIB, VALUES, int(VALUES * 4.9 / 8))  # a Q4_K_M file already
    assert "use a machine with 19.00 GiB free" in refused(small, 10)


def test_what_a_published_model_needs() -> None:
    model = from_config(QWEN3_5_35B_A3B, "config.json")
    config = EngineConfig(max_model_len=4096, kv_cache_memory=GIB)
    need = need_of(model, model_groups(model, config), runner_info(model, config, SchedulerConfig()))
    experts = 256 * 3 * 512 * 2048 + 256 * 2048 + 3 * 512 * 2048 + 2048  # with routers and the shared one
    linear = (8192 + 4096 + 32 + 32 + 4096) * 2048 + 4 * 8192
    full = (2 * 4096 + 2 * 512 + 4096) * 2048
    assert need.values == 40 * experts + 30 * linear + 10 * full + 2 * 248320 * 2048
    assert need.matrices == 2 * need.values
    assert host_weights(model, 4096) == need.weights
    assert 0 < need.least_cache <= need.cache <= GIB


def budget(total: int, weights: int, allowed: int) -> Budget:
    return Budget(
        total=total * GIB, used=GIB, weights=weights * GIB, steps=2 * GIB, adapters=0, allowed=allowed * GIB
    )


def test_weights_that_a_gpu_cannot_hold() -> None:
    check_weights(budget(80, 60, 72))
    with pytest.raises(ConfigError, match=r"got 75.00 GiB, 3.00 GiB too much.*utilization above 0.94"):
        check_weights(budget(80, 72, 72))
    with pytest.raises(ConfigError, match=r"use a GPU with more than 83.00 GiB, or --device cpu"):
        check_weights(budget(80, 80, 72))
