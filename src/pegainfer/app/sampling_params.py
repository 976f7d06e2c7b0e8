"""SamplingParams as users of the offline API write them: vLLM's names and defaults, text where it has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from pegainfer.app.structured import StructuredOutputsParams
from pegainfer.contract import request
from pegainfer.contract.errors import RequestError


class RequestOutputKind(Enum):
    """What each output of AsyncLLM.generate holds. LLM returns the whole answer in any case."""

    CUMULATIVE = 0  # the answer so far
    DELTA = 1  # what has come since the output before
    FINAL_ONLY = 2  # there is one output, the whole answer


@dataclass(kw_only=True)
class SamplingParams:
    """How one prompt is continued. Fields may be assigned until the prompt is submitted.

    Ranges are checked by the engine when the prompt is submitted.
    """

    n: int = 1  # continuations of the prompt
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None  # words that must not come up
    stop: str | Sequence[str] | None = None  # strings that end the text
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: up to the context's end
    min_tokens: int = 0
    logprobs: int | None = None  # of so many best tokens and of the drawn one
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True  # in the text
    detokenize: bool = True  # False: only token ids are wanted, the text stays empty
    truncate_prompt_tokens: int | None = None  # keep only so many last ones; -1: what the context holds
    structured_outputs: StructuredOutputsParams | None = None  # what the text must obey
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        """Raises RequestError where a field has a wrong type."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _fits(value, str(field.type)):
                raise RequestError(
                    f"bad {field.name}", expected=field.type, got=f"{value!r:.80}", param=field.name
                )
        if not self.detokenize and self.stop_strings:
            raise RequestError(
                "stop strings are found in the text", expected="detokenize=True", got="detokenize=False",
                param="stop",
            )  # fmt: skip

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def to_engine(
        self, encode: Callable[[str], list[int]], *, special_stops: Iterable[int] = ()
    ) -> request.SamplingParams:
        """The engine's form, in token ids.

        Args:
            encode: text to ids without special tokens.
            special_stops: ids of the stop strings that are special tokens.

        Raises RequestError for an empty bad word.
        """
        allowed = self.allowed_token_ids
        engine_fields = request.SamplingParams.__struct_fields__
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in engine_fields}
        values |= {
            "temperature": 0.0 if 0 <= self.temperature < request.GREEDY_BELOW else self.temperature,
            "top_k": max(self.top_k, 0) if self.top_k >= -1 else self.top_k,
            "logit_bias": tuple((self.logit_bias or {}).items()),
            "allowed_token_ids": None if allowed is None else tuple(allowed),
            "bad_words": self._bad_words(encode),
            "stop_token_ids": tuple(dict.fromkeys([*(self.stop_token_ids or ()), *special_stops])),
        }
        return request.SamplingParams(**values)

    def _bad_words(self, encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
        """Each word as a text begins with it and as it follows a space: these are different tokens."""
        found: dict[tuple[int, ...], None] = {}
        for word in self.bad_words or ():
            if not word.strip():
                raise RequestError(
                    "bad word without letters", expected="a word", got=repr(word), param="bad_words"
                )
            for spelling in (word, " " + word.lstrip(" ")):
                found[tuple(encode(spelling))] = None
        return tuple(found)


def _fits(value: object, kind: str) -> bool:
    """Whether a value is of one of the types of an annotation, as spelt in this file."""
    return any(_CHECKS[part](value) for part in kind.split(" | "))


def _is_int(value: object) -> bool:
    return type(value) is int


def _all(value: object, kind: type) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(type(v) is kind for v in value)


_CHECKS: dict[str, Callable[[object], bool]] = {
    "None": lambda value: value is None,
    "int": _is_int,
    "float": lambda value: type(value) in (int, float),
    "RequestOutputKind": lambda value: isinstance(value, RequestOutputKind),
    "StructuredOutputsParams": lambda value: isinstance(value, StructuredOutputsParams),
    "bool": lambda value: type(value) is bool,
    "str": lambda value: type(value) is str,
    "Sequence[int]": lambda value: _all(value, int),
    "Sequence[str]": lambda value: _all(value, str),
    "Mapping[int, float]": lambda value: (
        isinstance(value, Mapping) and all(_is_int(k) and type(v) in (int, float) for k, v in value.items())
    ),
}
