"""A program of one projection to q, k and v and the attention that follows it."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.ops.activation import SIGMOID_GATE
from pegainfer.ops.attention import ATTENTION
from pegainfer.ops.coarse import GATED_QKV_NORM_ROPE_APPEND, QKV_NORM_ROPE_APPEND
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.tensor import Tensor


@dataclass(frozen=True)
class Heads:
    """Sizes: `blocks` of `block_size` tokens, `width` of them a row; `layers` of which the first is used."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    dtype: str = "bf16"
    norms: bool = False  # of heads, as Qwen3 has them
    hidden: int = 128
    blocks: int = 4
    layers: int = 2
    block_size: int = 16
    width: int = 4
    gated: bool = False  # whether what attention leaves is gated, as in Qwen3.5
    cached: str = ""  # what the cache holds; '': `dtype`

    @property
    def cache(self) -> tuple[int, ...]:
        return (self.blocks, self.layers, 2, self.kv_heads, self.block_size, self.head_dim)


def heads_program(h: Heads, *, layer: int = 0, times: int = 1) -> Program:
    """Input x [T, hidden], output out [T, H, D], state kv.

    Args:
        layer: that attention reads; the projection appends to layer 0.
        times: how often attention reads q.
    """
    b = Builder("heads")
    heads, d = h.kv_heads * h.group, h.head_dim
    q, out = b.buffer("q", "T", heads, d, dtype=h.dtype), b.output("out", "T", heads, d, dtype=h.dtype)
    kv = b.state("kv", *h.cache, dtype=h.cached or h.dtype)
    scales = {"k_scale": 0.37, "v_scale": 2.9} if h.cached else {}
    x, norm = b.input("x", "T", h.hidden, dtype=h.dtype), b.input("norm", h.hidden, dtype="f32")
    rows = {"wq": heads * d, "wk": h.kv_heads * d, "wv": h.kv_heads * d}
    rows |= {"wg": heads * d} if h.gated else {}
    weights = {name: b.weight(name, count, h.hidden, dtype=h.dtype) for name, count in rows.items()}
    norms = {n: b.input(n, d, dtype="f32") for n in ("q_norm", "k_norm")} if h.norms else {}
    cos_sin = b.input("cos_sin", h.width * h.block_size, d, dtype="f32")
    positions, slots = (b.input(name, "T") for name in ("positions", "slots"))
    lens = {name: b.input(name, "R") for name in ("query_starts", "query_lens", "context_lens")}
    table = b.input("block_table", "R", h.width)
    spec = QKV_NORM_ROPE_APPEND
    gate: dict[str, Tensor] = {}
    if h.gated:
        spec, gate = GATED_QKV_NORM_ROPE_APPEND, {"gate": b.buffer("gate", "T", heads * d, dtype=h.dtype)}
    b.emit(
        spec, {"eps": 1e-6, "layer": 0, **scales},
        q=q, **gate, kv=kv, x=x, norm=norm, **weights, positions=positions, slots=slots, cos_sin=cos_sin,
        **norms,
    )  # fmt: skip
    for _ in range(times):
        b.emit(
            ATTENTION, {"layer": layer, "scale": d**-0.5, **scales},
            out=out, q=q, kv=kv, **lens, block_table=table,
        )  # fmt: skip
    if h.gated:
        b.emit(SIGMOID_GATE, x=out.view("T", heads * d), gate=gate["gate"])
    return b.build()
