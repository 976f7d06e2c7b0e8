"""Logprobs as OpenAI's two routes and vLLM's prompt_logprobs spell them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pegainfer.contract.event import TokenLogprob
from pegainfer.frontend.http.answer.choice import Entry
from pegainfer.frontend.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text. Where its bytes are no UTF-8 of their own, OpenAI's spelling: 'bytes:\\xe2\\x80'."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    return TopLogprob(token_name(tokenizer, token), logprob, list(tokenizer.token_bytes(token)))


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[Entry]) -> ChatLogprobs:
    """As the chat routes answer them: tokens by name and by bytes."""
    content = []
    for entry in entries:
        own = entry.logprob
        head = _top(tokenizer, own.token, own.logprob)
        tops = [_top(tokenizer, token, logprob) for token, logprob in own.top]
        content.append(ChatLogprob(head.token, head.logprob, head.bytes, tops))
    return ChatLogprobs(content)


def completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[Entry], *, top: int, offset: int = 0
) -> CompletionLogprobs:
    """
    Args:
        top: how many alternatives a token were asked for; 0: none, only the drawn token.
        offset: characters before the continuation in the answer's text (echo).
    """
    out = CompletionLogprobs([], [], [] if top else None, [])
    for entry in entries:
        _append(out, tokenizer, entry.logprob, entry.start + offset, top)
    return out


def echo_logprobs(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    starts: Sequence[int],
    *,
    top: int,
) -> CompletionLogprobs:
    """The prompt's own part of an echoed completion; its first token has no logprob.

    Args:
        starts: where each token's text begins in the prompt's text, in characters.
    """
    out = CompletionLogprobs([], [], [] if top else None, [])
    for token, logprob, start in zip(ids, logprobs, starts, strict=True):
        if logprob is not None:
            _append(out, tokenizer, logprob, start, top)
            continue
        out.tokens.append(token_name(tokenizer, token))
        out.token_logprobs.append(None)
        out.text_offset.append(start)
        if out.top_logprobs is not None:
            out.top_logprobs.append(None)
    return out


def _append(out: CompletionLogprobs, tokenizer: Tokenizer, own: TokenLogprob, offset: int, top: int) -> None:
    name = token_name(tokenizer, own.token)
    out.tokens.append(name)
    out.token_logprobs.append(own.logprob)
    out.text_offset.append(offset)
    if out.top_logprobs is not None:
        best = {token_name(tokenizer, token): logprob for token, logprob in own.top[:top]}
        best.setdefault(name, own.logprob)
        out.top_logprobs.append(best)


def join(a: CompletionLogprobs, b: CompletionLogprobs) -> CompletionLogprobs:
    """Those of a text and of what follows it; candidates only where both have them."""
    tops = None if a.top_logprobs is None or b.top_logprobs is None else a.top_logprobs + b.top_logprobs
    return CompletionLogprobs(
        a.tokens + b.tokens, a.token_logprobs + b.token_logprobs, tops, a.text_offset + b.text_offset
    )


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None], top: int
) -> list[dict[str, PromptLogprob] | None]:
    """vLLM's shape: for each prompt token its id and the `top` best ids, each with logprob, rank and text."""
    out: list[dict[str, PromptLogprob] | None] = []
    for own in logprobs:
        if own is None:
            out.append(None)
            continue
        row = {
            str(token): PromptLogprob(logprob, rank, token_name(tokenizer, token))
            for rank, (token, logprob) in enumerate(own.top[:top], 1)
        }
        row[str(own.token)] = PromptLogprob(own.logprob, own.rank, token_name(tokenizer, own.token))
        out.append(row)
    return out
