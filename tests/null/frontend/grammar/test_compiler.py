"""Every kind of grammar: what it lets through, and how its faults are told."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from pegainfer.contract.errors import RequestError
from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.grammar import vocabulary
from pegainfer.frontend.grammar.compiler import GrammarJob, Kind, compile_grammar, new_matcher
from pegainfer.frontend.grammar.vocabulary import Vocabulary, ll_tokenizer, vocabulary_of
from tests.support.schemas import SCHEMAS

EOS = 257


@functools.cache
def tokenizer() -> LLTokenizer:
    return ll_tokenizer(vocabulary_of(byte_tokenizer()))


def accepts(kind: Kind, grammar: Any, text: str) -> bool:
    """Whether the whole text obeys the grammar."""
    source = grammar if isinstance(grammar, str) else json.dumps(grammar)
    matcher = LLMatcher(tokenizer(), compile_grammar(GrammarJob(kind, source), tokenizer()), log_level=0)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


TAG = {
    "structures": [{"begin": "<call=f>", "schema": {"type": "integer"}, "end": "</call>"}],
    "triggers": ["<call="],
}


@pytest.mark.parametrize(
    ("kind", "grammar", "good", "bad"),
    [
        ("json_schema", {"type": "integer"}, "-12", "1.5"),
        ("json_schema", {"type": "object"}, '{"a": [1, {"b": null}]}', "[1]"),
        ("json_schema", {"type": "string", "maxLength": 2}, '"äö"', '"äöü"'),
        ("json_schema", {"enum": ["开心", "Sjöfart"]}, '"开心"', '"\\u5f00\\u5fc3"'),
        ("json_schema", '{"enum": ["Sj\\u00f6fart", "\\ud83d\\ude0a"]}', '"Sjöfart"', '"Sj?fart"'),
        ("json_schema", '{"enum": ["Sj\\u00f6fart", "\\ud83d\\ude0a"]}', '"😊"', '"?"'),
        ("json_schema", {"type": "object"}, "{}", "{} "),
        ("json_schema", {"type": "object"}, "{}", "{}\n"),
        ("regex", r"\d{3}-[a-z]+", "123-abc", "12-abc"),
        ("choice", ["yes", 'no "really"', "vielleicht ü\n"], 'no "really"', "no"),
        ("choice", ["yes", 'no "really"', "vielleicht ü\n"], "vielleicht ü\n", "vielleicht"),
        ("lark", 'start: "a" b\nb: /[0-9]+/', "a42", "b42"),
        ("lark", 'root ::= "a" digit+\ndigit ::= [0-9]\n', "a42", "a"),  # GBNF
        ("structural_tag", TAG, "words <call=f>12</call> and more", "words <call=f>twelve</call>"),
        ("structural_tag", TAG, "only words", "<call=g>"),
    ],
)
def test_what_a_grammar_lets_through(kind: Kind, grammar: Any, good: str, bad: str) -> None:
    assert accepts(kind, grammar, good)
    assert not accepts(kind, grammar, bad)


PAIRS = [b"ye", b"yes", b'"y', b"es", b"<|end|>"]  # beside all bytes; the last is the end of a text
PAIRS_EOS = 256 + len(PAIRS) - 1


def pairs() -> LLTokenizer:
    tokens = [bytes([byte]) for byte in range(256)] + PAIRS
    return ll_tokenizer(Vocabulary(tokens, [PAIRS_EOS], [PAIRS_EOS]))


@pytest.mark.parametrize(
    ("job", "before", "allowed"),
    [
        (GrammarJob("choice", '["yes"]'), b"", {b"y", b"ye", b"yes"}),
        (GrammarJob("choice", '["yes"]'), b"y", {b"e", b"es"}),
        (GrammarJob("regex", "yes!?"), b"", {b"y", b"ye", b"yes"}),
        (GrammarJob("lark", 'start: "yes" /[0-9]/'), b"", {b"y", b"ye", b"yes"}),
        (GrammarJob("lark", '%llguidance {}\nstart: "yes"'), b"", {b"y", b"ye", b"yes"}),
        (GrammarJob("json_schema", '{"const": "yes"}'), b"", {b'"', b'"y'}),
        (GrammarJob("json_schema", '{"const": "yes"}'), b'"', {b"y", b"ye", b"yes"}),
        (GrammarJob("json_schema", '{"const": "yes"}', 'start: "yes" @body'), b"", {b"y", b"ye", b"yes"}),
        (GrammarJob("json_schema", '{"const": "yes"}', 'start: "yes" @body'), b'yes"', {b"y", b"ye", b"yes"}),
        (GrammarJob("structural_tag", json.dumps(TAG)), b"<call=", {b"f"}),
    ],
)
def test_text_without_a_choice_may_be_spelt_in_any_tokens(
    job: GrammarJob, before: bytes, allowed: set[bytes]
) -> None:
    """A model that must write `"arguments"` letter by letter takes longer and loses its thread."""
    matcher = new_matcher(pairs(), compile_grammar(job, pairs()))
    assert all(matcher.consume_token(byte) for byte in before)
    mask = matcher.compute_bitmask()
    tokens = [bytes([byte]) for byte in range(256)] + PAIRS
    assert {token for i, token in enumerate(tokens) if mask[i >> 3] >> (i & 7) & 1} == allowed


def test_no_mask_cuts_a_long_text_without_a_choice_into_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """That would be done anew for each mask, and all of a batch waits for those."""
    library = pairs()
    text = compile_grammar(GrammarJob("json_schema", json.dumps({"const": "x" * 100_000})), library)
    asked: list[object] = []
    monkeypatch.setattr(vocabulary._Wrapper, "__call__", lambda self, text: asked.append(text) or [])
    matcher = new_matcher(library, text)
    for byte in b'"xxx':
        assert any(matcher.compute_bitmask())
        assert matcher.consume_token(byte)
    assert not asked


def test_whitespace_runs_are_bounded() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    for good in (" ", "    ", "\t", "\n", "\r\n", "\n" + " " * 40):
        assert accepts("json_schema", schema, f"[{good}1{good},{good}2{good}]")
    for bad in (" " * 5, "\n\n", "\n" + " " * 41, " \n"):
        assert not accepts("json_schema", schema, f"[1,{bad}2]")


@pytest.mark.parametrize(
    ("kind", "grammar", "reason"),
    [
        ("json_schema", {"type": "not-a-type"}, "not-a-type"),
        ("json_schema", {"$ref": "#"}, "no text at all"),
        ("json_schema", {"$ref": "#/$defs/missing"}, "missing"),
        ("json_schema", {"$ref": "http://localhost/schema"}, "http://localhost/schema"),
        ("json_schema", {"not": {"type": "string"}}, "not"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json_schema", {"type": "string", "pattern": "("}, "unclosed group"),
        ("json_schema", {"allOf": [{"type": "string"}, {"type": "number"}]}, "incompatible types"),
        ("regex", "(", "unclosed group"),
        ("lark", "start: missing", "missing"),
        ("lark", "root ::= (", "cannot be read"),
        ("structural_tag", {**TAG, "triggers": ["<tool"]}, "none of the triggers"),
    ],
)
def test_faults_name_their_reason_without_the_parsers_state(kind: Kind, grammar: Any, reason: str) -> None:
    source = grammar if isinstance(grammar, str) else json.dumps(grammar)
    with pytest.raises(RequestError, match="grammar") as caught:
        compile_grammar(GrammarJob(kind, source), tokenizer())
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value) and "compute_time_us" not in str(caught.value)


def test_recursion_is_honoured() -> None:
    schema = SCHEMAS["recursion"]
    assert accepts("json_schema", schema, '{"value": [1, [["a", null]], []]}')
    assert not accepts("json_schema", schema, '{"value": [1, [["a", true]], []]}')


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_of_the_bench_compile(name: str) -> None:
    assert compile_grammar(GrammarJob("json_schema", json.dumps(SCHEMAS[name])), tokenizer())


def test_special_tokens_are_no_text_and_eos_ends() -> None:
    grammar = compile_grammar(GrammarJob("regex", "(.|\\n)*"), tokenizer())
    mask = LLMatcher(tokenizer(), grammar).compute_bitmask()
    allowed = {i for i in range(258) if mask[i >> 3] >> (i & 7) & 1}
    assert EOS in allowed and 256 not in allowed
    assert ord("a") in allowed and ord("<") in allowed
