"""The forward pass of dense Qwen3 (arXiv:2505.09388; transformers `modeling_qwen3.py`), written once; every
backend executes what it records. It differs from llama by a norm over each head of q and k before rotation.

Axes: T tokens of the step, R rows (sequences), L rows of the residual stream whose logits are wanted, M the
residual stream's width, H query heads, G KV heads, D head size, F feed-forward width, V vocabulary, N KV
blocks, Y layers, S tokens a block, W blocks a sequence, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pegainfer.kv.device.layout import PageLayout
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.coarse import GATE_UP_SWIGLU, LM_HEAD, QKV_NORM_ROPE_APPEND
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.sampler import head_of
from pegainfer.runner.program import INPUTS, Formats, Sizes, kv_pages, shape

# name -> shape; activations in Formats.activation.
BUFFERS: dict[str, tuple[str, ...]] = {
    "q": ("T", "H", "D"),
    "attn": ("T", "H", "D"),
    "act": ("T", "F"),
}


def groups(config: Qwen3Config, block_size: int, formats: Formats) -> tuple[PageLayout, ...]:
    """Pages of keys and values."""
    c = config
    return (kv_pages(c.num_layers, c.num_kv_heads, c.head_dim, block_size, formats),)


def forward(
    config: Qwen3Config, weights: Mapping[str, str], sizes: Sizes, formats: Formats | None = None
) -> Program:
    """Token ids to logits: x [T, M] and logits [L, V] are its outputs, `kv` the state it appends to.

    Args:
        weights: storage format of each weight by its name in models/qwen3/weights.py.
        formats: of what is computed; float32 throughout if None.
    """
    c, f = config, formats or Formats()
    b = Builder("qwen3")
    w = {name: b.weight(name, *dims, dtype=weights[name]) for name, dims in TABLE.shapes(c).items()}
    cos_sin = b.weight("cos_sin", sizes.num_positions, c.head_dim, dtype="f32")
    pages = sizes.pages(b, "kv")
    kv, slots = pages.parts["kv"], pages.places
    axes = {"H": c.num_heads, "D": c.head_dim, "F": c.intermediate_size}
    token_ids, positions, query_starts, query_lens, context_lens, logit_rows = (
        b.input(name, *letters) for name, letters in INPUTS.items()
    )
    q, attn, act = (b.buffer(n, *shape(letters, axes), dtype=f.activation) for n, letters in BUFFERS.items())
    x = b.output("x", "T", c.hidden_size, dtype=f.residual)  # so that `prompt_logprobs` can read it
    partial = b.buffer("partial", "T", c.hidden_size)  # float32, in which ranks add up
    logits = b.output("logits", "L", c.vocab_size)
    eps, scale = c.norm_eps, c.head_dim**-0.5

    b.emit(EMBEDDING, out=x, table=w["embed"], ids=token_ids)
    for layer in range(c.num_layers):
        attn_norm, wq, wk, wv, q_norm, k_norm, wo, mlp_norm, w_gate, w_up, w_down = (
            w[e.name.format(layer)] for e in TABLE.layer
        )
        b.emit(
            QKV_NORM_ROPE_APPEND, {"eps": eps, "layer": layer},
            q=q, kv=kv, x=x, norm=attn_norm, wq=wq, wk=wk, wv=wv, positions=positions, slots=slots,
            cos_sin=cos_sin, q_norm=q_norm, k_norm=k_norm,
        )  # fmt: skip
        b.emit(
            ATTENTION, {"layer": layer, "scale": scale},
            out=attn, q=q, kv=kv, query_starts=query_starts, query_lens=query_lens,
            context_lens=context_lens, block_table=pages.block_table,
        )  # fmt: skip
        b.emit(LINEAR, out=partial, a=attn.view("T", c.q_size), w=wo)
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
        b.emit(GATE_UP_SWIGLU, {"eps": eps}, out=act, x=x, norm=mlp_norm, w_gate=w_gate, w_up=w_up)
        b.emit(LINEAR, out=partial, a=act, w=w_down)
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    b.emit(
        LM_HEAD, {"eps": eps},
        logits=logits, x=x, rows=logit_rows, norm=w["norm"], w=w[TABLE.head_name(c)],
    )  # fmt: skip
    return b.build()


head = partial(head_of, TABLE)  # the last call, for programs that apply it to other rows
