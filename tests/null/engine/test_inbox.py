"""The loop's inbox: order, what stays behind a failure, and that nothing enters after the end."""

from __future__ import annotations

import threading

import pytest

from pegainfer.contract.errors import EngineDeadError
from pegainfer.engine.inbox import Inbox


def test_messages_come_in_the_order_in_which_they_were_put() -> None:
    inbox: Inbox[int] = Inbox()
    for i in range(5):
        inbox.put(i)
    assert len(inbox) == 5
    assert list(inbox.take()) == [0, 1, 2, 3, 4]
    assert list(inbox.take()) == []


def test_who_fails_at_a_message_leaves_the_others_to_the_end() -> None:
    inbox: Inbox[int] = Inbox()
    for i in range(4):
        inbox.put(i)
    taken = inbox.take()
    assert next(taken) == 0
    death = EngineDeadError("ended")
    assert inbox.shut(death) == [1, 2, 3]
    assert inbox.death is death
    with pytest.raises(EngineDeadError, match="ended"):
        inbox.put(4)
    assert len(inbox) == 0


def test_a_message_wakes_the_taker_and_taking_forgets_the_call() -> None:
    inbox: Inbox[int] = Inbox()
    assert not inbox.wait(0)
    putter = threading.Thread(target=inbox.put, args=(1,))
    putter.start()
    assert inbox.wait(60)
    putter.join()
    assert list(inbox.take()) == [1]
    assert not inbox.wait(0)
    inbox.wake()
    assert inbox.wait(0) and list(inbox.take()) == []
    assert not inbox.wait(0)
