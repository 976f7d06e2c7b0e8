"""Lowering of the projection to q, k and v. What follows it is a launch, or left to attention."""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer.kernels.cuda.attention import finishes_heads
from pegainfer.kernels.cuda.gemm import SIXTEEN, GemmProblem, project
from pegainfer.kernels.cuda.pointwise import HEADS, layer_address, page_stride
from pegainfer.kernels.cuda.site import ProjectedHeads, Site, blocks, handles
from pegainfer.ops.program import OpCall
from pegainfer.ops.spec import Role
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.cuda.launch import f32, i32, i64, ptr, struct
from pegainfer.runtime.cuda.tensor import item_bytes


def _fused_heads(call: OpCall) -> bool:
    x, q, kv = (call.tensors[n] for n in ("x", "q", "kv"))
    widths = isinstance(x.shape[1], int) and x.shape[1] % 8 == 0 and q.shape[2] in HEADS
    return x.dtype in SIXTEEN and q.dtype == kv.dtype == x.dtype and widths


@handles("qkv_norm_rope_append", whole=_fused_heads)
def _qkv(site: Site) -> None:
    s, dtype, eps = site.sizes(), site.dtype("x"), site.this.attrs["eps"]
    heads = s["H"] + 2 * s["G"]
    width = heads * s["D"]
    nbytes, left_to_attention = s["T"] * width * item_bytes(dtype), _left_to_attention(site)
    qkv = site.memory.kept("projected heads", nbytes) if left_to_attention else site.scratch(nbytes)
    problem = GemmProblem(s["T"], width, s["M"], dtype, "store", norm=True)
    w = site.matrix("wq", "wk", "wv", dtype=dtype)
    project(site, problem, qkv, site.address("x"), w, norm=site.vector("norm"), eps=eps)
    q_norm, k_norm, cos_sin = (site.vector(n) for n in ("q_norm", "k_norm", "cos_sin"))
    positions, slots = site.address("positions"), site.address("slots")
    if left_to_attention:
        site.hand(ProjectedHeads(qkv, q_norm, k_norm, positions, slots, cos_sin, eps))
        return
    args = struct(
        ptr(site.address("q")), ptr(layer_address(site)), ptr(qkv), ptr(q_norm), ptr(k_norm), ptr(positions),
        ptr(slots), ptr(cos_sin), i64(page_stride(site)), i32(s["T"]), i32(s["H"]), i32(s["G"]), i32(s["S"]),
        f32(eps),
    )  # fmt: skip
    site.launch(f"norm_rope_append_{dtype}_d{s['D']}", (blocks(s["T"] * heads, 8), 1, 1), 256, [args])


def _left_to_attention(site: Site) -> bool:
    """Whether the attention that follows finishes the heads, and is all that reads this q."""
    call, after = site.this, site.following
    if site.apart or after is None or after.spec.name != "attention":
        return False
    q = call.tensors["q"].storage
    same = q is after.tensors["q"].storage and call.tensors["kv"].storage is after.tensors["kv"].storage
    if not same or q.kind is not Kind.BUFFER or call.attrs["layer"] != after.attrs["layer"]:
        return False
    return finishes_heads(site, after) and not _read_again(site.rest[1:], q)


def _read_again(calls: Sequence[OpCall], t: Tensor) -> bool:
    """Whether one of the calls reads what t holds now."""
    for call in calls:
        roles = {
            o.role for o in call.spec.operands if o.name in call.tensors and call.tensors[o.name].storage is t
        }
        if roles:
            return roles != {Role.OUT}
    return False
