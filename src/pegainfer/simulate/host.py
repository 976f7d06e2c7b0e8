"""What the host adds to a step and to a request, in seconds: measured on the machines of the ledger."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostPrices:
    """Of the engine's thread, and of the HTTP process with its client.

    Args:
        repeat: to hand over a step that repeats the rows of the one before.
        change: to hand over a step of other rows.
        change_row: besides, for each of its rows.
        step: of the device's own thread around the kernels; 0 where it only launches.
        commit: to take a step's result.
        commit_row: besides, for each of its rows.
        request: from the client's send to the engine, and from the engine's first token to the client.
    """

    repeat: float
    change: float
    change_row: float
    step: float
    commit: float
    commit_row: float
    request: float


# docs/benchmarks.md, "GPU: start and memory": a repeated step 9 to 10 µs on the GPU's machine, another batch
# 293 µs with one row and 443 to 629 with 256. Committing costs about 1 µs a row (bench/scheduler_cost.py). A
# request: the first token of a prompt of 128 tokens whose prefix is cached comes after 5.6 ms through HTTP
# ("GPU: Qwen3-4B behind HTTP"), 3.5 ms of which are its step at the ledger's prices of commit 601d8d5.
GPU_HOST = HostPrices(
    repeat=10e-6, change=290e-6, change_row=1e-6, step=0.0, commit=10e-6, commit_row=1e-6, request=2.05e-3
)
# docs/benchmarks.md, "CPU: the engine alone": 65 µs of the host a step at one row and 203 at eight; "CPU:
# beside llama.cpp": 0.5 ms a step around the kernels. A request: "CPU: the first token of a warm chat",
# 15.4 ms of which 10.1 are the step and 1.0 text.
CPU_HOST = HostPrices(
    repeat=30e-6, change=30e-6, change_row=5e-6, step=5e-4, commit=15e-6, commit_row=10e-6, request=5e-3
)
