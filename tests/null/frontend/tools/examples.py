"""Answers in every style with the calls that are in them, after the families' own templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pegainfer.frontend.tools.call import Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["c", "f"]},
            "days": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
NOW = Tool("now")
TOOLS = (WEATHER, NOW)


@dataclass(frozen=True)
class Example:
    style: str
    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]
    content: str = ""


PARIS = ("get_weather", {"city": "Paris", "days": 2})
TRICKY = 'a "quoted" \\ </tool_call> ü\n'
EXAMPLES: dict[str, Example] = {
    "hermes": Example(
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        (PARIS, ("now", {})),
        "Let me see.",
    ),
    "hermes, an end marker in a string": Example(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a \\"quoted\\" \\\\ </tool_call> ü\\n"}}'
        "</tool_call> done",
        (("get_weather", {"city": TRICKY}),),
        " done",
    ),
    "hermes, arguments encoded twice": Example(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}\n</tool_call>',
        (("get_weather", {"city": "Oslo"}),),
    ),
    "hermes, no call": Example("hermes", "a < b and <tool_box>\n", (), "a < b and <tool_box>\n"),
    "hermes, a broken call is text": Example(
        "hermes",
        "<tool_call>{name: f}</tool_call>",
        (),
        "<tool_call>{name: f}</tool_call>",
    ),
    "hermes, the end marker is missing": Example(
        "hermes", '<tool_call>\n{"name": "now", "arguments": {}}', (("now", {}),)
    ),
    "qwen3_coder": Example(
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n"
        "</function>\n</tool_call>",
        (PARIS, ("now", {})),
        "I look.",
    ),
    "qwen3_coder, text as it is": Example(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</function> <b>\n\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        (("get_weather", {"city": "12\n</function> <b>\n", "tags": ["a", "b"]}),),
    ),
    "llama3_json": Example(
        "llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}', (PARIS,)
    ),
    "llama3_json, several": Example(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"name": "now", "parameters": {}}',
        (PARIS, ("now", {})),
    ),
    "llama3_json, text": Example("llama3_json", 'Say {"name": "x"}', (), 'Say {"name": "x"}'),
    "llama3_json, other JSON": Example("llama3_json", '{"answer": 1}', (), '{"answer": 1}'),
    "pythonic": Example("pythonic", '[get_weather(city="Paris", days=2), now()]', (PARIS, ("now", {}))),
    "pythonic, literals": Example(
        "pythonic",
        "<|python_start|>[f(a=[1, -2.5], b={'k': None}, c=true, d='x\\'y')]<|python_end|>",
        (("f", {"a": [1, -2.5], "b": {"k": None}, "c": True, "d": "x'y"}),),
    ),
    "pythonic, text": Example("pythonic", "[see the note]", (), "[see the note]"),
    "pythonic, nothing is run": Example("pythonic", "[f(a=g())]", (), "[f(a=g())]"),
    "deepseek_v3": Example(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (PARIS, ("now", {})),
    ),
    "deepseek_v31": Example(
        "deepseek_v31",
        "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (PARIS, ("now", {})),
        "Yes.",
    ),
    "deepseek_v32": Example(
        "deepseek_v32",
        'Well\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        (PARIS, ("now", {})),
        "Well",
    ),
    "deepseek_v4": Example(
        "deepseek_v4",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">2</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">["a"]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜tool_calls>",
        (("get_weather", {"city": "2", "tags": ["a"]}),),
    ),
    "kimi_k2": Example(
        "kimi_k2",
        "OK<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        (PARIS, ("now", {})),
        "OK",
    ),
    "mistral": Example(
        "mistral",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]',
        (PARIS, ("now", {})),
    ),
    "mistral_v11": Example(
        "mistral_v11",
        'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}',
        (PARIS, ("now", {})),
        "Sure.",
    ),
}
