"""Chats through the templates of several families, equal to what transformers makes of them."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError, RequestError
from pegainfer.frontend.chat_template import ChatTemplate
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.tools.styles import choose_reasoning, choose_style

FOLDER = Path(__file__).parents[2] / "data" / "templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
STYLE_OF = {
    "qwen3": "hermes",
    "qwen3_training": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_5_nothink": "qwen3_coder",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "mistral_v3_tekken": "mistral",
    "kimi_k2": "kimi_k2",
    "kimi_k2_thinking": "kimi_k2",
    # These show no tools, so they are told of them in Hermes' form.
    "deepseekv3": "hermes",
    "gemma3": "hermes",
    "llama3": "hermes",
}
THINK = {
    "qwen3", "qwen3_training", "qwen3_5_think", "qwen3_5_nothink", "deepseekv3", "deepseek_r1_distill",
    "kimi_k2_thinking",
}  # fmt: skip


@functools.cache
def renders() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "renders.json").read_text())
    return found


def test_every_template_has_its_renders() -> None:
    assert sorted(renders()["templates"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_renders_equal_transformers(name: str) -> None:
    golden = renders()
    source = (FOLDER / f"{name}.jinja").read_text()
    expected = golden["templates"][name]
    assert expected["sha256"] == hashlib.sha256(source.encode()).hexdigest()
    now = datetime.datetime.fromisoformat(golden["now"])
    special = {k: golden["variables"][k] for k in ("bos_token", "eos_token")}
    template = ChatTemplate(source, special)
    for case, text in expected["cases"].items():
        chat, option = case.rsplit(", ", 1)
        options = dict(golden["options"][option])
        opening, tools = options.pop("add_generation_prompt"), options.pop("tools", None)
        variables = {"date_string": golden["variables"]["date_string"], **options}

        def render(
            template: ChatTemplate = template,
            chat: str = chat,
            opening: bool = opening,
            tools: Any = tools,
            variables: Any = variables,
        ) -> str:
            messages = golden["chats"][chat]
            return template.render(
                messages, now=now, add_generation_prompt=opening, tools=tools, variables=variables
            )

        if text is None:
            with pytest.raises(RequestError):
                render()
        else:
            assert render() == text, case


@pytest.mark.parametrize("name", NAMES)
def test_the_style_is_known_by_the_template(name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text()
    if name in STYLE_OF:
        assert choose_style("auto", source).name == STYLE_OF[name]
    reasoning = choose_reasoning("auto", source)
    assert (reasoning is not None) == (name in THINK)
    if reasoning is not None:
        assert (reasoning.calls is not None) == name.startswith("kimi"), "Kimi calls tools amid its thoughts"


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
        ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "deepseek_v31"),
        ("{{ tools }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}", "deepseek_v3"),
    ],
)
def test_the_style_is_known_by_its_markers(template: str, style: str) -> None:
    """Of Qwen3-Coder, DeepSeek V3.1 and V3 with tools."""
    assert choose_style("auto", template).name == style


@pytest.mark.parametrize(
    ("name", "style"),
    [("qwen3_xml", "qwen3_coder"), ("llama4_pythonic", "pythonic"), ("llama4_json", "llama3_json")],
)
def test_other_servers_names_of_parsers_are_taken(name: str, style: str) -> None:
    assert choose_style(HttpConfig(tool_call_parser=name).tool_call_parser, None).name == style


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_the_known_ones(flag: str) -> None:
    known: Any = {"tool_call_parser": "kimi_k2", "reasoning_parser": "deepseek_r1"}
    HttpConfig(**{flag: known[flag]})
    with pytest.raises(ConfigError, match=rf"--{flag.replace('_', '-')}") as caught:
        HttpConfig(**{flag: "gpt"})
    assert known[flag] in str(caught.value) and "auto" in str(caught.value)
