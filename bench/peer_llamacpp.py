"""Measures llama.cpp on a GGUF file through llama-cpp-python's low-level calls; prints one JSON object.

Runs in a virtual environment of its own (`pip install llama-cpp-python`, built from source on the machine
that measures), never beside the package. `bench/compare_llamacpp.py` alternates it with pegainfer.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import time

import llama_cpp as lc


def quantize(source: str, target: str, kind: str) -> None:
    """Writes `source` in another format, as llama-quantize does; kind is one of Q8_0, BF16, Q4_0, F16."""
    params = lc.llama_model_quantize_default_params()
    params.ftype = getattr(lc, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    params.nthread = 2
    if lc.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"llama.cpp could not write {target}")


class Peer:
    """One model and one context."""

    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        mp = lc.llama_model_default_params()
        self.model = lc.llama_model_load_from_file(path.encode(), mp)
        if not self.model:
            raise SystemExit(f"llama.cpp could not load {path}")
        cp = lc.llama_context_default_params()
        cp.n_ctx, cp.n_batch, cp.n_ubatch, cp.n_seq_max = context, 2048, 512, sequences
        cp.n_threads = cp.n_threads_batch = threads
        self.ctx = lc.llama_init_from_model(self.model, cp)
        self.vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        self.batch = lc.llama_batch_init(2048, 0, 1)
        self.rng = random.Random(0)

    def clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.ctx), True)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decodes (sequence, position, token, wants logits) rows and waits for the result."""
        b = self.batch
        for i, (seq, pos, token, logits) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, pos, 1, int(logits)
            b.seq_id[i][0] = seq
        b.n_tokens = len(rows)
        if lc.llama_decode(self.ctx, b):
            raise SystemExit("llama_decode failed")
        lc.llama_synchronize(self.ctx)

    def prefill(self, seq: int, length: int, start: int = 0) -> None:
        for at in range(start, start + length, 2048):
            stop = min(start + length, at + 2048)
            self.run(
                [(seq, p, self.rng.randrange(self.vocab), p == start + length - 1) for p in range(at, stop)]
            )

    def decode(self, sequences: int, steps: int, start: int) -> None:
        for step in range(steps):
            self.run([(s, start + step, self.rng.randrange(self.vocab), True) for s in range(sequences)])


def measure(peer: Peer, *, prompt: int, steps: int, sequences: int) -> dict[str, float]:
    """Tokens a second of one prefill of `prompt` tokens a sequence and of `steps` decode steps after it."""
    peer.clear()
    started = time.perf_counter()
    for s in range(sequences):
        peer.prefill(s, prompt)
    filled = time.perf_counter()
    peer.decode(sequences, steps, prompt)
    ended = time.perf_counter()
    return {
        "prefill_tok_s": sequences * prompt / (filled - started),
        "decode_tok_s": sequences * steps / (ended - filled) if steps else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--quantize", metavar="KIND=TARGET", help="only write the model in another format")
    args = parser.parse_args()
    lc.llama_backend_init()
    silent = lc.llama_log_callback(lambda level, text, data: None)
    lc.llama_log_set(silent, None)
    if args.quantize:
        kind, target = args.quantize.split("=", 1)
        quantize(args.model, target, kind)
        return
    peer = Peer(args.model, args.threads, args.sequences * (args.prompt + args.steps), args.sequences)
    measure(peer, prompt=min(args.prompt, 64), steps=2, sequences=args.sequences)  # warm
    print(
        json.dumps(
            {
                "engine": f"llama.cpp (llama-cpp-python {lc.__version__})",
                **measure(peer, prompt=args.prompt, steps=args.steps, sequences=args.sequences),
            }
        )
    )


if __name__ == "__main__":
    main()
