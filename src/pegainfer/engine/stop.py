"""When a continuation ends by itself: EOS, stop ids, its grammar, max_tokens, the context's end."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from pegainfer.contract.errors import RequestError
from pegainfer.contract.event import FinishReason
from pegainfer.contract.grammar import Matcher
from pegainfer.engine.sequence import Sequence

log = logging.getLogger(__name__)


class GrammarError(Exception):
    """A continuation has left its grammar, or the grammar has become too complex to follow.

    kind: whose fault that is, as TokenEvent.error_kind.
    """

    def __init__(self, message: str, kind: str | None) -> None:
        super().__init__(message)
        self.kind = kind


def take_tokens(seq: Sequence, new: Seq[int]) -> tuple[int, FinishReason | None]:
    """Appends new tokens to `seq` up to the one that ends it.

    Returns how many were taken (the stop token included) and why it ended, if it did. A stop id ends nothing
    until min_tokens were generated before it; a grammar that allows nothing more ends it even before.

    Raises GrammarError where its grammar does not allow a token.
    """
    known = seq.tokens
    for taken, token in enumerate(new, 1):
        known.append(token)
        if token in seq.stop_ids and len(known) > seq.min_stop:
            return taken, FinishReason.STOP
        if seq.matcher is not None and _follow(seq.matcher, token):
            return taken, FinishReason.STOP
        if len(known) >= seq.limit:
            return taken, FinishReason.LENGTH
    return len(new), None


def _follow(matcher: Matcher, token: int) -> bool:
    """Takes the token; whether nothing more is allowed. Raises GrammarError, whatever the library raises."""
    try:
        accepted, over = matcher.accept(token), matcher.terminated()
    except BaseException as error:  # a panic of a library in Rust is no Exception
        log.exception("the grammars' library failed")
        raise GrammarError(f"the request's grammar failed: {type(error).__name__}", None) from None
    if not accepted:
        raise GrammarError(
            "the request's grammar cannot follow the text any further; "
            "remedy: a less ambiguous one, or fewer properties and choices at a time",
            RequestError.__name__,
        )
    return over
