"""The grammar of a request, checked in a worker process before the engine sees it."""

from __future__ import annotations

from pegainfer.contract.errors import RequestError
from pegainfer.contract.request import GrammarSpec
from pegainfer.frontend.grammar.compiler import GrammarJob
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.formats import Formatted, grammar_job
from pegainfer.frontend.http.front import Front


async def requested_grammar(front: Front, r: Formatted) -> GrammarSpec | None:
    """The grammar that a request's output must obey; None for free text. Raises ApiError (400)."""
    found = grammar_job(r, front.config.max_grammar_bytes)
    return None if found is None else await checked_grammar(front, *found)


async def checked_grammar(front: Front, param: str, job: GrammarJob) -> GrammarSpec:
    """Raises ApiError (400) that blames `param`, QueueFullError."""
    try:
        return await front.grammars.get(job)
    except RequestError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
