"""The forward pass of llama, written once; every backend executes what it records.

Axes: T tokens of the step, R rows (sequences), L rows of the residual stream whose logits are wanted, M the
residual stream's width, H query heads, G KV heads, D head size, F feed-forward width, V vocabulary, N KV
blocks, Y layers, S tokens a block, W blocks a sequence, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.weights import GLOBAL, LAYER, LM_HEAD, entries
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.coarse import GATE_UP_SWIGLU, QKV_NORM_ROPE_APPEND
from pegainfer.ops.coarse import LM_HEAD as LM_HEAD_OP
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR_RESIDUAL
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.sample import TOKEN_LOGPROBS
from pegainfer.ops.spec import Role
from pegainfer.ops.tensor import Dim

# name -> shape; int32, staged by the host before each step (kv/device/stage.py says what they hold).
INPUTS: dict[str, tuple[str, ...]] = {
    "token_ids": ("T",),
    "positions": ("T",),
    "slots": ("T",),
    "query_starts": ("R",),
    "query_lens": ("R",),
    "context_lens": ("R",),
    "block_table": ("R", "W"),
    "logit_rows": ("L",),
}
# name -> shape; activations, all float32.
BUFFERS: dict[str, tuple[str, ...]] = {
    "q": ("T", "H", "D"),
    "attn": ("T", "H", "D"),
    "act": ("T", "F"),
}
OUTPUTS: dict[str, tuple[str, ...]] = {
    "x": ("T", "M"),  # the residual stream; an output, so that `prompt_logprobs` can read it
    "logits": ("L", "V"),
}


@dataclass(frozen=True)
class Sizes:
    """What a recorded program is sized for beside the model's own widths."""

    num_blocks: int
    block_size: int
    blocks_per_seq: int
    num_positions: int  # rows of the rotation's table: the served length
    kv_dtype: str = "f32"


def forward(config: LlamaConfig, formats: Mapping[str, str], sizes: Sizes) -> Program:
    """Token ids to logits: x and logits are its outputs, `kv` the state it appends to.

    Args:
        formats: storage format of each weight by its name in models/llama/weights.py.
    """
    c = config
    b = Builder("llama")
    w = {name: b.weight(name, *shape, dtype=formats[name]) for name, shape in shapes(c).items()}
    cos_sin = b.weight("cos_sin", sizes.num_positions, c.head_dim, dtype="f32")
    kv_shape = (sizes.num_blocks, c.num_layers, 2, c.num_kv_heads, sizes.block_size, c.head_dim)
    kv = b.state("kv", *kv_shape, dtype=sizes.kv_dtype)
    axes = _axes(c) | {"W": sizes.blocks_per_seq}
    token_ids, positions, slots, query_starts, query_lens, context_lens, block_table, logit_rows = (
        b.input(name, *_shape(letters, axes)) for name, letters in INPUTS.items()
    )
    q, attn, act = (b.buffer(name, *_shape(letters, axes)) for name, letters in BUFFERS.items())
    x, logits = (b.output(name, *_shape(letters, axes)) for name, letters in OUTPUTS.items())
    eps, scale = c.norm_eps, c.head_dim**-0.5

    b.emit(EMBEDDING, out=x, table=w["embed"], ids=token_ids)
    for layer in range(c.num_layers):
        attn_norm, wq, wk, wv, wo, mlp_norm, w_gate, w_up, w_down = (w[e.name.format(layer)] for e in LAYER)
        b.emit(
            QKV_NORM_ROPE_APPEND, {"eps": eps, "layer": layer},
            q=q, kv=kv, x=x, norm=attn_norm, wq=wq, wk=wk, wv=wv,
            positions=positions, slots=slots, cos_sin=cos_sin,
        )  # fmt: skip
        b.emit(
            ATTENTION, {"layer": layer, "scale": scale},
            out=attn, q=q, kv=kv, query_starts=query_starts, query_lens=query_lens,
            context_lens=context_lens, block_table=block_table,
        )  # fmt: skip
        b.emit(LINEAR_RESIDUAL, x=x, a=attn.view("T", c.q_size), w=wo)
        b.emit(GATE_UP_SWIGLU, {"eps": eps}, out=act, x=x, norm=mlp_norm, w_gate=w_gate, w_up=w_up)
        b.emit(LINEAR_RESIDUAL, x=x, a=act, w=w_down)
    b.emit(LM_HEAD_OP, {"eps": eps}, logits=logits, x=x, rows=logit_rows, norm=w["norm"], w=w[_head(c)])
    return b.build()


def prompt_logprobs(config: LlamaConfig, formats: Mapping[str, str], max_logprobs: int) -> Program:
    """Log-probabilities of given tokens after rows of the residual stream that `forward` has left.

    A program of its own, because logits at every position are more than one step's output holds.
    """
    b = Builder("llama_prompt_logprobs")
    axes = _axes(config) | {"K": max_logprobs}
    x = b.input("x", *_shape(OUTPUTS["x"], axes), dtype="f32")
    rows, targets, top_lens = (b.input(name, "L") for name in ("logit_rows", "targets", "top_lens"))
    norm, w = (b.weight(name, *shapes(config)[name], dtype=formats[name]) for name in ("norm", _head(config)))
    logits = b.buffer("logits", *_shape(OUTPUTS["logits"], axes))
    results = {
        o.name: b.output(o.name, *_shape(o.axes, axes), dtype=o.dtypes[0])
        for o in TOKEN_LOGPROBS.operands
        if o.role is Role.OUT
    }
    b.emit(LM_HEAD_OP, {"eps": config.norm_eps}, logits=logits, x=x, rows=rows, norm=norm, w=w)
    b.emit(TOKEN_LOGPROBS, None, **results, logits=logits, targets=targets, top_lens=top_lens)
    return b.build()


def shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Each weight's shape by its name."""
    return {e.name.format(i): e.sizes(config) for e, i in entries(config)}


def _head(config: LlamaConfig) -> str:
    return GLOBAL[0].name if config.tie_word_embeddings else LM_HEAD.name


def _axes(c: LlamaConfig) -> dict[str, int]:
    return {
        "M": c.hidden_size,
        "H": c.num_heads,
        "D": c.head_dim,
        "F": c.intermediate_size,
        "V": c.vocab_size,
    }


def _shape(letters: tuple[str, ...], axes: Mapping[str, int]) -> tuple[Dim, ...]:
    """Letters that are not among `axes` change from step to step and stay symbolic."""
    return tuple(axes.get(letter, letter) for letter in letters)
