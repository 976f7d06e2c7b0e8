"""Writes tests/data/llama/tiny.npz: log-probabilities of seeded tiny models by transformers in float32.

Models come from tests/support/tinymodel.py; quantised ones are given to transformers with the values that
their file holds. Run in the golden environment: python tests/golden/make_llama_tiny.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaForCausalLM

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.tinymodel import (  # noqa: E402
    GGUF_MODELS,
    MODELS,
    Tiny,
    file_values,
    token_ids,
    write_checkpoint,
)

OUT = ROOT / "tests" / "data" / "llama" / "tiny.npz"
TOP = 8
GREEDY = 24


def reference(model: Tiny, values: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """top_ids, top_logprobs: [tokens, 8] after each token of the fixed text; greedy: [24] ids after its end.

    Args:
        values: float32 tensors by Hugging Face's names, in place of the checkpoint's own.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(model, Path(folder))
        hf = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if values is not None:
        state = {name: torch.from_numpy(v) for name, v in values.items()}
        hf.load_state_dict(state, strict=False)
        hf.tie_weights()
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


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    arrays: dict[str, np.ndarray] = {}
    for name, model in MODELS.items():
        arrays |= {f"{name}.{k}": v for k, v in reference(model).items()}
    for name, (model, formats) in GGUF_MODELS.items():
        arrays |= {f"{name}.{k}": v for k, v in reference(model, file_values(model, formats)).items()}
    made_by = {
        "made_by": "tests/golden/make_llama_tiny.py",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32 logits, log_softmax in float64",
    }
    arrays["provenance"] = np.array(json.dumps(made_by))
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main()
