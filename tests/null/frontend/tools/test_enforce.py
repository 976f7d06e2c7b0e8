"""Grammars of required calls: whatever is drawn under them, the family's parser finds valid calls in it."""

from __future__ import annotations

import functools
import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from pegainfer.frontend.byte_tokenizer import byte_tokenizer
from pegainfer.frontend.grammar.compiler import GrammarJob, compile_grammar
from pegainfer.frontend.grammar.vocabulary import ll_tokenizer, vocabulary_of
from pegainfer.frontend.reasoning.think import ThinkScanner, ThinkState, ThinkSyntax
from pegainfer.frontend.tools.call import Tool, ToolCall
from pegainfer.frontend.tools.enforce import Lark, after_thinking, calls_only, calls_or_text
from pegainfer.frontend.tools.pieces import calls_of
from pegainfer.frontend.tools.scanner import ToolScanner
from pegainfer.frontend.tools.styles import STYLES, Style
from tests.null.frontend.tools.examples import EXAMPLES

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "$defs": {"tag": {"enum": ["a", "küHl"]}},
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["c", "f"]},
                "days": {"type": "integer", "minimum": 0, "maximum": 20},
                "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
                "deep": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
                         "additionalProperties": False},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool("now"),
    Tool("maybe", {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "null"}},
                   "additionalProperties": False}),
)  # fmt: skip
ID_256 = {"<|im_start|>": 256}


@functools.cache
def tokenizer() -> LLTokenizer:
    return ll_tokenizer(vocabulary_of(byte_tokenizer()))


@functools.cache
def grammar(style: str, *, single: bool = False, free: bool = False, state: ThinkState | None = None) -> str:
    lark = Lark(ID_256.get)
    frame = STYLES[style].frame
    if free:
        leading = STYLES[style].syntax.leading
        strict = [Tool(t.name, t.parameters, strict=True) for t in TOOLS]
        body = calls_or_text(lark, frame, strict, single=single, leading=leading)
    else:
        body = calls_only(lark, frame, TOOLS, single=single)
    if state is not None:
        body = after_thinking(lark, ThinkSyntax(), state, body)
    return compile_grammar(GrammarJob("lark", lark.source(body)), tokenizer())


def draw(source: str, rng: random.Random, most: int = 1200) -> bytes | None:
    """A random text under a grammar, None where it did not end in time."""
    matcher = LLMatcher(tokenizer(), source, log_level=0)
    out = bytearray()
    while not matcher.is_stopped() and len(out) < most:
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(258) if mask[i >> 3] >> (i & 7) & 1]
        if 257 in allowed and rng.random() < 0.5:
            break
        allowed = [i for i in allowed if i != 257]
        # Ends of values are drawn more often than a blind choice among 250 bytes would.
        likely = [i for i in allowed if chr(i) in '"}])\n</|｜']
        token = rng.choice(likely if likely and rng.random() < 0.4 else allowed)
        assert matcher.consume_token(token), matcher.get_error()
        out.append(token)
    return bytes(out) if matcher.is_accepting() else None


def found(style: Style, text: str) -> tuple[str, list[ToolCall]]:
    scanner = ToolScanner(style.syntax, TOOLS)
    pieces = scanner.push(text) + scanner.flush(truncated=False)
    return "".join(p for p in pieces if isinstance(p, str)), calls_of(pieces)


def check(calls: list[ToolCall]) -> None:
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[call.name])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("single", [True, False])
def test_what_is_drawn_is_calls_and_nothing_else(style: str, single: bool) -> None:
    rng = random.Random(style)
    ended = 0
    for _ in range(12):
        raw = draw(grammar(style, single=single), rng)
        if raw is None:
            continue
        ended += 1
        content, calls = found(STYLES[style], raw.decode(errors="replace"))
        assert calls and not content
        assert not single or len(calls) == 1
        check(calls)
    assert ended >= 2


def obeys(source: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer(), source, log_level=0)
    return all(matcher.consume_token(b) for b in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("name", [n for n, e in EXAMPLES.items() if n == e.style and n != "mistral_v11"])
def test_the_families_own_calls_obey(name: str) -> None:
    """Answers as the families write them, without words before the call."""
    example = EXAMPLES[name]
    text = example.text.removeprefix(example.content).lstrip()
    assert obeys(grammar(example.style), text)
    assert not obeys(grammar(example.style), "Let me see. " + text)


@pytest.mark.parametrize("style", STYLES)
def test_where_the_model_may_choose_text_is_free_and_calls_are_not(style: str) -> None:
    source = grammar(style, free=True)
    assert obeys(source, "No call, but 1 < 2.\nÜ")
    example = EXAMPLES[style]
    if style != "mistral_v11":
        assert obeys(source, example.text)
        assert not obeys(source, example.text.replace("city", "town"))


@pytest.mark.parametrize(
    ("state", "good", "bad"),
    [
        (ThinkState.OPEN, "well </thin </think>\n\n", ""),
        (ThinkState.UNKNOWN, "<think>\nwell\n</think>\n\n", "well</think>"),
        (ThinkState.UNKNOWN, "", "<think>"),
        (ThinkState.CLOSED, "", "<think></think>"),
    ],
)
def test_thoughts_come_before_calls(state: ThinkState, good: str, bad: str) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    source = grammar("hermes", state=state)
    assert obeys(source, good + call)
    assert not obeys(source, bad + call) or bad == good
    scanner = ThinkScanner(ThinkSyntax(), state)
    assert scanner.push(good + call)[1] == call


def test_a_special_token_is_asked_for_by_its_id() -> None:
    lark = Lark(ID_256.get)
    assert lark.text("a<|im_start|>b") == '"a" <[256]> "b"'
    body = lark.until("<|im_start|>")
    matcher = LLMatcher(tokenizer(), compile_grammar(GrammarJob("lark", lark.source(body)), tokenizer()))
    assert all(matcher.consume_token(t) for t in (97, 98, 256))
    assert matcher.is_accepting()
