"""What is sent: prompts with exact lengths, drawn from a seed or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pegainfer.bench.config import DatasetConfig
from pegainfer.contract.errors import ConfigError

# Without a tokenizer: ids that every vocabulary has, above where many keep their special tokens.
FIRST_PLAIN_ID = 32
PLAIN_IDS = 256
# Conversations outside of these are left out, as they are by the tools that users compare with.
SHAREGPT_LEAST, SHAREGPT_PROMPT, SHAREGPT_TOTAL = 4, 1024, 2048


class TextTool(Protocol):
    """The tokenizer, as far as prompts need it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]:
        """Without special tokens."""

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str | list[int]
    prompt_len: int | None  # tokens; None where only the server can tell
    output_len: int
    at: float | None = None  # seconds after the start, where the dataset says


class _Draw:
    """Token ids at random: by a generator, or by the key of a block that recurs."""

    def __init__(self, config: DatasetConfig, seed: int, text: TextTool | None) -> None:
        self.rng = np.random.default_rng(seed)
        self._seed = seed
        if config.vocab_size is not None or text is None:
            top = config.vocab_size or PLAIN_IDS
            self._ids = np.arange(FIRST_PLAIN_ID, top)
        else:
            self._ids = np.array(sorted(set(range(text.vocab_size)) - text.special_ids))

    def tokens(self, count: int) -> list[int]:
        return self._take(self.rng, count)

    def block(self, key: int, count: int) -> list[int]:
        """The same tokens for the same key and seed."""
        return self._take(np.random.default_rng([self._seed, key]), count)

    def length(self, middle: int, ratio: float) -> int:
        """Uniform over [middle·(1−ratio), middle·(1+ratio)], at least 1."""
        low, high = int(np.floor(middle * (1 - ratio))), int(np.ceil(middle * (1 + ratio)))
        return max(1, int(self.rng.integers(low, high + 1)))

    def _take(self, rng: np.random.Generator, count: int) -> list[int]:
        out: list[int] = self._ids[rng.integers(0, len(self._ids), count)].tolist()
        return out


def token_source(config: DatasetConfig, seed: int, text: TextTool | None) -> Callable[[int], list[int]]:
    """Gives as many random token ids as asked for."""
    return _Draw(config, seed, text).tokens


def load(config: DatasetConfig, count: int, seed: int, text: TextTool | None) -> list[Sample]:
    """`count` samples, fewer where the file has fewer and may not be repeated.

    Raises ConfigError for a file that cannot be read, and where the dataset needs a tokenizer.
    """
    draw = _Draw(config, seed, text)
    if config.dataset_name == "random":
        return _random(config, count, draw)
    if config.dataset_name == "prefix_repetition":
        samples = _prefix_repetition(config, count, draw)
        return samples if config.disable_shuffle else _shuffled(samples, seed)
    path = Path(config.dataset_path or "")
    if config.dataset_name == "timed_trace":
        return _timed_trace(config, path, count, draw)
    read = _sharegpt if config.dataset_name == "sharegpt" else _custom
    samples = list(read(config, path, text))
    if not samples:
        raise ConfigError("the dataset holds nothing to send", where=path)
    if not config.disable_shuffle:
        samples = _shuffled(samples, seed)
    if len(samples) < count and not config.no_oversample:
        samples = [samples[i % len(samples)] for i in range(count)]
    return samples[:count]


def _shuffled(samples: list[Sample], seed: int) -> list[Sample]:
    random.Random(seed).shuffle(samples)
    return samples


def _random(config: DatasetConfig, count: int, draw: _Draw) -> list[Sample]:
    prompt_len = config.input_len or config.random_input_len
    output_len = config.output_len or config.random_output_len
    input_ratio, output_ratio = config.range_ratios()
    prefix = draw.tokens(config.random_prefix_len)
    samples = []
    for _ in range(count):
        prompt = prefix + draw.tokens(draw.length(prompt_len, input_ratio))
        samples.append(Sample(prompt, len(prompt), draw.length(output_len, output_ratio)))
    return samples


def _prefix_repetition(config: DatasetConfig, count: int, draw: _Draw) -> list[Sample]:
    number = min(config.prefix_repetition_num_prefixes, count)
    prefixes = [draw.tokens(config.prefix_repetition_prefix_len) for _ in range(number)]
    output_len = config.output_len or config.prefix_repetition_output_len
    samples = []
    for i in range(count):  # the same prefix stands together, as the shuffle is optional
        prompt = prefixes[i * number // count] + draw.tokens(config.prefix_repetition_suffix_len)
        samples.append(Sample(prompt, len(prompt), output_len))
    return samples


def _timed_trace(config: DatasetConfig, path: Path, count: int, draw: _Draw) -> list[Sample]:
    """Rows in the file's order; equal hash ids give equal tokens, what they do not cover is fresh."""
    size = config.timed_trace_chunk_hash_size
    samples: list[Sample] = []
    first: float | None = None
    for row, where in _lines(path):
        if len(samples) == count:
            break
        at = _number(row, config.timed_trace_label_timestamp, where) * config.timed_trace_sec_multiplier
        first = at if first is None else first
        prompt_len = int(_number(row, config.timed_trace_label_input_length, where))
        output_len = int(_number(row, config.timed_trace_label_output_length, where))
        keys = row.get(config.timed_trace_label_hash_ids) or []
        if prompt_len < 1 or at < first or not all(isinstance(key, int) and key >= 0 for key in keys):
            raise ConfigError("a row of the trace", expected="prompts ≥ 1, times that ascend, ids ≥ 0",
                              got=json.dumps(row)[:120], where=where)  # fmt: skip
        prompt: list[int] = []
        for key in keys[: -(-prompt_len // size)]:
            prompt += draw.block(key, size)
        prompt = prompt[:prompt_len]
        prompt += draw.tokens(prompt_len - len(prompt))
        samples.append(Sample(prompt, prompt_len, config.output_len or max(1, output_len), at - first))
    if not samples:
        raise ConfigError("the trace holds no rows", where=path)
    return samples


def _sharegpt(config: DatasetConfig, path: Path, text: TextTool | None) -> Iterator[Sample]:
    """The first question of each conversation, and the length of its answer."""
    fixed = config.output_len or config.sharegpt_output_len
    if text is None and fixed is None:
        raise ConfigError("the answers' lengths are unknown", where="--dataset-name sharegpt",
                          remedy="give --tokenizer, or --sharegpt-output-len")  # fmt: skip
    for entry in _entries(path):
        turns = entry.get("conversations") or entry.get("conversation") or []
        if len(turns) < 2:
            continue
        question, reply = (turn.get("value", turn.get("content")) for turn in turns[:2])
        if not isinstance(question, str) or not isinstance(reply, str):
            raise ConfigError("a conversation", expected="turns with a text in 'value'", where=path)
        prompt_len = len(text.encode(question)) if text is not None else None
        output_len = fixed or len(text.encode(reply) if text is not None else ())
        if prompt_len is not None:
            total = prompt_len + output_len
            if min(prompt_len, output_len) < SHAREGPT_LEAST and fixed is None:
                continue
            if prompt_len > SHAREGPT_PROMPT or total > SHAREGPT_TOTAL:
                continue
        yield Sample(question, prompt_len, output_len)


def _custom(config: DatasetConfig, path: Path, text: TextTool | None) -> Iterator[Sample]:
    """Lines with 'prompt' (a text or token ids) and, with --custom-output-len -1, 'output_tokens'."""
    for row, where in _lines(path):
        prompt = row.get("prompt")
        ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
        if not prompt or not (isinstance(prompt, str) or ids):
            raise ConfigError("a line of the dataset", expected="a text or token ids in 'prompt'",
                              got=type(prompt).__name__, where=where)  # fmt: skip
        output_len = config.output_len or config.custom_output_len
        if output_len == -1:
            output_len = int(_number(row, "output_tokens", where))
        known = len(prompt) if ids else len(text.encode(prompt)) if text is not None else None
        yield Sample(prompt, known, output_len)


def _number(row: dict[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(f"field {name!r}", expected="a number ≥ 0", got=repr(value), where=where)
    return value


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("the dataset cannot be read", got=error, where=path) from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError("the dataset", expected="a JSON list of conversations", where=path)
    return entries


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Each JSON line, and where it stands."""
    try:
        with path.open() as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} holds no JSON object")
                yield row, f"{path}:{number}"
    except (OSError, ValueError) as error:
        raise ConfigError("the dataset cannot be read", got=error, where=path) from error


def exact_text(ids: list[int], text: TextTool, draw: Callable[[int], list[int]]) -> str | None:
    """A text that encodes to as many tokens as `ids`, near their own text; None where none was found.

    Decoding and encoding again may merge or split tokens: what is missing is drawn, what is over is cut.
    """
    wanted = len(ids)
    for _ in range(20):
        again = text.encode(text.decode(ids))
        if len(again) == wanted:
            return text.decode(ids)
        ids = again[:wanted] + draw(max(0, wanted - len(again)))
    return None
