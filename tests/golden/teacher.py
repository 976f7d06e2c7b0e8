"""What transformers makes of a seeded tiny model: shared by the scripts that write golden values."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support.tinymodel import Tiny, token_ids, write_checkpoint

TOP = 8
GREEDY = 24


def reference(
    line: type[Any], model: Tiny, values: Mapping[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """top_ids, top_logprobs: [tokens, 8] after each token of the fixed text; greedy: [24] ids after its end.

    Args:
        line: transformers' class of such models.
        values: float32 tensors by Hugging Face's names, in place of the model's own. They go through a
            checkpoint, as loading alone knows how transformers arranges the tensors of a class.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(model, Path(folder), values)
        hf = line.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([token_ids(model)])
    with torch.inference_mode():
        logprobs = torch.log_softmax(hf(ids).logits[0].double(), -1)
        best = logprobs.topk(TOP)
        greedy = []
        for _ in range(GREEDY):
            greedy.append(int(hf(ids).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([[greedy[-1]]])], 1)
    return {
        "top_ids": best.indices.numpy().astype(np.uint16),
        "top_logprobs": best.values.numpy().astype(np.float32),
        "greedy": np.array(greedy, np.uint16),
    }


def write(out: Path, script: str, found: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Saves values by '<model>.<name>', with what made them."""
    arrays = {f"{model}.{name}": v for model, values in found.items() for name, v in values.items()}
    made_by = {
        "made_by": f"tests/golden/{script}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32 logits, log_softmax in float64",
    }
    arrays["provenance"] = np.array(json.dumps(made_by))
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, **arrays)
