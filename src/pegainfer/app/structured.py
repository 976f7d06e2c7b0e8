"""Answers that must obey a schema, a regular expression, choices or a grammar: the offline API's side."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegainfer.contract.errors import RequestError
from pegainfer.contract.request import GrammarSpec
from pegainfer.frontend.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_GRAMMAR_BYTES = 4 << 20  # of a schema or grammar; whoever asks waits for it, unlike with a server
MAX_KEPT = 256  # grammars in the engine's form


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What a text must be: exactly one of these, as `structured_outputs` of a request over HTTP.

    Args:
        json: a JSON schema, as an object or as text.
        regex: of the whole text, in Rust's syntax.
        choice: texts, one of which is the answer.
        grammar: in Lark's or GBNF's form.
        json_object: true for any JSON object.
        structural_tag: with `structures` and `triggers`.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Mapping[str, Any] | str | None = None


class GrammarMaker:
    """Checks what is asked for and gives it the engine's form. Any thread may call it.

    Its tokenizer, which takes half a second, is made at the first use.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ll_tokenizer: LLTokenizer | None = None
        self._kept: dict[str, GrammarSpec] = {}
        self._lock = threading.Lock()

    def make(self, wanted: StructuredOutputsParams) -> GrammarSpec:
        """Raises RequestError that names the faulty field."""
        # They come with the web stack, which programs without grammars do without.
        import msgspec

        from pegainfer.frontend.grammar.compiler import compile_grammar
        from pegainfer.frontend.grammar.vocabulary import ll_tokenizer, vocabulary_of
        from pegainfer.frontend.http.errors import ApiError
        from pegainfer.frontend.http.request.body import convert
        from pegainfer.frontend.http.request.formats import StructuredOutputs, structured_job

        fields = {name: value for name, value in vars(wanted).items() if value is not None}
        try:
            param, job = structured_job(
                convert(fields, StructuredOutputs, "structured_outputs"), MAX_GRAMMAR_BYTES
            )
        except ApiError as error:
            raise RequestError(error.message, param=error.param) from None
        key = msgspec.json.encode(job).decode()
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                if self._ll_tokenizer is None:
                    self._ll_tokenizer = ll_tokenizer(vocabulary_of(self._tokenizer))
                try:
                    kept = GrammarSpec(job.kind, compile_grammar(job, self._ll_tokenizer))
                except RequestError as error:
                    raise RequestError(f"{param}: {error}", param=param) from None
                if len(self._kept) >= MAX_KEPT:
                    self._kept.clear()
                self._kept[key] = kept
            return kept
