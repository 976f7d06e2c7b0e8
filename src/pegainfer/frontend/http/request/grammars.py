"""The grammar of a request, checked in a worker process before the engine sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pegainfer.contract.errors import RequestError
from pegainfer.contract.request import GrammarSpec
from pegainfer.frontend.grammar.compiler import GrammarJob
from pegainfer.frontend.http.errors import ApiError
from pegainfer.frontend.http.front import Front
from pegainfer.frontend.http.request.formats import Formatted, grammar_job
from pegainfer.frontend.json_object import JsonObject


async def requested_grammar(front: Front, r: Formatted) -> GrammarSpec | None:
    """The grammar that a request's output must obey; None for free text. Raises ApiError (400)."""
    config = front.config
    found = grammar_job(r, config.max_grammar_bytes, open_objects=config.open_objects)
    return None if found is None else await checked_grammar(front, *found)


async def output_grammar(
    front: Front, param: str, job: GrammarJob, parameters: Sequence[JsonObject | None]
) -> GrammarSpec:
    """The grammar of an answer with tools. Raises ApiError (400) that blames the tool's schema at fault.

    Args:
        parameters: schemas of the request's tools, in order.
    """
    try:
        return await checked_grammar(front, param, job)
    except ApiError:
        for i, schema in enumerate(parameters):
            alone = GrammarJob(
                "json_schema", json.dumps(schema or {}), open_objects=front.config.open_objects
            )
            await checked_grammar(front, f"tools[{i}].function.parameters", alone)
        raise


async def checked_grammar(front: Front, param: str, job: GrammarJob) -> GrammarSpec:
    """Raises ApiError (400) that blames `param`, QueueFullError."""
    try:
        return await front.timed("grammar", front.grammars.get(job))
    except RequestError as error:
        raise ApiError(400, f"{param}: {error}", param=param) from None
