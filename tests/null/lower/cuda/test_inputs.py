"""Pinned memory of step inputs: what is outgrown is given back, but never under a copy that reads it."""

from __future__ import annotations

import ctypes

import numpy as np

from pegainfer.lower.cuda.inputs import SLOTS, InputStage, Layout
from pegainfer.ops.tensor import Kind, Tensor
from pegainfer.runtime.cuda.stream import Stream
from tests.support.fake_cuda import Code, FakeCuda, fake_cuda

NOT_READY = Code(600, "CUDA_ERROR_NOT_READY")


class Sender:
    """Sends steps of one input of T tokens and looks at what arrives."""

    def __init__(self) -> None:
        ids = Tensor("token_ids", ("T",), "i32", Kind.INPUT)
        self.stage = InputStage("p", [ids], {"token_ids": -1})
        self.stream = Stream()

    def layout(self, tokens: int) -> Layout:
        return self.stage.layout({"T": tokens})

    def send(self, layout: Layout, tokens: int) -> None:
        values = np.arange(tokens, dtype=np.int32)
        self.stage.send(layout, {"token_ids": values}, {"T": tokens}, self.stream)
        room = layout.env["T"]
        there = (ctypes.c_int32 * room).from_address(layout.memory.address)
        assert list(there) == [*range(tokens), *[-1] * (room - tokens)]


def ring_bytes(tokens: int) -> int:
    return SLOTS * 4 * tokens


def test_an_outgrown_ring_is_freed_as_the_next_is_made() -> None:
    with fake_cuda() as fake:
        sender = Sender()
        for tokens in (64, 128, 1024):
            sender.send(sender.layout(tokens), tokens - 3)
            assert fake.pinned == ring_bytes(tokens)
        sender.send(sender.layout(64), 5)  # a smaller step needs no other ring
        assert fake.pinned == ring_bytes(1024)


def test_a_ring_stays_while_a_copy_reads_it_and_goes_with_a_later_step() -> None:
    with fake_cuda(FakeCuda(fail={"cuEventQuery": NOT_READY})) as fake:
        sender = Sender()
        small, middle, large = (sender.layout(tokens) for tokens in (64, 128, 1024))
        for layout in (small, middle, large, large):
            sender.send(layout, 7)
        assert fake.pinned == ring_bytes(64) + ring_bytes(128) + ring_bytes(1024)
        assert not fake.calls["cuMemFreeHost"]
        del fake.fail["cuEventQuery"]
        sender.send(large, 9)
        assert fake.pinned == ring_bytes(1024)
        asked = fake.calls["cuEventQuery"]
        sender.send(small, 9)
        assert fake.calls["cuEventQuery"] == asked  # nothing is left to ask for
