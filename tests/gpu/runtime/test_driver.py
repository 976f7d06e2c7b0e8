"""The layer over the driver on a real one: errors name their cause, copies arrive, time is measured."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.kernels.manifest import KernelsError
from pegainfer.lower.cuda.context import CudaContext
from pegainfer.runtime.cuda.driver import CudaError
from pegainfer.runtime.cuda.graph import Graph
from pegainfer.runtime.cuda.launch import Launch, f32, i64, ptr
from pegainfer.runtime.cuda.memory import DeviceBuffer, StagingRing
from pegainfer.runtime.cuda.stream import Event, elapsed
from pegainfer.runtime.cuda.tensor import DeviceTensor
from pegainfer.runtime.cuda.upload import WorkItem, upload


def test_too_much_memory_is_refused_with_figures(ctx: CudaContext) -> None:
    with pytest.raises(
        CudaError, match=r"too little GPU memory for the moon; expected 1048576 MiB free; got \d+"
    ):
        DeviceBuffer(1 << 40, "the moon")


def test_a_missing_kernel_names_the_remedy(ctx: CudaContext) -> None:
    with pytest.raises(KernelsError, match="run: pegainfer kernels build --arch"):
        ctx.library.kernel("no_such_kernel")


def test_a_launch_that_cannot_be_names_itself(ctx: CudaContext) -> None:
    kernel = ctx.library.kernel("fill_normal_f32")
    launch = Launch(kernel, (1, 1, 1), 2048, [ptr(0), i64(0), i64(0), f32(0), f32(1)], label="fill T=0")
    with pytest.raises(CudaError, match=r"cuLaunchKernelEx failed.*fill T=0: fill_normal_f32"):
        launch(ctx.stream)


def test_graph_replays_what_was_captured(ctx: CudaContext) -> None:
    n = 1001
    t = DeviceTensor.empty((n,), "f32")
    kernel = ctx.library.kernel("fill_normal_f32")
    launch = Launch(kernel, (4, 1, 1), 256, [ptr(t.address), i64(n), i64(3), f32(5), f32(2)])
    graph = Graph(ctx.stream, lambda: launch(ctx.stream), "fill")
    assert graph.nodes == 1
    ctx.stream.fill(t.address, 0xFF, t.nbytes)
    assert np.isnan(t.numpy(ctx.stream)).all()  # capturing has run nothing
    graph.launch(ctx.stream)
    values = t.numpy(ctx.stream)
    assert abs(values.mean() - 5) < 0.3 and abs(values.std() - 2) < 0.2
    graph.close()


def test_staging_ring_keeps_a_slot_until_its_copy_ended(ctx: CudaContext) -> None:
    ring = StagingRing(2, 1 << 20, "test")
    targets = [DeviceTensor.empty((1 << 20,), "u8") for _ in range(6)]
    for i, t in enumerate(targets):
        _, address, view = ring.take()
        view[:] = i
        ctx.stream.upload(t.address, address, t.nbytes)
        ring.sent(ctx.stream)
    for i, t in enumerate(targets):
        assert (t.numpy(ctx.stream) == i).all()


def test_upload_brings_every_piece_and_raises_what_a_reader_raises(ctx: CudaContext) -> None:
    pieces, n = [], 40
    t = DeviceTensor.empty((n, 1000), "u8")
    for i in range(n):

        def read(into: np.ndarray, i: int = i) -> None:
            into[:] = i

        def send(host: int, stream: object, i: int = i) -> None:
            ctx.stream.upload(t.address + 1000 * i, host, 1000)

        pieces.append(WorkItem(1000, read, send, str(i)))
    seen: list[tuple[int, int]] = []
    upload(pieces, ctx.stream, lambda done, total: seen.append((done, total)))
    assert (t.numpy(ctx.stream) == np.arange(n)[:, None]).all()
    assert seen[-1] == (40_000, 40_000)

    def broken(into: np.ndarray) -> None:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        upload([*pieces, WorkItem(1000, broken, pieces[0].send, "broken")] * 3, ctx.stream)


def test_device_time_is_measured(ctx: CudaContext) -> None:
    buffer = DeviceBuffer(1 << 28, "test")
    took = elapsed(ctx.stream, Event(timing=True), lambda: ctx.stream.fill(buffer.address, 0, buffer.nbytes))
    assert 0.01 < took < 100
