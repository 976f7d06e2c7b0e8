"""Grammars as the engine sees them: matchers that follow a continuation and say what may come next.

The front checks and compiles a grammar before it is submitted; the engine makes its matchers through a
factory that the assembly hands it, and knows nothing of the library behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pegainfer.contract.request import GrammarSpec


class Matcher(Protocol):
    """Follows the generated tokens of one continuation. Not thread safe."""

    def copy(self) -> Matcher:
        """One in the same state, independent from now on."""

    def accept(self, token: int) -> bool:
        """Moves on by a token. False: the grammar does not allow it, or has become too complex to follow;
        the matcher is then of no further use."""

    def terminated(self) -> bool:
        """Whether nothing but the end can follow."""


class GrammarFactory(Protocol):
    """Makes matchers over the engine's vocabulary. Any thread may call it, several at a time."""

    def known(self, spec: GrammarSpec) -> Matcher | None:
        """A fresh matcher where the grammar was compiled before; returns at once."""

    def compile(self, spec: GrammarSpec) -> Matcher:
        """A fresh matcher; may take as long as the front allows a grammar. Raises RequestError."""

    def masks(self, matchers: Sequence[Matcher], *, ends: Sequence[bool]) -> list[bytes | None]:
        """The tokens that each matcher allows next, as Runner.sample takes them.

        Args:
            ends: whether the model's EOS may be among them once the grammar accepts (not with ignore_eos).

        None for a matcher that cannot go on: its grammar has become too complex, or allows no token.
        """
