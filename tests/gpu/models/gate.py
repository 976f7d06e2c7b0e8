"""The accuracy gate of one model on one GPU: prints a table, exits with 1 where a bar is missed.

python -m tests.gpu.models.gate FOLDER SIZE [LENGTH …]   (torch and transformers must be there)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.engine.config import SchedulerConfig
from tests.gpu.forced import Scores, Texts
from tests.gpu.teacher import TOP, free_torch, logprobs, transformers_model, write_seeded

Array = np.ndarray[Any, Any]
RATIO, REGRET, MEAN, P99 = 1.1, 0.20, 0.06, 0.20  # the last three: or RATIO times transformers' own in bf16
SHORT = 1000  # texts up to this length run in every cut


def texts(lengths: list[int], vocab: int) -> list[Array]:
    return [np.random.default_rng(n).integers(0, vocab, n).astype(np.int32) for n in lengths]


def cuts(t: Texts, all_texts: list[Array], i: int) -> dict[str, Callable[[], tuple[Scores, int]]]:
    """name -> (scores of text i, from which of its tokens on)."""
    text = all_texts[i]
    found: dict[str, Callable[[], tuple[Scores, int]]] = {"plain": lambda: (t.score(text, 2048), 0)}
    if len(text) <= SHORT:
        found["batched"] = lambda: (t.together([x for x in all_texts if len(x) <= SHORT], 96)[i], 0)
        found["chunked"] = lambda: (t.score(text, 67), 0)
    if len(text) <= 300:
        found["decode"] = lambda: (t.score(text, 1), 0)
    if len(text) > 48:
        warm = (len(text) - 1) // 16 // 2 * 16
        found["warm prefix"] = lambda: (t.score(text, 2048, start=warm), warm)
    return found


def main(folder: Path, size: str, lengths: list[int]) -> int:
    began = time.perf_counter()
    if not (folder / "model.safetensors").exists():
        write_seeded(size, folder)
    all_texts = texts(lengths, 151936)
    exact, half = [], []
    with transformers_model(folder, "float32") as model:
        exact = [logprobs(model, text) for text in all_texts]
    with transformers_model(folder, "bfloat16") as model:
        half = [logprobs(model, text, list(exact[i][0])) for i, text in enumerate(all_texts)]
    free_torch()
    print(f"references after {time.perf_counter() - began:.1f} s", flush=True)
    bad = 0
    for graphs in (True, False):
        config = EngineConfig(
            backend="cuda", max_model_len=max(lengths) + 64, kv_cache_memory=8 << 30, cuda_graph=graphs
        )
        engine = build_engine(folder, size, config, SchedulerConfig(max_slots=32))
        try:
            bad += run(Texts(engine.runner), all_texts, exact, half, "graph" if graphs else "eager")
        finally:
            engine.runner.close()
        print(f"{'graph' if graphs else 'eager'} after {time.perf_counter() - began:.1f} s", flush=True)
    print("GATE", "passed" if not bad else f"FAILED in {bad} rows")
    return int(bad > 0)


def worst_regret(choice: Array, top_ids: Array, top: Array) -> float:
    """How far below its best the reference scores these choices, at the worst position; inf beyond its 8."""
    value = np.where(top_ids == choice[:, None], top, -np.inf).max(1)
    return float((top[:, 0] - value).max())


def run(t: Texts, all_texts: list[Array], exact: list[Any], half: list[Any], mode: str) -> int:
    """Prints a row a text and cut; returns how many miss a bar.

    A worst position says little of one text: transformers' own is taken over all of them.
    """
    theirs_worst = max(worst_regret(h[0][:, 0], e[0], e[1]) for h, e in zip(half, exact, strict=True))
    print(
        f"{'mode':6} {'tokens':>6} {'cut':12} {'mean':>8} {'p99':>8} {'regret':>8}"
        f" {'HF mean':>8} {'HF regr':>8} {'ratio':>6}"
    )
    bad = 0
    for i, text in enumerate(all_texts):
        top_ids, top, _ = exact[i]
        for name, cut in cuts(t, all_texts, i).items():
            if mode == "eager" and name not in ("plain", "decode"):
                continue
            scores, start = cut()
            error = np.abs(scores.of(top_ids[start:]) - top[start:])
            mean, p99 = float(error.mean()), float(np.quantile(error, 0.99))
            regret = worst_regret(scores.ids[:, 0], top_ids[start:], top[start:])
            theirs = np.abs(half[i][2] - top)[start:]
            their_regret = worst_regret(half[i][0][start:, 0], top_ids[start:], top[start:])
            ratio = mean / max(float(theirs.mean()), 1e-9)
            same = ""
            if name in ("plain", "decode"):
                again, _ = cut()
                same = " rerun equal" if np.array_equal(again.logprobs, scores.logprobs) else " RERUN DIFFERS"
            many = error.size >= 100 * TOP  # a ratio of a few values says nothing
            miss = (many and ratio > RATIO) or "DIFF" in same
            miss = (
                miss or regret > max(REGRET, RATIO * theirs_worst) or mean > max(MEAN, RATIO * theirs.mean())
            )
            miss = miss or p99 > max(P99, RATIO * float(np.quantile(theirs, 0.99)))
            bad += miss
            print(
                f"{mode:6} {len(text):6} {name:12} {mean:8.4f} {p99:8.4f} {regret:8.4f}"
                f" {theirs.mean():8.4f} {their_regret:8.4f} {ratio:6.3f}{same}{'  MISSED' if miss else ''}",
                flush=True,
            )
    return bad


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], [int(n) for n in sys.argv[3:]] or [1, 16, 200, 1000, 4000]))
