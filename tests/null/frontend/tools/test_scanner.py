"""Calls in every style, however the text is cut; broken and cut-off ones."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.frontend.tools.call import ToolCall
from pegainfer.frontend.tools.pieces import CallBegun, CallEnded, CallText, Piece, calls_of
from pegainfer.frontend.tools.scanner import ToolScanner
from pegainfer.frontend.tools.styles import STYLES
from tests.null.frontend.tools.examples import EXAMPLES, TOOLS

FRAGMENTS = (
    "<tool_call>", "</tool_call>", '{"name": "now", "arguments": {}}', "<function=now>", "</function>",
    "{", "}",
    "<parameter=a>", "</parameter>", "[TOOL_CALLS]", "[", "]", "now()", "now[ARGS]{}", "<|python_tag|>",
    "<|tool_call_begin|>", "functions.now:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "now<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    '<｜DSML｜invoke name="now">', "</｜DSML｜invoke>", '"', "\\", " ", "\n", "x", ";", "<", "</", "ü",
)  # fmt: skip


def scan(style: str, pieces: list[str], *, truncated: bool = False) -> tuple[str, list[ToolCall]]:
    found = [piece for step in steps(style, pieces, truncated=truncated) for piece in step]
    in_call = False
    for piece in found:  # the order that pieces.py promises
        assert in_call == isinstance(piece, CallText | CallEnded)
        in_call = isinstance(piece, CallBegun | CallText)
        assert piece not in ("", CallText(""))
    assert not in_call
    return "".join(p for p in found if isinstance(p, str)), calls_of(found)


def steps(style: str, pieces: list[str], *, truncated: bool = False) -> list[list[Piece]]:
    """What each piece of a text completes, and what its end does."""
    scanner = ToolScanner(STYLES[style].syntax, TOOLS)
    return [*(scanner.push(piece) for piece in pieces), scanner.flush(truncated=truncated)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    example = EXAMPLES[name]
    text, calls = scan(example.style, [example.text])
    assert [(c.name, json.loads(c.arguments)) for c in calls] == list(example.calls)
    assert text == example.content


@pytest.mark.parametrize("name", EXAMPLES)
def test_one_character_at_a_time(name: str) -> None:
    example = EXAMPLES[name]
    assert scan(example.style, list(example.text)) == scan(example.style, [example.text])


@given(st.data())
def test_every_split_gives_the_same(data: st.DataObject) -> None:
    style = data.draw(st.sampled_from(sorted(STYLES)))
    fragments = data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=14))
    if data.draw(st.booleans()):
        own = [e.text for e in EXAMPLES.values() if e.style == style]
        fragments.insert(data.draw(st.integers(0, len(fragments))), data.draw(st.sampled_from(own)))
    text = "".join(fragments)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    for truncated in (False, True):
        whole = scan(style, [text], truncated=truncated)
        assert scan(style, pieces, truncated=truncated) == whole
        assert all(isinstance(json.loads(c.arguments), dict) for c in whole[1] if c.whole)


@given(st.text(max_size=40), st.sampled_from(sorted(STYLES)))
def test_text_without_calls_is_untouched(text: str, style: str) -> None:
    shown, calls = scan(style, [text])
    assert calls or shown == text


@pytest.mark.parametrize(
    ("style", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa', '{"city": "Pa'),
        ("llama3_json", '{"name": "get_weather", "parameters": {"ci', '{"ci'),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"', '{"'),
        ("mistral_v11", '[TOOL_CALLS]get_weather[ARGS]{"city"', '{"city"'),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{", "{"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{", "{"),
        ("kimi_k2", "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{", "{"),
        (
            "qwen3_coder",
            "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n1",
            '{"city": "Paris"',
        ),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
            '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" str',
            '{"city": "Paris"',
        ),
        ("pythonic", '[get_weather(city="Paris", days=', '{"city": "Paris"'),
    ],
)
def test_what_is_known_of_a_call_that_a_limit_cut_off(style: str, text: str, arguments: str) -> None:
    for truncated in (True, False):
        shown, calls = scan(style, [text], truncated=truncated)
        assert not shown
        assert [(c.name, c.arguments, c.whole) for c in calls] == [("get_weather", arguments, False)]


WRITE_JSON = sorted(set(STYLES) - {"qwen3_coder", "pythonic", "deepseek_v32", "deepseek_v4"})


@pytest.mark.parametrize("style", WRITE_JSON)
def test_wherever_a_limit_cuts_only_what_is_of_the_arguments_is_shown_as_such(style: str) -> None:
    text = EXAMPLES[style].text
    _, whole = scan(style, [text])
    seen = 0
    for end in range(len(text)):
        _, calls = scan(style, [text[:end]], truncated=True)
        assert len(calls) >= seen
        seen = len(calls)
        assert [c.name for c in calls] == [c.name for c in whole[:seen]]
        for call, complete in zip(calls[:-1], whole, strict=False):
            assert json.loads(call.arguments) == json.loads(complete.arguments)
        if calls:
            last, complete = calls[-1].arguments, whole[seen - 1].arguments
            assert complete.startswith(last) or json.loads(last) == json.loads(complete)
    assert seen == len(whole)


def test_the_models_own_id_is_kept() -> None:
    _, calls = scan("kimi_k2", [EXAMPLES["kimi_k2"].text])
    assert [c.id for c in calls] == ["functions.get_weather:0", "functions.now:1"]


@pytest.mark.parametrize("number", ["1e999", "NaN", "Infinity"])
def test_numbers_that_json_does_not_have_make_no_whole_call(number: str) -> None:
    """What was written is passed on, so that the client can tell the model; text if the tool is unknown."""
    text = f'<tool_call>{{"name": "now", "arguments": {{"a": {number}}}}}\n</tool_call> x'
    shown, calls = scan("hermes", [text])
    assert shown == " x"
    assert calls == [ToolCall("now", f'{{"a": {number}}}', whole=False)]
    unknown = text.replace("now", "other")
    assert scan("hermes", [unknown]) == (unknown, [])


def test_a_call_that_never_ends_is_read_a_bounded_number_of_times() -> None:
    text = '<tool_call>{"name": "other", "arguments": {"a": "' + "</tool_call>" * 500
    shown, calls = scan("hermes", [text])
    assert shown.startswith(text[:60]) and not calls


HOSTILE = {
    "half a character": '"\\ud83d"',
    "half a character as a key": '{"\\udc00": "\\ud83d\\ud83d"}',
    "nested deeply": "[" * 900 + "]" * 900,
    "nested too deeply": "[" * 5000 + "]" * 5000,
    "a number of many digits": "1" + "0" * 5000,
    "a number beyond JSON": "1e999",
    "no number of JSON": "NaN",
}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("name", EXAMPLES)
def test_whatever_a_model_writes_can_be_sent(name: str, hostile: str) -> None:
    """As a call, or as the text that it is where it cannot be read as one."""
    example = EXAMPLES[name]
    for written in (HOSTILE[hostile], HOSTILE[hostile].strip('"')):
        text = example.text.replace('"Paris"', written).replace("Paris", written)
        shown, calls = scan(example.style, [text])
        assert shown.encode() or calls
        for call in calls:
            assert call.name.encode() and call.arguments.encode()
            if call.whole:
                arguments = json.loads(call.arguments)
                assert isinstance(arguments, dict) and json.dumps(arguments, ensure_ascii=False).encode()
