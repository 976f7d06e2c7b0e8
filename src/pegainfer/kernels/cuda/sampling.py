"""Lowering of the ops between logits and tokens."""

from __future__ import annotations

from pegainfer.kernels.cuda.lowering import LoweringContext, Step, blocks, handles
from pegainfer.kernels.cuda.plan import ptr, struct
from pegainfer.kernels.cuda.rewrite import Calls, Rule, Temporaries, with_op
from pegainfer.ops.fused import ADJUST_SOME_LOGITS, SAMPLE_SOME_TOKENS
from pegainfer.ops.program import OpCall, is_read
from pegainfer.ops.tensor import Kind
from pegainfer.runtime.cuda.launch import i32

CHUNK, MAX_CHUNKS, BINS = 4096, 256, 2048  # as in common/sample/sample.cuh
PICK_THREADS, PICK_SHARED = 1024, 40 << 10  # sample_pick's block; its struct Shared fits


# Rows that nothing is adjusted in are not copied: the draw reads their logits.


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


def _chunks(c: LoweringContext, vocab: int) -> int:
    chunks = blocks(vocab, CHUNK)
    if chunks > MAX_CHUNKS:
        raise c.refuse("vocabulary", f"at most {CHUNK * MAX_CHUNKS} tokens", vocab)
    return chunks


@handles("adjust_logits", "adjust_some_logits")
def _adjust_logits(c: LoweringContext) -> None:
    s = c.sizes
    names = (
        "scores", "logits", "bias_ids", "bias_values", "bias_starts", "bias_lens", "masks", "mask_rows",
        "banned_tokens", "banned_seq_starts", "banned_seq_lens", "banned_starts", "banned_lens", "history",
        "slots", "history_lens", "prompt_lens", "repetition_penalty", "frequency_penalty",
        "presence_penalty",
    )  # fmt: skip
    plain = c.address("plain") if "plain" in c.call.tensors else None
    addresses = [ptr(c.address(n)) for n in names]
    args = struct(*addresses, ptr(plain), i32(s["V"]), i32(s["I"]), i32(s["X"]))
    c.launch("adjust_logits", (_chunks(c, s["V"]), s["L"], 1), 256, [args])


@handles("sample_tokens", "sample_some_tokens")
def _sample_tokens(c: LoweringContext) -> None:
    s = c.sizes
    rows, chunks = s["L"], _chunks(c, s["V"])
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "draws")
    scores, some = c.address("scores"), "plain" in c.call.tensors
    sources = scores, c.address("logits") if some else scores, c.address("plain") if some else None
    scratch = [c.scratch(rows * n) for n in (8 * chunks, 8 * chunks, 8 * BINS, 4 * BINS)]
    outputs = [c.address(n) for n in ("tokens", "status")]
    inputs = [c.address(n) for n in names]
    args = struct(*map(ptr, (*outputs, *sources, *inputs, *scratch)), i32(s["V"]), i32(chunks))
    c.launch("sample_peaks", (chunks, rows, 1), 256, [args])
    c.launch("sample_weigh", (chunks, rows, 1), 256, [args])
    c.launch("sample_pick", (rows, 1, 1), PICK_THREADS, [args], PICK_SHARED)


@handles("append_tokens")
def _append_tokens(c: LoweringContext) -> None:
    s = c.sizes
    names = ("history", "tokens", "slots", "history_lens")
    args = [*(ptr(c.address(n)) for n in names), i32(s["L"]), i32(s["X"])]
    c.launch("append_tokens", (blocks(s["L"], 256), 1, 1), 256, args)


@handles("token_logprobs")
def _token_logprobs(c: LoweringContext) -> None:
    s = c.sizes
    rows, chunks, k = s["L"], _chunks(c, s["V"]), s["K"]
    names = ("logprobs", "ranks", "top_ids", "top_logprobs", "logits", "targets", "top_lens")
    scratch = [c.scratch(rows * n) for n in (8 * chunks, 4 * chunks, 8 * chunks * k)]
    args = struct(*(ptr(c.address(n)) for n in names), *map(ptr, scratch), i32(s["V"]), i32(chunks), i32(k))
    c.launch("logprob_parts", (chunks, rows, 1), 256, [args])
    c.launch("logprob_merge", (rows, 1, 1), MAX_CHUNKS, [args])
