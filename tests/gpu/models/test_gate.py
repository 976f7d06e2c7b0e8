"""The accuracy gate at true sizes, where torch and transformers are installed. `-s` shows the tables."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.runtime.cuda.driver import probe
from tests.gpu import teacher
from tests.gpu.models.gate import HEADER, Row, gate
from tests.support.default_model import default_model
from tests.support.requantised import requantised

QUICK = [1, 16, 200, 1000, 4000]  # tokens of the texts
WHOLE = [*QUICK, 16000]
GOLDEN = Path(__file__).parents[2] / "data" / "smollm2" / "golden.npz"


@pytest.fixture
def torch() -> Any:
    if (reason := probe()) is not None:
        pytest.skip(reason)
    pytest.importorskip("transformers", reason="the gate compares with transformers, which is not installed")
    return pytest.importorskip("torch")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "lengths"),
    [
        ("0.6B", QUICK),
        pytest.param("0.6B", [16000], marks=pytest.mark.long),
        pytest.param("4B", WHOLE, marks=pytest.mark.long),
        pytest.param("8B", WHOLE, marks=pytest.mark.long),
        ("3.5-0.8B", QUICK),
        ("V2-Lite", QUICK),
        pytest.param("3.5-4B", WHOLE, marks=pytest.mark.long),
        pytest.param("30B-A3B", QUICK, marks=pytest.mark.long),
        pytest.param("35B-A3B", QUICK, marks=pytest.mark.long),
        pytest.param("V2-Lite", [16000], marks=pytest.mark.long),
    ],
)
def test_seeded_weights_of_true_sizes(torch: Any, size: str, lengths: list[int], tmp_path: Path) -> None:
    began = time.perf_counter()
    fields = teacher.config(size)
    tensors = teacher.seeded(fields, "cuda")
    texts = [np.random.default_rng(n).integers(0, fields["vocab_size"], n).astype(np.int32) for n in lengths]
    references = teacher.references(
        lambda dtype: teacher.transformers_model(fields, tensors, dtype, "cuda"), texts
    )
    judged = time.perf_counter()
    folder = teacher.write_checkpoint(fields, tensors, tmp_path / "model")
    tensors.clear()
    teacher.free_torch()
    written = time.perf_counter()
    rows = gate(folder, texts, references)
    (folder / "model.safetensors").unlink()
    ended = time.perf_counter()
    show(f"{fields['architectures'][0]} {size}, seeded", references, rows)
    print(f"s: references {judged - began:.0f}, file {written - judged:.0f}, gate {ended - written:.0f}")
    check(rows)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["q4_1", "bf16"])
def test_the_default_models_weights(torch: Any, form: str, tmp_path: Path) -> None:
    from tests.golden.make_smollm2 import load

    path = default_model()
    if form == "bf16":
        path = requantised(path, tmp_path / "bf16.gguf", "bf16")
    words = np.load(GOLDEN)["text.ids"].astype(np.int32)
    texts = [words[:n] for n in QUICK]

    @contextmanager
    def model(dtype: str) -> Any:
        yield load(path).to("cuda", getattr(torch, dtype))
        teacher.free_torch()

    def models(dtype: str) -> AbstractContextManager[Any]:
        return model(dtype)

    references = teacher.references(models, texts)
    rows = gate(path, texts, references)
    show(f"SmolLM2-135M, {form}", references, rows)
    check(rows)


def show(title: str, references: list[teacher.Reference], rows: list[Row]) -> None:
    exact = np.concatenate([r.exact for r in references])
    best, lead = np.median(np.exp(exact[:, 0])), np.median(exact[:, 0] - exact[:, 1])
    print(f"\n{title}; in the median the best token has {best:.2f} and leads by {lead:.2f} nat\n{HEADER}")
    print(*rows, sep="\n")


def check(rows: list[Row]) -> None:
    missed = [str(row) for row in rows if row.missed()]
    assert not missed, "\n".join(["rows miss the gate's bars:", *missed])
