"""The forward pass of one decoded row as one launch (sm90/pass/row.cuh), recognised in a recorded program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pegainfer.lower.cuda.fp8 import codes_and_scales, stays_fp8
from pegainfer.lower.cuda.linear import matrices
from pegainfer.lower.cuda.lowering import LoweringContext, Operands, Step, handles
from pegainfer.lower.cuda.plan import Boxes, Place, struct
from pegainfer.lower.cuda.rewrite import Calls, Rule, Temporaries
from pegainfer.lower.cuda.target import Target
from pegainfer.ops.float8 import E4M3
from pegainfer.ops.fused import DECODE_PASS, decode_pass
from pegainfer.ops.program import OpCall
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.cuda.arguments import MAX_LAYERS, PASS, PASS_LAYERS
from pegainfer.runtime.cuda.device import DeviceInfo
from pegainfer.runtime.cuda.memory import aligned
from pegainfer.runtime.cuda.packed import OF_FORMAT
from pegainfer.runtime.cuda.tensor import item_bytes

LAYER = ("qkv_norm_rope_append", "attention", "linear_residual", "gate_up_swiglu", "linear_residual")
# As in pass/operands.cuh; MAX_CHUNKS: of 8 columns that a thread multiplies, in pass/row.cuh.
WARPS, THREADS, ROUND, MAX_CHUNKS = 8, 288, 256, 6
STAGE, MIN_DEPTH = 20 << 10, 4  # bytes of a stage where no row is longer; stages
HEAD_DIMS = (64, 128)
FP8_ROWS = "fp8_rows"  # the FP8 weights that the kernel takes, as fp8.stays_fp8 names them
PAGE = 16  # tokens


@dataclass(frozen=True)
class RowPass:
    """A pass that the kernel serves, in numbers.

    weights: of the layers, as fp8.stays_fp8 says it.
    """

    width: int  # M
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    layers: int
    block_size: int
    dtype: str
    weights: str = ""

    @property
    def kernel(self) -> str:
        return f"row_pass_{self.weights or self.dtype}_d{self.head_dim}"

    @property
    def stage(self) -> int:
        """Bytes of a stage of the ring: a row of 16 bits of any weight fits, or two of FP8."""
        longest = 2 * max(self.width, self.heads * self.head_dim, self.feed_forward)
        return max(STAGE, -(-longest // 1024) * 1024)

    @property
    def rest(self) -> int:
        """Bytes of shared memory beside the ring and its barriers."""
        sums = 4 * max(WARPS * ROUND, WARPS * self.heads // self.kv_heads * self.head_dim)
        vectors = 4 * (WARPS + ROUND + self.head_dim) + 8 * 8 * WARPS + 8 * self.head_dim * 2
        return vectors + sums

    def depth(self, info: DeviceInfo) -> int:
        """Stages of the ring."""
        return (info.max_shared - self.rest) // (self.stage + 16)

    def parts(self, info: DeviceInfo) -> int:
        """Parts that a KV head's keys are cut into, at the most."""
        return 1 << min(info.num_sms // self.kv_heads, 32).bit_length() - 1

    def exchange_layout(self, info: DeviceInfo) -> tuple[int, int, int, int]:
        """Offsets of tagged words, attention's parts and the two counters in the memory through which blocks
        exchange results; and its size in bytes.
        """
        words = self.width + 2 * (self.heads + self.kv_heads) * self.head_dim + self.feed_forward
        parts = self.parts(info) * self.heads * (self.head_dim + 1)
        ends = list(accumulate((aligned(4 * words), aligned(8 * parts), 8), initial=0))
        return ends[0], ends[1], ends[2], ends[3]

    def lacks(self, info: DeviceInfo) -> str | None:
        """The kernel's first requirement that this pass or GPU does not meet; None if it meets all."""
        sides = (self.width, self.heads * self.head_dim, self.feed_forward)
        longest = 8 * 32 * WARPS * MAX_CHUNKS
        needs = (
            (info.arch == "90a", f"a Hopper GPU, not {info.name}"),
            (self.dtype == "bf16", f"bf16, not {self.dtype}"),
            (self.weights in ("", FP8_ROWS), "FP8 weights with a scale a row, not for each 128 columns"),
            (self.head_dim in HEAD_DIMS, f"heads of 64 or 128, not {self.head_dim}"),
            (
                self.heads <= 8 * self.kv_heads,
                f"at most 8 heads a KV head, not {self.heads / self.kv_heads:g}",
            ),
            (self.kv_heads <= info.num_sms, f"at most {info.num_sms} KV heads, not {self.kv_heads}"),
            (self.layers <= MAX_LAYERS, f"at most {MAX_LAYERS} layers, not {self.layers}"),
            (self.block_size % PAGE == 0, f"blocks of a multiple of {PAGE} tokens, not {self.block_size}"),
            (all(s % 8 == 0 for s in sides), f"sides of a multiple of 8, not {sides}"),
            (max(sides) <= longest, f"sides of at most {longest}, not {max(sides)}"),
            # A round may be shorter than its most, by part of a stage.
            (-(-self.width // info.num_sms) <= ROUND // 2, f"more SMs than {info.num_sms}"),
            (self.depth(info) >= MIN_DEPTH, f"more shared memory than {info.max_shared} bytes a block"),
        )
        return next((what for held, what in needs if not held), None)


def why_launches(calls: Calls, target: Target) -> str | None:
    """Why a step of one decoded row stays many launches; None where it is one."""
    if any("kv" in c.tensors and c.tensors["kv"].dtype == E4M3 for c in calls):
        return f"a KV cache of bf16, not {E4M3}"
    if any(t.dtype in OF_FORMAT for call in calls for t in call.tensors.values() if t.kind is Kind.WEIGHT):
        return "weights of 16 or 8 bits, not packed ones"
    row_pass = recognise(calls)
    if row_pass is None:
        return "the pass of a llama or Qwen3 decoder"
    *layers, head = weights_of(calls, target)
    if head or len(set(layers)) > 1:
        return "one format of all layers' weights, and a head of 16 bits"
    return replace(row_pass, weights=layers[0]).lacks(target.info)


def weights_of(calls: Calls, target: Target) -> list[str]:
    """What fp8.stays_fp8 says of each GEMM's weights, in order."""
    return [stays_fp8(weights, "bf16", target) for call in calls if (weights := matrices(call))]


def _one_launch(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    if not step.decode_only or any(step.env.get(s) != 1 for s in "TRL"):
        return "one decoded row that samples"
    return why_launches(calls, step.target) or [decode_pass(calls)]


ONE_LAUNCH = Rule("decode_pass", (), _one_launch)


def recognise(calls: Calls) -> RowPass | None:
    """The pass that these calls are, if they are embedding, layers and head of a llama or Qwen3 decoder."""
    names = [c.spec.name for c in calls]
    layers = (len(calls) - 2) // len(LAYER)
    if layers < 1 or names != ["embedding", *LAYER * layers, "lm_head"]:
        return None
    first, head, inside = calls[0], calls[-1], _by_layer(calls)
    x, eps = first.tensors["out"], head.attrs["eps"]
    alike = all(_same_inputs(inside[0], group) for group in inside)
    if not alike or not all(_is_layer(i, group, x, eps) for i, group in enumerate(inside)):
        return None
    between = [c.tensors[n] for c in calls[1:-1] for n in ("q", "kv", "x", "out", "a") if n in c.tensors]
    if {t.dtype for t in between} != {x.dtype} or head.tensors["logits"].dtype != "f32":
        return None
    if head.tensors["x"].storage is not x.storage or head.axes["V"] != first.axes["V"]:
        return None
    sizes = {a: d for c in (first, calls[1], calls[4], head) for a, d in c.axes.items()}
    if any(isinstance(sizes[a], str) for a in "MHGDFVS"):
        return None
    m, h, g, d, f, v, s = (int(sizes[a]) for a in "MHGDFVS")
    return RowPass(m, h, g, d, f, v, layers, s, x.dtype)


def _by_layer(calls: Sequence[OpCall]) -> list[Sequence[OpCall]]:
    return [calls[i : i + len(LAYER)] for i in range(1, len(calls) - 1, len(LAYER))]


def _is_layer(number: int, calls: Sequence[OpCall], x: Tensor, eps: float) -> bool:
    """Whether each op's result is an operand of the next op only, and no other result outlives the layer."""
    qkv, attention, o, gate_up, down = (c.tensors for c in calls)
    between = (qkv["q"], attention["out"], gate_up["out"])
    chained = (
        qkv["q"].storage is attention["q"].storage
        and attention["out"].storage is o["a"].storage
        and gate_up["out"].storage is down["a"].storage
        and all(t["x"].storage is x.storage for t in (qkv, o, gate_up, down))
        and all(t.storage.kind is Kind.BUFFER for t in between)
    )
    numbered = calls[0].attrs["layer"] == calls[1].attrs["layer"] == number
    return chained and numbered and calls[0].attrs["eps"] == calls[3].attrs["eps"] == eps


def _same_inputs(first: Sequence[OpCall], other: Sequence[OpCall]) -> bool:
    """Whether another layer has the sizes, the cache, the step's inputs and the scale of the first."""
    names = (("kv", "positions", "slots", "cos_sin"), ("kv", "query_lens", "context_lens", "block_table"))
    same = all(first[i].tensors[n].storage is other[i].tensors[n].storage for i in range(2) for n in names[i])
    sizes = all(f.axes == o.axes for f, o in zip(first, other, strict=True))
    return same and sizes and first[1].attrs["scale"] == other[1].attrs["scale"]


@handles(DECODE_PASS)
def _decode_pass(c: LoweringContext) -> None:
    calls: Sequence[OpCall] = c.call.attrs["calls"]
    p = recognise(calls)
    assert p is not None
    p = replace(p, weights=weights_of(calls, c.target)[0])
    info, grid = c.target.info, c.target.info.num_sms
    embedding, qkv, attention, head = (Operands(calls[i], c.step) for i in (0, 1, 2, -1))
    layers = [_layer([Operands(call, c.step) for call in group], p) for group in _by_layer(calls)]
    scale = attention.call.attrs["scale"] * math.log2(math.e)
    words, parts, launches, nbytes = p.exchange_layout(info)
    # No other kernel may write here: a word could then have a tag that a block waits for. Zeros restart the
    # count of launches.
    exchange = c.step_memory("row pass", nbytes, zeroed=True)
    window = int(c.target.tuning.numbers(info, "decode_pass")["fp8_window" if p.weights else "window"])
    args = struct(
        PASS, embedding=embedding.matrix("table", dtype=p.dtype), head=head.matrix("w", dtype=p.dtype),
        norm=head.vector("norm"), token_ids=embedding.address("ids"), positions=qkv.address("positions"),
        slots=qkv.address("slots"), query_lens=attention.address("query_lens"),
        context_lens=attention.address("context_lens"), block_table=attention.address("block_table"),
        cos_sin=qkv.vector("cos_sin"), kv=qkv.address("kv"), x=embedding.address("out"),
        logits=head.address("logits"), words=exchange + words, parts=exchange + parts,
        launches=exchange + launches,
        layers=p.layers, m=p.width, h=p.heads, g=p.kv_heads, f=p.feed_forward, v=p.vocabulary,
        block_size=p.block_size, stage=p.stage, depth=p.depth(info), window=window,
        eps=qkv.call.attrs["eps"], scale_log2=scale,
    )  # fmt: skip
    table = struct(PASS_LAYERS, layer=layers)
    shared = p.rest + p.depth(info) * (p.stage + 16)
    c.launch(
        p.kernel, (grid, 1, 1), THREADS, [_boxes(qkv, p), args, table], shared,
        why="one decoded row of a llama or Qwen3 decoder", cooperative=True,
    )  # fmt: skip


def _layer(calls: Sequence[Operands], p: RowPass) -> dict[str, Place | None]:
    """A layer's weights, as members of pass::Layer."""
    qkv, _, o, gate_up, down = calls
    matrices = {
        "qkv": qkv.matrix("wq", "wk", "wv", dtype=p.dtype),
        "o": o.matrix("w", dtype=p.dtype),
        "gate_up": gate_up.matrix("w_gate", "w_up", dtype=p.dtype, layout="pairs"),
        "down": down.matrix("w", dtype=p.dtype),
    }
    members: dict[str, Place | None] = {
        "attn_norm": qkv.vector("norm"),
        "q_norm": qkv.vector("q_norm"),
        "k_norm": qkv.vector("k_norm"),
        "mlp_norm": gate_up.vector("norm"),
    }
    for name, w in matrices.items():
        members[name], members[f"{name}_scales"] = codes_and_scales(w) if p.weights else (w, None)
    return members


def _boxes(qkv: Operands, p: RowPass) -> Boxes:
    """The whole cache, 16 tokens of a head at a time; see attention's boxes, which begin at a layer."""
    s, item = qkv.sizes, item_bytes(p.dtype)
    row = p.head_dim * item
    return Boxes(
        qkv.address("kv"),
        (s["N"] * s["Y"] * 2 * p.kv_heads, p.block_size // 8, p.head_dim // 64, 8, 64),
        (p.block_size * row, 8 * row, 64 * item, row),
        p.dtype,
        (1, PAGE // 8, p.head_dim // 64, 8, 64),
    )
