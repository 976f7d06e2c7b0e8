"""Arguments on their way: passed on as they are written, and the same wherever the text is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.frontend.tools.call import Tool
from pegainfer.frontend.tools.json_stream import MAX_DEPTH, JsonStream
from pegainfer.frontend.tools.pieces import CallBegun, CallText, Piece, calls_of
from pegainfer.frontend.tools.python_stream import PythonStream
from pegainfer.frontend.tools.scanner import ToolScanner
from pegainfer.frontend.tools.styles import STYLES
from pegainfer.frontend.tools.syntax import ArgumentStream

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(-1e300, 1e300) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)
WRITE = Tool(
    "write",
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}},
        "required": ["path"],
    },
)


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    return [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def follow(stream: ArgumentStream, pieces: list[str]) -> str:
    """What is passed on of a text, in pieces. What comes after the end must be left as `rest`."""
    out = ""
    for i, piece in enumerate(pieces):
        out += stream.push(piece)
        if stream.done or stream.broken:
            left = stream.rest + "".join(pieces[i + 1 :])
            assert stream.done or "".join(pieces).endswith(left)
            return out + "|" + left
    return out + "|" + stream.flush()


@given(OBJECTS, st.booleans(), st.sampled_from([None, 2]), st.data())
def test_json_is_passed_on_as_it_is_written(
    value: dict[str, Any], ascii: bool, indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert follow(JsonStream(), pieces_of(text + "\n} rest", data)) == text + "|\n} rest"
    around = text + ', "id": "}", "n": [1]} rest'
    stream = JsonStream(within=True)
    assert follow(stream, pieces_of(around, data)) == text + "| rest"


FRAGMENTS = (
    "{", "}", "[", "]", '"', '"', ":", ",", "\\", "\\u", "d83d", "de00", "\\ud83d\\ude00", "\\ud83d", "\\n",
    "\\x", "1", "-", "e9", "1e999", ".5", "true", "nul", "null", "NaN", " ", "\n", "\t", "ü", "x",
)  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20), st.booleans(), st.data())
def test_every_split_of_any_text_gives_the_same(
    fragments: list[str], within: bool, data: st.DataObject
) -> None:
    text = "{" + "".join(fragments)
    stream, other = JsonStream(within=within), JsonStream(within=within)
    whole = follow(stream, [text])
    assert follow(other, pieces_of(text, data)) == whole
    assert (stream.done, stream.broken, stream.whole) == (other.done, other.broken, other.whole)
    if stream.whole:
        assert isinstance(json.loads(whole.split("|")[0]), dict)


@pytest.mark.parametrize(
    ("text", "passed_on"),
    [
        ('{"a": "line\nbreak\x01"}', '{"a": "line\\nbreak\\u0001"}'),
        ('{"a": "\\ud83d\\ude00\\ud83dx\\udc00"}', '{"a": "\\ud83d\\ude00\\ufffdx\\ufffd"}'),
        ('{"a": 12345678901234567890123}', '{"a": 12345678901234567890123}'),
    ],
)
def test_what_json_forbids_in_strings_is_escaped(text: str, passed_on: str) -> None:
    for pieces in ([text], list(text)):
        assert follow(JsonStream(), pieces) == passed_on + "|"
    assert json.dumps(json.loads(passed_on), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "text",
    ['{"a" 1}', '{"a": 01}', '{"a": 1,}', '{"a": [1,]}', '{a: 1}', '{"a": nan}', '{"a": "\\x"}',
     '{"a": "\\u12g4"}', '{"a": 1e999}', '{"a": }', '{"a": 1]', '{,}', '{"a": 1 2}',
     '{"a": ' + "[" * MAX_DEPTH],
)  # fmt: skip
def test_what_is_no_json_breaks_a_stream(text: str) -> None:
    with pytest.raises(ValueError):
        json.loads(text, parse_constant=int, parse_float=lambda t: int(t))
    for pieces in ([text], list(text)):
        stream = JsonStream()
        follow(stream, pieces)
        assert stream.broken and not stream.done and not stream.whole


def in_three_quotes(text: str) -> str:
    return '"""' + ascii(text)[1:-1].replace('"', '\\"') + '"""'


QUOTED: tuple[Callable[[str], str], ...] = (repr, ascii, json.dumps, in_three_quotes)


@given(TEXT, VALUES, st.sampled_from(QUOTED), st.data())
def test_python_values_become_json(
    text: str, value: Any, quoted: Callable[[str], str], data: st.DataObject
) -> None:
    call = f"a={quoted(text)}, b_2 = {value!r} ,c=[]) , rest"
    found, left = follow(PythonStream(), pieces_of(call, data)).rsplit("|", 1)
    assert left == " , rest"
    assert json.loads(found) == {"a": text, "b_2": value, "c": []}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'\x41\u00fc\101\0\a\'\"\q'", 'Aü' + "A\0\a'\"\\q"),
        ("'\\ud83d\\ude00 \\ud83d!'", "\U0001f600 \ufffd!"),
        ("'two\nlines'", "two\nlines"),
        ("'a\\\nb'", "ab"),
        ("''", ""),
    ],
)  # fmt: skip
def test_escapes_of_python_strings(text: str, value: str) -> None:
    for pieces in ([f"a={text})"], list(f"a={text})")):
        assert json.loads(follow(PythonStream(), pieces).rsplit("|", 1)[0]) == {"a": value}


@pytest.mark.parametrize(
    "text", ["a=f())", "a='x' 'y')", "a='x' + y)", "a=b)", "*a)", "a='\\N{DASH}')", "a=1e999)"]
)
def test_what_is_no_literal_breaks_a_python_call(text: str) -> None:
    for pieces in ([text], list(text)):
        stream = PythonStream()
        follow(stream, pieces)
        assert stream.broken and not stream.whole


# A call of `write` in every style, with a long text, as (before the text, after it).
CALLS = {
    "hermes": ('<tool_call>\n{"name": "write", "arguments": {"path": "a", "text": "', '"}}\n</tool_call>'),
    "llama3_json": ('{"name": "write", "parameters": {"path": "a", "text": "', '"}}'),
    "mistral": (
        '[TOOL_CALLS][{"name": "write", "arguments": {"path": "a", "text": "',
        '"}, "id": "abcdefghi"}]',
    ),
    "mistral_v11": ('[TOOL_CALLS]write[ARGS]{"path": "a", "text": "', '"}'),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n"
        '{"path": "a", "text": "',
        '"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{"path": "a", "text": "',
        '"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
        '{"path": "a", "text": "',
        '"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=text>\n",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
    "pythonic": ('[write(path="a", text="', '")]'),
    **{
        style: (
            f'<｜DSML｜{block}>\n<｜DSML｜invoke name="write">\n'
            '<｜DSML｜parameter name="path" string="true">a</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="text" string="true">',
            f"</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{block}>",
        )
        for style, block in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
    },
}


def shown(pieces: list[Piece]) -> str:
    """The arguments in these pieces."""
    return "".join(p.text for p in pieces if isinstance(p, CallText))


@pytest.mark.parametrize("style", sorted(STYLES))
def test_arguments_come_out_as_they_are_written(style: str) -> None:
    before, after = CALLS[style]
    scanner = ToolScanner(STYLES[style].syntax, (WRITE,))
    found = [piece for c in before for piece in scanner.push(c)]
    assert found[0] == CallBegun("write", found[0].id if isinstance(found[0], CallBegun) else None)
    assert shown(found).rstrip() == '{"path": "a", "text": "'
    for i in range(300):
        text = "ab cd<\n"[i % 6]
        step = scanner.push(text)
        # A character that may belong to the end of a value waits for the next one.
        waiting = style in ("qwen3_coder", "deepseek_v32", "deepseek_v4") and text == "<"
        assert waiting or shown(step).endswith(text), (style, i)
        found += step
    for c in after:
        found += scanner.push(c)
    found += scanner.flush(truncated=False)
    (call,) = calls_of(found)
    assert call.whole and json.loads(call.arguments) == {"path": "a", "text": "ab cd<" * 50}
    assert "".join(p for p in found if isinstance(p, str)) == ""


@given(st.sampled_from(sorted(STYLES)), TEXT, st.integers(1, 3), st.data())
def test_any_text_comes_through_in_parallel_calls(
    style: str, text: str, repeats: int, data: st.DataObject
) -> None:
    before, after = CALLS[style]
    plain = style in ("qwen3_coder", "deepseek_v32", "deepseek_v4")
    inner = text if plain else json.dumps(text, ensure_ascii=data.draw(st.booleans()))[1:-1]
    answer = (before + inner + after) * repeats
    if style in ("mistral", "pythonic"):
        head, tail = ("[TOOL_CALLS][", "]") if style == "mistral" else ("[", "]")
        one = (before + inner + after).removeprefix(head).removesuffix(tail)
        answer = head + ", ".join([one] * repeats) + tail
    elif style == "llama3_json":
        answer = "; ".join([before + inner + after] * repeats)
    scanner = ToolScanner(STYLES[style].syntax, (WRITE,))
    found = [piece for part in pieces_of(answer, data) for piece in scanner.push(part)]
    found += scanner.flush(truncated=False)
    calls = calls_of(found)
    assert [(c.name, c.whole, json.loads(c.arguments)) for c in calls] == [
        ("write", True, {"path": "a", "text": text})
    ] * repeats
    assert "".join(p for p in found if isinstance(p, str)) == ""


PROSE = {
    "hermes": "Put it in <tool_call> and </tool_call> tags, as `<tool_call>{}` shows.",
    "qwen3_coder": "Begin with <tool_call>, then <function=NAME> or <function=write> as the manual says.",
    "deepseek_v31": "The marker <｜tool▁calls▁begin｜> begins a section.",
    "deepseek_v32": "Say <｜DSML｜function_calls> and <｜DSML｜invoke name=, no more.",
    "llama3_json": '{"answer": 1, "why": "it is"}',
    "pythonic": "[see write() for more](x)",
    "mistral": "[TOOL_CALLS] is a marker.",
}


@pytest.mark.parametrize("style", PROSE)
def test_prose_about_calls_is_shown_soon_and_as_it_is(style: str) -> None:
    text = PROSE[style] + " And so on, for a long time, without any further marker at all."
    scanner = ToolScanner(STYLES[style].syntax, (WRITE,))
    out = ""
    for i, c in enumerate(text):
        pieces = scanner.push(c)
        out += "".join(p for p in pieces if isinstance(p, str))
        assert len(out) >= i - 45, f"silent after {text[: i + 1]!r}"
    out += "".join(p for p in scanner.flush(truncated=False) if isinstance(p, str))
    assert out == text
