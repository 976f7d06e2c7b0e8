"""Writes tests/data/ops/quantize.json: blocks of float32 and what the gguf package's quantisers make of them.

Run in the golden environment, where gguf is installed: python tests/golden/make_quantize.py
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import gguf
import numpy as np

OUT = Path(__file__).parents[1] / "data" / "ops" / "quantize.json"
FORMATS = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
SEED = 21


def values(rng: np.random.Generator) -> np.ndarray:
    """[8, 64] float32: trained weights' size, zeros, equals, one sign, halves, large, tiny, an outlier."""
    x = rng.standard_normal((8, 64)).astype(np.float32) * np.float32(0.05)
    x[1] = 0
    x[2] = x[2, 0]
    x[3] = np.abs(x[3])
    x[4] = np.round(x[4] * 40) / 2  # 127 / max and 8 / max put many values halfway
    x[5] *= 1e5
    x[6] *= 1e-4
    x[7, 40] = -30
    return x


def main() -> None:
    x = values(np.random.default_rng(SEED))
    cases = {
        name: gguf.quants.quantize(x, gguf.GGMLQuantizationType[name.upper()]).tobytes().hex()
        for name in FORMATS
    }
    made_by = f"tests/golden/make_quantize.py with gguf {importlib.metadata.version('gguf')}, seed {SEED}"
    content = {"made_by": made_by, "shape": x.shape, "float32": x.tobytes().hex(), "cases": cases}
    OUT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
