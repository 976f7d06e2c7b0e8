"""Frames between the engine's process and a rank's."""

from __future__ import annotations

import socket
import threading

import pytest

from pegainfer.contract.request import SamplingParams, pack_tokens
from pegainfer.contract.step import NewSlot, Row, SlotBlocks, StepPlan, StepResult
from pegainfer.parallel.channel import Channel, Failure, Forward, FromRank, Ready, Sample, Stepped, ToRank

PLAN = StepPlan(
    step=3,
    frees=(1,),
    news=(
        NewSlot(
            slot=0, seq=9, tokens=pack_tokens(range(200_000)), num_prompt=200_000,
            sampling=SamplingParams(top_k=5), seed=2**64 - 1,
        ),
    ),
    blocks=(SlotBlocks(0, 0, (4, 5)),),
    rows=(Row(0, 0, 7, True), Row(2, 8, 1, True, follow=True)),
)  # fmt: skip
RESULT = StepResult(step=3, tokens=((1,), ()), pooled={0: b"\x00\x01"}, errors={1: "NaN"}, seconds=0.5)


def ends() -> tuple[Channel[FromRank], Channel[ToRank]]:
    engine, rank = socket.socketpair()
    return Channel(engine, FromRank), Channel(rank, ToRank)


def test_messages_come_as_they_were_sent_until_one_end_hangs_up() -> None:
    engine, rank = ends()
    to_rank = [Forward(PLAN), Sample(None), Sample({1: b"\xff\x00"})]
    from_rank = [Ready(), Stepped(RESULT), Failure("OpError", "why")]

    def sends() -> None:
        for message in to_rank:
            engine.send(message)

    sender = threading.Thread(target=sends)  # the plan is larger than the socket's buffer
    sender.start()
    received = rank.receive()
    assert [next(received) for _ in to_rank] == to_rank
    sender.join()
    for message in from_rank:
        rank.send(message)
    rank.hang_up()
    assert list(engine.receive()) == from_rank
    with pytest.raises(OSError):
        rank.send(Ready())
    engine.hang_up()  # once more does no harm
    engine.close()
    rank.close()


def test_a_finaliser_may_send_on_a_thread_that_sends() -> None:
    engine, rank = ends()
    encoder = engine._encoder

    class Collecting:
        """Encodes as the channel does, but an object is freed meanwhile whose finaliser sends."""

        def encode(self, message: object) -> bytes:
            engine._encoder = encoder
            engine.send(Sample(None))
            return encoder.encode(message)

    engine._encoder = Collecting()  # type: ignore[assignment]
    sender = threading.Thread(target=engine.send, args=(Sample({1: b"\x01"}),), daemon=True)
    sender.start()
    sender.join(10)
    assert not sender.is_alive()
    engine.hang_up()
    assert list(rank.receive()) == [Sample(None), Sample({1: b"\x01"})]
    engine.close()
    rank.close()


def test_a_send_that_nobody_takes_ends() -> None:
    engine, rank = ends()
    engine.limit_sends(0.05)
    with pytest.raises(BlockingIOError):
        for _ in range(10):
            engine.send(Forward(PLAN))
    rank.close()
