"""Lowering of the projection to q, k and v. Norm, RoPE and the cache's append follow as a launch of their
own, or decode attention does them."""

from __future__ import annotations

from dataclasses import replace

from pegainfer.lower.cuda.attention import attention_problem
from pegainfer.lower.cuda.attention_choice import lacks_append
from pegainfer.lower.cuda.gemm import SIXTEEN, GemmProblem, project
from pegainfer.lower.cuda.linear import gemm_problem, scale_of, weights_of
from pegainfer.lower.cuda.lora_layers import add_adapters, normalised, project_with_adapters, same_factors
from pegainfer.lower.cuda.lowering import LoweringContext, Step, blocks, handles
from pegainfer.lower.cuda.packed import ExpandChoice, choose_packed, expand, forms_of, linear_weight
from pegainfer.lower.cuda.plan import Place, struct
from pegainfer.lower.cuda.pointwise import HEADS, inverse_scales, layer_address, page_stride
from pegainfer.lower.cuda.rewrite import Calls, Rule, Temporaries, lacks_own_heads
from pegainfer.ops.float8 import E4M3
from pegainfer.ops.fused_heads import APPEND_ATTENTION, GATE_HEADS, PROJECT_HEADS
from pegainfer.ops.lora_layers import ADAPTED
from pegainfer.ops.program import OpCall, is_read
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.arguments import NORM_ROPE_APPEND
from pegainfer.runtime.cuda.packed import PackedForm
from pegainfer.runtime.cuda.tensor import item_bytes

# Attention finishes the heads that the projection leaves to it


def _finish_in_attention(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    qkv, attention = (c.tensors for c in calls[:2])
    kv = qkv["kv"]
    if (lacking := lacks_own_heads(calls)) is not None:
        return lacking
    problem = attention_problem(calls[1], step)
    if not attention["q"].dtype == attention["out"].dtype == problem.activation:
        return f"q and out of {problem.activation}, beside a cache of {kv.dtype}"
    if (lacking := lacks_append(problem, step.target)) is not None:
        return lacking
    tokens, query_heads, head_dim = qkv["q"].shape
    gated = 2 if "wg" in qkv else 1
    kv_heads = qkv["kv"].shape[3]
    assert isinstance(query_heads, int) and isinstance(kv_heads, int)
    heads = temporaries.tensor(
        "projected heads", tokens, gated * query_heads + 2 * kv_heads, head_dim, dtype=qkv["q"].dtype
    )
    eps = calls[0].attrs["eps"]
    with_adapters = "adapters" in qkv
    project_heads = ADAPTED[PROJECT_HEADS.name] if with_adapters else PROJECT_HEADS
    projected = [o.name for o in project_heads.operands if o.name in qkv]
    taken = {n: qkv[n] for n in ("positions", "slots", "cos_sin", "q_norm", "k_norm") if n in qkv}
    rows = {n: attention[n] for n in ("query_starts", "query_lens", "context_lens", "block_table")}
    return [
        OpCall.of(project_heads, {"eps": eps}, heads=heads, **{n: qkv[n] for n in projected}),
        OpCall.of(
            APPEND_ATTENTION, {"eps": eps, **calls[1].attrs},
            out=attention["out"], kv=attention["kv"], heads=heads, **taken, **rows,
        ),
    ]  # fmt: skip


def _finish_and_gate(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    made = _finish_in_attention(calls, step, temporaries)
    if isinstance(made, str):
        return made
    out, gate = calls[1].tensors["out"], calls[0].tensors["gate"].storage
    if (calls[2].tensors["x"].storage, calls[2].tensors["gate"].storage) != (out.storage, gate):
        return "a gate of what attention leaves"
    if gate.kind is not Kind.BUFFER or is_read(calls[3:], gate):
        return "a gate that nothing else reads"
    return [*made, OpCall.of(GATE_HEADS, {}, x=out, heads=made[0].tensors["heads"])]


FINISH_AND_GATE = Rule(
    "finish_and_gate_heads",
    (frozenset({"gated_qkv_norm_rope_append"}), frozenset({"attention"}), frozenset({"sigmoid_gate"})),
    _finish_and_gate,
)
FINISH_IN_ATTENTION = Rule(
    "finish_heads_in_attention",
    (frozenset({"qkv_norm_rope_append", "lora_qkv_norm_rope_append"}), frozenset({"attention"})),
    _finish_in_attention,
)


# Launches


def _fused_heads(call: OpCall) -> bool:
    x, q, kv = (call.tensors[n] for n in ("x", "q", "kv"))
    if "gate" in call.tensors and call.tensors["gate"].dtype != x.dtype:
        return False
    widths = isinstance(x.shape[1], int) and x.shape[1] % 8 == 0 and q.shape[2] in HEADS
    cached = kv.dtype == x.dtype or (kv.dtype, x.dtype) == (E4M3, "bf16")
    return x.dtype in SIXTEEN and q.dtype == x.dtype and cached and widths


def _project(c: LoweringContext, heads: Place) -> None:
    names, eps = weights_of(c.call), c.call.attrs["eps"]
    p, x, norm = gemm_problem(c.call, c.sizes, c.target), c.address("x"), c.vector("norm")
    runs = forms_of(c.call, names)
    if len(runs) <= 1:
        run = project_with_adapters if "adapters" in c.call.tensors else project
        run(c, p, heads, x, linear_weight(c, *names), norm=norm, eps=eps, scale=scale_of(c))
        return
    p, x = normalised(c, p, x, norm, eps)
    _project_runs(c, p, heads, x, runs)
    if "adapters" in c.call.tensors:
        add_adapters(c, p, heads, x)


def _project_runs(
    c: LoweringContext, p: GemmProblem, heads: Place, x: Place, runs: list[tuple[tuple[str, ...], PackedForm]]
) -> None:
    """Weights of several packed forms: a GEMM each, or all of them expanded into one for many rows."""
    item, eps, scale = item_bytes(p.dtype), c.call.attrs["eps"], scale_of(c)
    rows = [sum(int(c.call.tensors[name].shape[0]) for name in names) for names, _ in runs]
    choices = [choose_packed(p.m, n, p.k, form, c.target) for n, (_, form) in zip(rows, runs, strict=True)]
    expanded = next((choice for choice in choices if isinstance(choice, ExpandChoice)), None)
    whole = c.scratch(p.n * p.k * item) if expanded is not None else None
    first = 0
    for n, (names, form) in zip(rows, runs, strict=True):
        w = linear_weight(c, *names)
        if expanded is not None and whole is not None:
            expand(c, w, n, p.k, expanded.why, whole + first * p.k * item)
        else:
            part = replace(p, n=n, form=form.name)
            project(c, part, heads + first * item, x, w, ld_out=p.n, eps=eps, scale=scale)
        first += n
    if whole is not None:
        project(c, p, heads, x, whole, eps=eps, scale=scale)


@handles("project_heads", "scaled_project_heads", "lora_project_heads", "lora_scaled_project_heads")
def _project_heads(c: LoweringContext) -> None:
    _project(c, c.address("heads"))


@handles(
    "lora_qkv_norm_rope_append", "lora_scaled_qkv_rope_append",
    whole=lambda call: _fused_heads(call) and same_factors(call),
)  # fmt: skip
def _lora_qkv(c: LoweringContext) -> None:
    _qkv(c)


@handles("qkv_norm_rope_append", "scaled_qkv_rope_append", "gated_qkv_norm_rope_append", whole=_fused_heads)
def _qkv(c: LoweringContext) -> None:
    s, dtype = c.sizes, c.dtype("x")
    gate = c.address("gate") if "gate" in c.call.tensors else None
    count = (s["H"] if gate is None else 2 * s["H"]) + 2 * s["G"]
    heads = c.scratch(s["T"] * count * s["D"] * item_bytes(dtype))
    _project(c, heads)
    q_norm, k_norm, cos_sin = (c.vector(n) for n in ("q_norm", "k_norm", "cos_sin"))
    k_inverse, v_inverse = inverse_scales(c)
    args = struct(
        NORM_ROPE_APPEND, q=c.address("q"), gate=gate, kv=layer_address(c), qkv=heads, q_norm=q_norm,
        k_norm=k_norm, positions=c.address("positions"), slots=c.address("slots"), cos_sin=cos_sin,
        page_stride=page_stride(c), tokens=s["T"], h=s["H"], g=s["G"], block_size=s["S"],
        eps=c.call.attrs["eps"], k_inverse=k_inverse, v_inverse=v_inverse,
    )  # fmt: skip
    grid = (blocks(s["T"] * count, 8), 1, 1)
    kernel = f"norm_rope_append_{E4M3 if c.dtype('kv') == E4M3 else dtype}_d{s['D']}"
    c.launch(kernel, grid, 256, [args], why="heads of 16 bits")
