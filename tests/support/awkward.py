"""The config of a llama whose sizes suit no kernel."""

from __future__ import annotations

from pegainfer.models.llama.config import LlamaConfig

# Widths that are no multiple of a tile of 16 rows but of a block of 32 columns where they must be.
CONFIG = LlamaConfig(
    vocab_size=203,
    hidden_size=96,
    intermediate_size=160,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=48,
    norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=640,
    tie_word_embeddings=True,
)
