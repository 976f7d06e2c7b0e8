"""The accuracy gate at the sizes of Qwen3-0.6B, where torch and transformers are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.runtime.cuda.driver import probe


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_seeded_weights_of_true_sizes(tmp_path: Path) -> None:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.gpu.models.gate import main

    assert main(tmp_path / "model", "0.6B", [1, 16, 200, 1000, 4000]) == 0
