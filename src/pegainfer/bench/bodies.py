"""The JSON body of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pegainfer.bench.config import DatasetConfig
from pegainfer.bench.datasets import Sample, TextTool, exact_text, token_source

_encoder = msgspec.json.Encoder()


def build(
    samples: Sequence[Sample],
    *,
    chat: bool,
    model: str | None,
    fields: dict[str, Any],
    dataset: DatasetConfig,
    seed: int,
    text: TextTool | None,
) -> list[bytes]:
    """One body a sample. A chat takes texts only: token ids become a text of as many tokens where a tokenizer
    is at hand, else one letter each, and only the server can tell their number."""
    draw = token_source(dataset, seed, text)
    bodies = []
    for sample in samples:
        body: dict[str, Any] = {} if model is None else {"model": model}
        if chat:
            content = sample.prompt
            if not isinstance(content, str):
                exact = exact_text(content, text, draw) if text is not None else None
                content = exact if exact is not None else _letters(content)
            body |= {"messages": [{"role": "user", "content": content}]}
            body["max_completion_tokens"] = sample.output_len
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
        bodies.append(_encoder.encode(body | fields))
    return bodies


def _letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + i % 26) for i in ids)
