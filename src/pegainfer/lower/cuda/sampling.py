"""Lowering of the ops between logits and tokens."""

from __future__ import annotations

from pegainfer.lower.cuda.lowering import LoweringContext, Step, blocks, handles
from pegainfer.lower.cuda.plan import CONTROL, Place, Struct, ptr, struct
from pegainfer.lower.cuda.ranks import SAMPLED_ROWS, gather, shard_of
from pegainfer.lower.cuda.rewrite import Calls, Rule, Temporaries, with_op
from pegainfer.ops.fused import ADJUST_SOME_LOGITS, SAMPLE_SOME_TOKENS
from pegainfer.ops.program import OpCall, is_read
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.arguments import ADJUST_LOGITS, SAMPLE_TOKENS, TOKEN_LOGPROBS
from pegainfer.runtime.cuda.launch import i32

CHUNK, MAX_CHUNKS, BINS = 4096, 256, 2048  # as in common/sample/sample.cuh
PICK_THREADS, PICK_SHARED = 1024, 40 << 10  # sample_pick's block; its struct Shared fits


# Rows without adjustments are not copied: sampling reads their logits directly.


def _leave_plain_rows(calls: Calls, step: Step, temporaries: Temporaries) -> list[OpCall] | str:
    adjust, sample = calls[:2]
    scores = adjust.tensors["scores"].storage
    same = scores is sample.tensors["scores"].storage
    if not same or scores.kind is not Kind.BUFFER or is_read(calls[2:], scores):
        return "scores that only the draw reads"
    logits = adjust.tensors["logits"]
    plain = temporaries.tensor("plain rows", logits.shape[0], dtype="i32")
    return [
        OpCall.of(ADJUST_SOME_LOGITS, adjust.attrs, **with_op(adjust, plain=plain)),
        OpCall.of(SAMPLE_SOME_TOKENS, sample.attrs, **with_op(sample, plain=plain, logits=logits)),
    ]


LEAVE_PLAIN_ROWS = Rule(
    "leave_plain_rows",
    (frozenset({"adjust_logits"}), frozenset({"sample_tokens"})),
    _leave_plain_rows,
)


# Launches


def _own(c: LoweringContext) -> range:
    """The ids whose logits this rank has, side by side in each row: all, or its share of the head's rows."""
    columns = c.sizes["V"]
    return shard_of(columns, c.target) or range(columns)


def _chunks(c: LoweringContext, vocab: int) -> int:
    chunks = blocks(vocab, CHUNK)
    if chunks > MAX_CHUNKS:
        raise c.refuse("vocabulary", f"at most {CHUNK * MAX_CHUNKS} tokens", vocab)
    return chunks


@handles("adjust_logits", "adjust_some_logits")
def _adjust_logits(c: LoweringContext) -> None:
    s = c.sizes
    plain = c.address("plain") if "plain" in c.call.tensors else None
    operands = {o.name: c.address(o.name) for o in c.call.spec.operands if o.name != "plain"}
    own = _own(c)
    args = struct(
        ADJUST_LOGITS, **operands, plain=plain, vocab=c.call.attrs["vocab_size"], columns=len(own),
        first=own.start, mask_words=s["I"], width=s["X"], unused=0,
    )  # fmt: skip
    c.launch("adjust_logits", (_chunks(c, len(own)), s["L"], 1), 256, [args])


@handles("sample_tokens", "sample_some_tokens")
def _sample_tokens(c: LoweringContext) -> None:
    rows, own, vocab = c.sizes["L"], _own(c), c.call.attrs["vocab_size"]
    alone = len(own) == c.sizes["V"]
    chunks = _chunks(c, min(vocab, len(own)))
    operands: dict[str, Place | None] = {o.name: c.address(o.name) for o in c.call.spec.operands}
    memory = {
        "peaks": c.scratch(rows * 8 * chunks), "sums": c.scratch(rows * 8 * chunks),
        "bin_weights": c.scratch(rows * 8 * BINS), "bin_counts": c.scratch(rows * 4 * BINS),
    }  # fmt: skip
    sizes = {"vocab": vocab, "columns": len(own), "first": own.start, "chunks": chunks, "unused": 0}

    def args(start: int) -> Struct:
        control = None if alone else Place(CONTROL)
        both = {"logits": operands["scores"], "plain": None} | operands
        return struct(SAMPLE_TOKENS, **both, **memory, control=control, **sizes, start=start)

    # Ranks exchange words through memory with room for SAMPLED_ROWS rows, so more rows take several launches.
    parts = [(0, rows)] if alone else [(n, min(SAMPLED_ROWS, rows - n)) for n in range(0, rows, SAMPLED_ROWS)]
    c.launch("sample_peaks", (chunks, rows, 1), 256, [args(0)])
    for start, count in () if alone else parts:
        c.launch("sample_meet", (count, 1, 1), 32, [args(start)], why="the best score of all ranks")
    c.launch("sample_weigh", (chunks, rows, 1), 256, [args(0)])
    for start, count in parts:
        kernel = "sample_pick" if alone else "sample_pick_ranks"
        c.launch(kernel, (count, 1, 1), PICK_THREADS, [args(start)], PICK_SHARED)


@handles("append_tokens")
def _append_tokens(c: LoweringContext) -> None:
    s = c.sizes
    names = ("history", "tokens", "slots", "history_lens")
    args = [*(ptr(c.address(n)) for n in names), i32(s["L"]), i32(s["X"])]
    c.launch("append_tokens", (blocks(s["L"], 256), 1, 1), 256, args)


@handles("token_logprobs")
def _token_logprobs(c: LoweringContext) -> None:
    rows, columns, k = (c.sizes[axis] for axis in "LVK")
    vocab = c.call.attrs["vocab_size"]
    chunks = _chunks(c, vocab)
    operands = {o.name: c.address(o.name) for o in c.call.spec.operands}
    if len(_own(c)) < columns:
        whole = c.scratch(4 * rows * columns)
        gather(c, whole, operands["logits"], rows, columns, operands["top_lens"])
        operands["logits"] = whole
    args = struct(
        TOKEN_LOGPROBS, **operands, parts=c.scratch(rows * 8 * chunks), before=c.scratch(rows * 4 * chunks),
        best=c.scratch(rows * 8 * chunks * k), vocab=vocab, columns=columns,
        chunks=chunks, k=k,
    )  # fmt: skip
    c.launch("logprob_parts", (chunks, rows, 1), 256, [args])
    c.launch("logprob_merge", (rows, 1, 1), MAX_CHUNKS, [args])
