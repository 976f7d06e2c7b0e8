"""What takes the place of a model's own text side: another template, and variables for every chat."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from pegainfer.app.resolve import ModelRef
from pegainfer.app.text import load_text
from pegainfer.app.text_options import TextOptions, read_variables
from pegainfer.contract.errors import ConfigError, RequestError
from tests.support.modelfiles import gguf_bytes
from tests.support.qwentext import small_json, small_metadata

NOW = datetime.datetime(2026, 1, 2)
SAID = [{"role": "user", "content": "hi"}]
THINKS = "{{ 'yes' if enable_thinking else 'no' }} {{ messages[0]['content'] }}"


@pytest.fixture
def model(tmp_path: Path) -> ModelRef:
    """A folder with a default template, one for tools, and one of another name."""
    (tmp_path / "tokenizer.json").write_text(small_json())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "settings"}))
    (tmp_path / "chat_template.jinja").write_text("jinja {{ messages[0]['content'] }}")
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools {{ tools|length }}")
    (more / "rag.jinja").write_text("rag {{ messages[0]['content'] }}")
    return ModelRef("folder", tmp_path, "m")


def rendered(model: ModelRef, options: TextOptions, **more: object) -> str:
    template = load_text(model, options).template
    assert template is not None
    return template.render(SAID, now=NOW, **more)  # type: ignore[arg-type]


def test_a_models_own_templates(model: ModelRef) -> None:
    assert rendered(model, TextOptions()) == "jinja hi"
    assert rendered(model, TextOptions(), tools=[{}, {}]) == "tools 2"


def test_another_template_is_used_with_tools_too(model: ModelRef, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ messages[0]['content'] }}", encoding="utf-8-sig")
    for given, text in ((str(file), "mine hi"), ("rag", "rag hi"), ("{{ messages|length }}", "1")):
        options = TextOptions(chat_template=given)
        assert rendered(model, options) == rendered(model, options, tools=[{}]) == text
    with pytest.raises(
        ConfigError, match=r"cannot read the chat template; expected a Jinja file.*\(rag, tool_use\)"
    ):
        load_text(model, TextOptions(chat_template="none"))
    with pytest.raises(ConfigError, match="does not compile, line 1"):
        load_text(model, TextOptions(chat_template="{% if %}"))


def test_named_templates_of_a_gguf_file(tmp_path: Path) -> None:
    templates = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.rag": "rag",
        "tokenizer.chat_templates": ["tool_use", "rag"],
    }
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(small_metadata() | templates))
    model = ModelRef("gguf", path, "m")
    assert (rendered(model, TextOptions()), rendered(model, TextOptions(), tools=[{}])) == ("plain", "tools")
    assert rendered(model, TextOptions(chat_template="rag"), tools=[{}]) == "rag"


def test_variables_of_every_chat(model: ModelRef) -> None:
    options = TextOptions(chat_template=THINKS, chat_template_kwargs={"enable_thinking": True})
    assert rendered(model, options) == "yes hi"
    assert rendered(model, options, variables={"enable_thinking": False}) == "no hi"
    with pytest.raises(
        ConfigError, match="server sets itself; got messages; at default_chat_template_kwargs"
    ):
        load_text(model, TextOptions(chat_template_kwargs={"messages": []}))
    with pytest.raises(RequestError, match="the server sets itself"):
        rendered(model, options, variables={"tools": []})


def test_variables_as_they_are_given() -> None:
    assert read_variables("") == {}
    assert read_variables('{"a": 1}') == read_variables({"a": 1}) == {"a": 1}
    with pytest.raises(ConfigError, match=r"not valid JSON; .*at default_chat_template_kwargs"):
        read_variables("{")
    with pytest.raises(ConfigError, match=r"not variables of a template; expected a JSON object.*got list"):
        read_variables("[1]")


def test_a_tokenizer_from_elsewhere_brings_its_template(model: ModelRef, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf_bytes(small_metadata() | {"tokenizer.chat_template": "other"}))
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    side = load_text(model, TextOptions(tokenizer=other))
    assert side.template is not None and side.template.source == "other"
    assert side.generation == {"top_k": 5}  # which is not the tokenizer's
