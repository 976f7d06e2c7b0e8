"""The forms in which the offline API takes prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.tokenizer import Tokenizer

# A text, token ids, or a mapping with one of them under 'prompt' or 'prompt_token_ids'.
PromptType = str | Sequence[int] | Mapping[str, Any]
_FORMS = "a text, token ids, or a dict with 'prompt' or 'prompt_token_ids'"


@dataclass(frozen=True)
class Prompt:
    """One prompt in token ids, with its text where that is known."""

    text: str | None
    ids: list[int]


def as_list(prompts: PromptType | Sequence[PromptType]) -> list[PromptType]:
    """One prompt, or several in their order. Raises RequestError for what is neither."""
    given: Any = prompts  # a caller's word for its type is not enough
    if isinstance(given, str | Mapping) or _are_ids(given):
        return [given]
    if not isinstance(given, Sequence):
        raise RequestError("bad prompts", expected=f"{_FORMS}, or a list of such", got=type(given).__name__)
    return list(given)


def encode_prompt(prompt: PromptType, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> Prompt:
    """Raises RequestError where it is none of the known forms, or empty."""
    text: Any = prompt
    if isinstance(prompt, Mapping):
        if len(prompt.keys() & {"prompt", "prompt_token_ids"}) != 1 or len(prompt) != 1:
            raise RequestError("bad prompt", expected=_FORMS, got=f"keys {sorted(map(str, prompt))}")
        (text,) = prompt.values()
    if _are_ids(text):
        return Prompt(None, list(text))
    if not isinstance(text, str):
        raise RequestError("bad prompt", expected=_FORMS, got=f"{text!r:.80}")
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not ids:
        raise RequestError("empty prompt", expected="at least one token", got=repr(text), param="prompt")
    return Prompt(text, ids)


def truncated(prompt: Prompt, keep: int | None, longest: int) -> Prompt:
    """The prompt's last tokens. Raises RequestError for a number out of range.

    Args:
        keep: how many; None: all; -1: as many as `longest`.
        longest: what the context holds with a token after it.
    """
    if keep is None:
        return prompt
    if keep != -1 and not 1 <= keep <= longest:
        raise RequestError(
            "truncate_prompt_tokens is out of range", expected=f"-1, or 1 to {longest}", got=keep,
            param="truncate_prompt_tokens",
        )  # fmt: skip
    return Prompt(prompt.text, prompt.ids[-(longest if keep == -1 else keep) :])


def _are_ids(value: object) -> bool:
    """A non-empty sequence of integers that fit int32; the engine checks them against its vocabulary."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(type(v) is int and 0 <= v < 2**31 for v in value)
    )
