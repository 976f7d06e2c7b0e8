"""Seeded Qwen3 checkpoints of true layer sizes, and what transformers makes of them on the same GPU."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
TOP = 8
# Published sizes of the dense Qwen3 models.
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


def config(size: str) -> dict[str, Any]:
    """The config.json of such a model."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
        "num_key_value_heads": 8, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False, **SIZES[size],
    }  # fmt: skip


def write_seeded(size: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint in bf16: normals that keep activations of order one, logits as wide as a trained one's."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(size)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = {}
    for name, p in model.named_parameters():
        if p.ndim == 1:
            values = 1 + torch.randn(p.shape, generator=generator, device="cuda") / 8
        else:
            peak = 3.0 if "embed" in name or "lm_head" in name else 1.0
            values = torch.randn(p.shape, generator=generator, device="cuda") * (peak * p.shape[-1] ** -0.5)
        tensors[name] = values.to(torch.bfloat16).cpu()
    save_file(tensors, folder / "model.safetensors")
    del tensors, values
    free_torch()
    return folder


def free_torch() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def transformers_model(folder: Path, dtype: str) -> Iterator[Any]:
    """The checkpoint in transformers on the GPU, in 'float32' or 'bfloat16'."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to("cuda").eval()
    try:
        yield model
    finally:
        del model
        free_torch()


def logprobs(model: Any, ids: Array, wanted: list[Array] | None = None) -> tuple[Array, Array, Array]:
    """Teacher-forced: after each token, the best tokens and all that `wanted` names.

    Returns top_ids [n, 8], their log-probabilities [n, 8], and those of `wanted` [n, k] (empty for None).
    """
    import torch

    with torch.inference_mode():
        hidden = model.model(torch.tensor(ids[None].astype(np.int64), device="cuda")).last_hidden_state[0]
        tops, values, asked = [], [], []
        for start in range(0, len(ids), 512):
            logits = model.lm_head(hidden[start : start + 512]).float()
            scores = torch.log_softmax(logits, -1)
            best = scores.topk(TOP)
            tops.append(best.indices.cpu().numpy())
            values.append(best.values.cpu().numpy())
            if wanted is not None:
                index = torch.tensor(np.stack(wanted[start : start + 512]).astype(np.int64), device="cuda")
                asked.append(scores.gather(1, index).cpu().numpy())
    more = np.concatenate(asked) if asked else np.zeros((len(ids), 0), np.float32)
    return np.concatenate(tops), np.concatenate(values), more
