"""A rank's process: plans in, results out, in the order in which they come."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from pegainfer.contract.step import PendingStep, Preparing, Runner
from pegainfer.parallel.channel import Channel, Failure, Forward, Ready, Sample, Stepped, ToRank
from pegainfer.parallel.rank_adapters import RankAdapters, failure

IDLE_SECONDS = 0.1  # without a plan, after which something is made ready for the plans to come


def serve_rank(fd: int, build: Callable[[], Runner], fail: Callable[[], object]) -> None:
    """Serves until the engine's process hangs up or ends; then this process ends at once.

    Args:
        fd: of the channel's end here.
        build: loads the rank's part of the model.
        fail: tells the other ranks that this one has failed, which wait for its sums otherwise.
    """
    # A terminal or a service manager sends these to every process. When the engine ends, it hangs up.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel: Channel[ToRank] = Channel(socket.socket(fileno=fd), ToRank)
    messages: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    # It reads from the beginning, so that a process whose engine ends while it loads ends as well.
    threading.Thread(target=_read, args=(channel, messages), daemon=True).start()
    try:
        runner = build()
    except Exception as error:
        channel.send(failure(error))
        return
    channel.send(Ready())
    steps: queue.SimpleQueue[PendingStep | Exception] = queue.SimpleQueue()
    threading.Thread(target=_answer, args=(channel, steps, fail), daemon=True).start()
    adapters = RankAdapters(runner, channel)
    handle: Any = None
    preparing = isinstance(runner, Preparing)
    while True:
        try:
            message = messages.get(timeout=IDLE_SECONDS if preparing else None)
        except queue.Empty:
            assert isinstance(runner, Preparing)
            preparing = runner.prepare()
            continue
        if not isinstance(message, Forward | Sample):
            adapters.take(message)
            continue
        try:
            if isinstance(message, Forward):
                handle = runner.forward(message.plan)
            else:
                steps.put(handle if isinstance(handle, Exception) else runner.sample(handle, message.masks))
        except Exception as error:
            handle = error
            if isinstance(message, Sample):
                steps.put(error)


def _read(channel: Channel[ToRank], messages: queue.SimpleQueue[ToRank]) -> None:
    """Ends the process with the channel: nothing here needs an orderly end, and a step may be under way."""
    for message in channel.receive():
        messages.put(message)
    os._exit(0)


def _answer(
    channel: Channel[ToRank],
    steps: queue.SimpleQueue[PendingStep | Exception],
    fail: Callable[[], object],
) -> None:
    while True:
        step = steps.get()
        try:
            if isinstance(step, Exception):
                raise step
            answer: Stepped | Failure = Stepped(step.wait())
        except Exception as error:
            fail()
            answer = failure(error)
        try:
            channel.send(answer)
        except OSError:
            return  # `_read` ends the process
