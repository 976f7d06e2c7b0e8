"""Lowering of the ops between logits and tokens."""

from __future__ import annotations

from pegainfer.kernels.cuda.site import Site, blocks, handles
from pegainfer.runtime.cuda.launch import i32, ptr, struct

CHUNK, MAX_CHUNKS, BINS = 4096, 256, 2048  # as in common/sample/sample.cuh
PICK_THREADS, PICK_SHARED = 1024, 40 << 10  # sample_pick's block; its struct Shared fits


def _chunks(site: Site, vocab: int) -> int:
    chunks = blocks(vocab, CHUNK)
    if chunks > MAX_CHUNKS:
        raise site.refuse("vocabulary", f"at most {CHUNK * MAX_CHUNKS} tokens", vocab)
    return chunks


@handles("adjust_logits")
def _adjust_logits(site: Site) -> None:
    s = site.sizes()
    names = (
        "scores", "logits", "bias_ids", "bias_values", "bias_starts", "bias_lens", "masks", "mask_rows",
        "banned_tokens", "banned_seq_starts", "banned_seq_lens", "banned_starts", "banned_lens", "history",
        "slots", "history_lens", "prompt_lens", "repetition_penalty", "frequency_penalty",
        "presence_penalty",
    )  # fmt: skip
    plain = 0
    following = site.following
    if following is not None and following.spec.name == "sample_tokens":
        # Rows with nothing to adjust are not copied: the draw reads their logits.
        plain = site.memory.kept("plain rows", 4 * s["L"])
        site.shared["plain rows", site.address("scores")] = plain
        site.shared["logits of", site.address("scores")] = site.address("logits")
    addresses = [ptr(site.address(n)) for n in names]
    args = struct(*addresses, ptr(plain), i32(s["V"]), i32(s["I"]), i32(s["X"]))
    site.launch("adjust_logits", (_chunks(site, s["V"]), s["L"], 1), 256, [args])


@handles("sample_tokens")
def _sample_tokens(site: Site) -> None:
    s = site.sizes()
    rows, chunks = s["L"], _chunks(site, s["V"])
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "draws")
    scores = site.address("scores")
    plain = site.shared.get(("plain rows", scores), 0)
    sources = scores, site.shared.get(("logits of", scores), scores), plain
    scratch = [site.scratch(rows * n) for n in (8 * chunks, 8 * chunks, 8 * BINS, 4 * BINS)]
    outputs = [site.address(n) for n in ("tokens", "status")]
    inputs = [site.address(n) for n in names]
    args = struct(*map(ptr, (*outputs, *sources, *inputs, *scratch)), i32(s["V"]), i32(chunks))
    site.launch("sample_peaks", (chunks, rows, 1), 256, [args])
    site.launch("sample_weigh", (chunks, rows, 1), 256, [args])
    site.launch("sample_pick", (rows, 1, 1), PICK_THREADS, [args], PICK_SHARED)


@handles("append_tokens")
def _append_tokens(site: Site) -> None:
    s = site.sizes()
    names = ("history", "tokens", "slots", "history_lens")
    args = [*(ptr(site.address(n)) for n in names), i32(s["L"]), i32(s["X"])]
    site.launch("append_tokens", (blocks(s["L"], 256), 1, 1), 256, args)


@handles("token_logprobs")
def _token_logprobs(site: Site) -> None:
    s = site.sizes()
    rows, chunks, k = s["L"], _chunks(site, s["V"]), s["K"]
    names = ("logprobs", "ranks", "top_ids", "top_logprobs", "logits", "targets", "top_lens")
    scratch = [site.scratch(rows * n) for n in (8 * chunks, 4 * chunks, 8 * chunks * k)]
    args = struct(
        *(ptr(site.address(n)) for n in names), *map(ptr, scratch), i32(s["V"]), i32(chunks), i32(k)
    )
    site.launch("logprob_parts", (chunks, rows, 1), 256, [args])
    site.launch("logprob_merge", (rows, 1, 1), MAX_CHUNKS, [args])
