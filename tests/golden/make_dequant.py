"""Writes tests/data/weights/dequant.json: random blocks and what the gguf package makes of them.

Run in the golden environment, where gguf is installed: python tests/golden/make_dequant.py
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import gguf
import numpy as np

OUT = Path(__file__).parents[1] / "data" / "weights" / "dequant.json"
FORMATS = (
    "f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "q5_0", "q5_1", "q5_k",
    "q2_k", "q3_k", "iq4_nl", "iq4_xs", "mxfp4",
)  # fmt: skip
SEED = 20
BLOCKS = 3


def case(name: str, rng: np.random.Generator) -> dict[str, object]:
    """Random bytes, drawn again until every value is finite (NaNs have no portable bits)."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = BLOCKS if elements > 1 else 16
    values = np.array(np.nan)
    while not np.isfinite(values).all():
        raw = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
        if name in ("f32", "f16"):
            values = raw.view({"f32": "<f4", "f16": "<f2"}[name]).astype(np.float32)
        else:
            values = gguf.quants.dequantize(raw, kind).astype(np.float32)
    return {"shape": [blocks, elements], "raw": raw.tobytes().hex(), "float32": values.tobytes().hex()}


def main() -> None:
    rng = np.random.default_rng(SEED)
    made_by = f"tests/golden/make_dequant.py with gguf {importlib.metadata.version('gguf')}, seed {SEED}"
    content = {"made_by": made_by, "cases": {name: case(name, rng) for name in FORMATS}}
    OUT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
