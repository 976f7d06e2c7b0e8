"""No step allocates: counted by a malloc of our own, preloaded into a process that runs whole steps."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COUNTER = "ALLOCATION_COUNTER"  # the variable that names the preloaded library to the child


def count_steps() -> None:
    """Runs in the child: forward and sampling of mixed rows; prints allocations a kind of step."""
    import numpy as np

    from pegainfer.lower.cpu.backend import CpuOptions
    from pegainfer.lower.cpu.executor import CpuExecutor
    from pegainfer.ops.sampler import sampler
    from tests.cpu.kernels.model import CONFIG, Model, Span, stage

    counter = ctypes.CDLL(os.environ[COUNTER])
    counter.counted_calls.restype = ctypes.c_int64

    def count(executor: CpuExecutor) -> int:
        run = ctypes.cast(executor._lib.pega_exec_run, ctypes.c_void_p)
        sizes, last = executor._env, len(executor.program.calls)
        return int(
            counter.counted_calls(
                run, ctypes.c_void_p(executor._handle), sizes, ctypes.c_int64(len(executor._sizes)),
                ctypes.c_int64(last), ctypes.c_int64(50),
            )
        )  # fmt: skip

    model = Model(CpuOptions(threads=2), ("q4_1", "q8_0", "bf16"))
    ids = np.arange(300, dtype=np.int32) % CONFIG.vocab_size
    steps = {
        "prefill": [Span(ids, np.arange(19), 0, 300)],
        "decode": [Span(ids, np.arange(19), 299, 1)],
        "mixed": [Span(ids, np.arange(19), 299, 1), Span(ids, np.arange(20, 39), 0, 40)],
    }
    for name, spans in steps.items():
        inputs, env = stage(spans)
        model.executor.run(inputs, env)
        print(name, count(model.executor))

    rows = 3
    history = np.zeros((4, 64), np.int32)
    program = sampler(CONFIG.vocab_size, CONFIG.vocab_size, 4, 64, 5)
    draw = model.backend.prepare(program, {"history": history}, {"L": rows})
    none, zeros = np.zeros(0, np.int32), np.zeros(rows, np.int32)
    ones = np.ones(rows, np.float32)
    inputs = {name: zeros for name in ("bias_starts", "bias_lens", "banned_starts", "banned_lens", "draws")}
    inputs |= {name: none for name in ("bias_ids", "banned_tokens", "banned_seq_starts", "banned_seq_lens")}
    inputs |= {"bias_values": none.view(np.float32), "masks": np.zeros((0, 7), np.uint32)}
    inputs |= {"mask_rows": zeros - 1, "slots": np.arange(rows, dtype=np.int32), "history_lens": zeros + 9}
    inputs |= {"prompt_lens": zeros + 4, "top_k": zeros + 40, "top_lens": zeros + 5}
    inputs |= {"temperature": ones, "top_p": ones * np.float32(0.9), "min_p": ones * np.float32(0.01)}
    inputs |= {n: ones for n in ("repetition_penalty", "frequency_penalty", "presence_penalty")}
    inputs |= {"seeds": np.arange(rows, dtype=np.uint64)}
    rng = np.random.default_rng(0)
    inputs["logits"] = rng.standard_normal((rows, CONFIG.vocab_size)).astype(np.float32)
    draw.run(inputs, {"L": rows, "J": 0, "E": 0, "U": 0, "O": 0})
    print("sampling", count(draw))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the counter wraps glibc's malloc")
def test_no_step_allocates(tmp_path: Path) -> None:
    counter = tmp_path / "counter.so"
    subprocess.run(
        ["g++", "-O1", "-shared", "-fPIC", "-o", str(counter), str(HERE / "malloc_counter.cpp")], check=True
    )
    done = subprocess.run(
        [sys.executable, "-c", "from tests.cpu.lower.test_allocation import count_steps; count_steps()"],
        env={
            **os.environ,
            "LD_PRELOAD": f"{counter}:{os.environ.get('LD_PRELOAD', '')}",
            COUNTER: str(counter),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    counts = dict(line.split() for line in done.stdout.splitlines())
    assert counts == {"prefill": "0", "decode": "0", "mixed": "0", "sampling": "0"}
