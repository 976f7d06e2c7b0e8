"""Writes tests/data/ops/rope.json: what transformers makes of rope parameters, and of one rotated tensor.

Run in the golden environment, where transformers is installed: python tests/golden/make_rope.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

OUT = Path(__file__).parents[1] / "data" / "ops" / "rope.json"
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
# head size, theta, scaling: SmolLM2, Llama 3.1 8B, Llama 3.2 1B, a linearly stretched Llama 2, Qwen3 as its
# model cards stretch it, then yarn with each of its other numbers
SETTINGS = (
    (64, 1e5, None),
    (128, 5e5, {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}),
    (64, 5e5, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}),
    (128, 1e4, {"rope_type": "linear", "factor": 4.0}),
    (128, 1e6, YARN),
    (64, 1e4, {**YARN, "attention_factor": 1.5, "beta_fast": 24, "beta_slow": 3, "truncate": False}),
    (64, 1e4, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "factor": 40.0}),
    (128, 1e6, {**YARN, "factor": 1.0}),
)
POSITIONS = (0, 1, 17, 8191)
SEED = 3


def case(head_dim: int, theta: float, scaling: dict[str, object] | None) -> dict[str, object]:
    """Frequencies as float32 bits; q rotated at POSITIONS, float32 [positions, 2 heads, D]."""
    rope = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim)
    config.max_position_embeddings = 131072
    config.rope_parameters = rope
    module = LlamaRotaryEmbedding(config)
    torch.manual_seed(SEED)
    q = torch.randn(1, 2, len(POSITIONS), head_dim)
    cos, sin = module(q, torch.tensor([POSITIONS]))
    rotated, _ = apply_rotary_pos_emb(q, q, cos, sin)
    return {
        "head_dim": head_dim,
        "theta": theta,
        "scaling": scaling,
        "attention_factor": module.attention_scaling,
        "inv_freq": module.inv_freq.numpy().astype("<f4").tobytes().hex(),
        "q": q[0].transpose(0, 1).contiguous().numpy().astype("<f4").tobytes().hex(),
        "rotated": rotated[0].transpose(0, 1).contiguous().numpy().astype("<f4").tobytes().hex(),
    }


def main() -> None:
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    made_by = f"tests/golden/make_rope.py with {versions}"
    content = {"made_by": made_by, "positions": POSITIONS, "cases": [case(*s) for s in SETTINGS]}
    OUT.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
