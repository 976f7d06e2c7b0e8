"""When a continuation ends by itself."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from pegainfer.contract.event import FinishReason
from pegainfer.engine.fairness import Tenant
from pegainfer.engine.sequence import Sequence
from pegainfer.engine.stop import GrammarError, take_tokens
from tests.null.engine.harness import request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def sequence(limit: int = 10, **sampling: Any) -> Sequence:
    """Two prompt tokens, EOS is 30."""
    return Sequence(
        request("r", [1, 2], **sampling),
        tokens=array("i", [1, 2]),
        hashes=[],
        number=0,
        index=0,
        seed=0,
        limit=limit,
        rank=(0.0, 0),
        now=0.0,
        tenant=Tenant("", 0.0),
        root=b"",
    )


@pytest.mark.parametrize(
    ("sampling", "new", "taken", "finish"),
    [
        ({}, [5, 6], 2, None),
        ({}, [], 0, None),
        ({}, [30], 1, STOP),
        ({}, [5, 30, 6], 2, STOP),
        ({"ignore_eos": True}, [30, 5], 2, None),
        ({"stop_token_ids": (6,)}, [5, 6, 7], 2, STOP),
        ({"ignore_eos": True, "stop_token_ids": (6,)}, [30, 6], 2, STOP),
        ({"min_tokens": 2}, [30, 30, 30], 3, STOP),
        ({"min_tokens": 2}, [5, 6, 30], 3, STOP),
        ({"min_tokens": 3}, [5, 6, 30], 3, None),
        ({"min_tokens": 1, "stop_token_ids": (6,)}, [6, 6], 2, STOP),
        ({}, [5] * 9, 8, LENGTH),
        ({}, [5] * 7 + [30], 8, STOP),  # a stop token at the very end is still a stop
    ],
)
def test_take_tokens(
    sampling: dict[str, Any], new: list[int], taken: int, finish: FinishReason | None
) -> None:
    seq = sequence(**sampling)
    assert take_tokens(seq, new) == (taken, finish)
    assert list(seq.tokens) == [1, 2, *new[:taken]]


def test_eos_and_stop_ids_are_masked_once_each() -> None:
    assert sequence(stop_token_ids=(6, 30)).mask_tokens == (30, 6)
    assert sequence(stop_token_ids=(6,), ignore_eos=True).mask_tokens == (6,)


class Panic(BaseException):
    """As a library in Rust raises where it has met a bug of its own."""


class Broken:
    """A matcher of a grammar that its library cannot deal with."""

    def __init__(self, where: str) -> None:
        self._where = where

    def copy(self) -> Broken:
        return self

    def accept(self, token: int) -> bool:
        if self._where == "accept":
            raise Panic
        return True

    def terminated(self) -> bool:
        if self._where == "terminated":
            raise Panic
        return False


@pytest.mark.parametrize("where", ["accept", "terminated"])
def test_a_grammar_whose_library_breaks_ends_its_own_request(where: str) -> None:
    seq = sequence()
    seq.matcher = Broken(where)
    with pytest.raises(GrammarError, match="the request's grammar failed: Panic"):
        take_tokens(seq, [5, 6])
