"""Prompts and lengths of every dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pegainfer.bench.config import DatasetConfig
from pegainfer.bench.datasets import Sample, exact_text, load
from pegainfer.contract.errors import ConfigError


class Words:
    """A tokenizer of words w0 … w99; id 0 is special."""

    vocab_size = 100
    special_ids = frozenset({0})

    def encode(self, text: str) -> list[int]:
        return [int(word[1:]) if word[1:].isdigit() else 1 for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(f"w{i}" for i in ids)


def lines(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ids_of(sample: Sample) -> list[int]:
    assert isinstance(sample.prompt, list)
    return sample.prompt


def test_random_lengths_are_exact_and_the_seed_repeats_them() -> None:
    config = DatasetConfig(random_input_len=40, random_output_len=7)
    samples = load(config, 20, 3, None)
    assert [(len(ids_of(s)), s.prompt_len, s.output_len) for s in samples] == [(40, 40, 7)] * 20
    assert samples == load(config, 20, 3, None)
    assert samples != load(config, 20, 4, None)
    assert len({tuple(ids_of(s)) for s in samples}) == 20
    assert {i for s in samples for i in ids_of(s)} <= set(range(32, 256))


def test_random_ratio_and_prefix() -> None:
    config = DatasetConfig(
        random_input_len=100,
        random_output_len=10,
        random_range_ratio='{"input": 0.2, "output": 0.5}',
        random_prefix_len=16,
    )
    samples = load(config, 300, 0, None)
    lengths = {len(ids_of(s)) for s in samples}
    assert min(lengths) == 96 and max(lengths) == 136
    assert {s.output_len for s in samples} == set(range(5, 16))
    assert len({tuple(ids_of(s)[:16]) for s in samples}) == 1


def test_ids_come_from_the_tokenizer_without_its_special_ones() -> None:
    samples = load(DatasetConfig(random_input_len=200), 20, 0, Words())
    assert {i for s in samples for i in ids_of(s)} == set(range(1, 100))


def test_prefix_repetition_shares_prefixes_evenly() -> None:
    config = DatasetConfig(
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=24,
        prefix_repetition_suffix_len=8,
        prefix_repetition_num_prefixes=5,
        prefix_repetition_output_len=3,
    )
    samples = load(config, 20, 0, None)
    assert {(s.prompt_len, s.output_len) for s in samples} == {(32, 3)}
    prefixes = [tuple(ids_of(s)[:24]) for s in samples]
    assert sorted(prefixes.count(p) for p in set(prefixes)) == [4] * 5
    assert len({tuple(ids_of(s)[24:]) for s in samples}) == 20


def test_timed_trace_gives_equal_hash_ids_equal_tokens(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 10, "output_length": 4, "hash_ids": [1, 2, 3]},
        {"timestamp": 1500, "input_length": 12, "output_length": 5, "hash_ids": [1, 2, 9]},
        {"timestamp": 4000, "input_length": 9, "output_length": 6},
    ]
    config = DatasetConfig(
        dataset_name="timed_trace",
        dataset_path=lines(tmp_path / "t.jsonl", rows),
        timed_trace_chunk_hash_size=4,
        timed_trace_sec_multiplier=0.001,
    )
    first, second, third = load(config, 10, 0, None)
    assert [s.at for s in (first, second, third)] == [0.0, 0.5, 3.0]
    assert [len(ids_of(s)) for s in (first, second, third)] == [10, 12, 9]
    assert [s.output_len for s in (first, second, third)] == [4, 5, 6]
    assert ids_of(first)[:8] == ids_of(second)[:8]
    assert ids_of(first)[8:] != ids_of(second)[8:10]


def test_hash_ids_that_end_early_are_filled_up(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 20, "output_length": 1, "hash_ids": [1]}
    config = DatasetConfig(
        dataset_name="timed_trace",
        dataset_path=lines(tmp_path / "t.jsonl", [row, row]),
        timed_trace_chunk_hash_size=4,
    )
    first, second = load(config, 2, 0, None)
    assert len(ids_of(first)) == 20
    assert ids_of(first)[:4] == ids_of(second)[:4] and ids_of(first)[4:] != ids_of(second)[4:]


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp": 0, "input_length": 4},
        {"timestamp": -1, "input_length": 4, "output_length": 1},
        {"timestamp": 0, "input_length": 0, "output_length": 1},
        {"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": ["a"]},
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    good = {"timestamp": 0, "input_length": 4, "output_length": 1}
    path = lines(tmp_path / "t.jsonl", [good, row])
    with pytest.raises(ConfigError, match=r"t\.jsonl:2"):
        load(DatasetConfig(dataset_name="timed_trace", dataset_path=path), 5, 0, None)


def conversation(question: str, reply: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": reply}]}


def test_sharegpt_takes_first_turns_and_leaves_out_what_is_too_short_or_long(tmp_path: Path) -> None:
    entries = [
        conversation("w1 w2 w3 w4", "w5 w6 w7 w8 w9"),
        conversation("w1", "w5 w6 w7 w8"),  # a short question
        conversation("w1 w2 w3 w4", "w5"),  # a short answer
        conversation("w1 " * 1025, "w5 w6 w7 w8"),
        conversation("w1 " * 1000, "w5 " * 1049),
        {"conversations": [{"from": "human", "value": "w1 w2 w3 w4"}]},
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps(entries))
    config = DatasetConfig(dataset_name="sharegpt", dataset_path=str(path), no_oversample=True)
    assert load(config, 10, 0, Words()) == [Sample("w1 w2 w3 w4", 4, 5)]
    repeated = DatasetConfig(dataset_name="sharegpt", dataset_path=str(path))
    assert load(repeated, 3, 0, Words()) == [Sample("w1 w2 w3 w4", 4, 5)] * 3


def test_sharegpt_without_a_tokenizer_needs_a_length(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([conversation("hello there", "hi")]))
    with pytest.raises(ConfigError, match="--tokenizer"):
        load(DatasetConfig(dataset_name="sharegpt", dataset_path=str(path)), 1, 0, None)
    config = DatasetConfig(dataset_name="sharegpt", dataset_path=str(path), sharegpt_output_len=9)
    assert load(config, 1, 0, None) == [Sample("hello there", None, 9)]


def test_custom_lines(tmp_path: Path) -> None:
    rows = [{"prompt": "w1 w2", "output_tokens": 5}, {"prompt": [7, 8, 9], "output_tokens": 6}]
    path = lines(tmp_path / "c.jsonl", rows)
    own = DatasetConfig(dataset_name="custom", dataset_path=path, custom_output_len=-1, disable_shuffle=True)
    assert load(own, 2, 0, Words()) == [Sample("w1 w2", 2, 5), Sample([7, 8, 9], 3, 6)]
    fixed = DatasetConfig(dataset_name="custom", dataset_path=path, output_len=3, disable_shuffle=True)
    assert [s.output_len for s in load(fixed, 4, 0, None)] == [3] * 4
    shuffled = DatasetConfig(dataset_name="custom", dataset_path=path)
    assert load(shuffled, 2, 1, None) == load(shuffled, 2, 1, None)


@pytest.mark.parametrize("content", ['{"prompt": 3}\n', "[1]\n", "{\n", '{"prompt": ""}\n'])
def test_custom_lines_that_are_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="dataset"):
        load(DatasetConfig(dataset_name="custom", dataset_path=str(path)), 1, 0, None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    config = DatasetConfig(dataset_name="custom", dataset_path=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        load(config, 1, 0, None)
    with pytest.raises(ConfigError, match="--dataset-path"):
        DatasetConfig(dataset_name="custom")


class Merging(Words):
    """Two equal words in a row are one token when encoded."""

    def encode(self, text: str) -> list[int]:
        ids = super().encode(text)
        return [i for k, i in enumerate(ids) if k == 0 or i != ids[k - 1]]


def test_a_text_of_exact_length_is_found_though_tokens_merge() -> None:
    fresh = iter(range(10, 99))
    text = exact_text([1, 1, 2, 2, 3], Merging(), lambda count: [next(fresh) for _ in range(count)])
    assert text == "w1 w2 w3 w10 w11"
    assert exact_text([1, 1], Merging(), lambda count: [1] * count) is None
