"""Chat templates render as transformers renders them, and never harm the server.

The expected texts were compared with transformers 5 (apply_chat_template).
"""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError, RequestError
from pegainfer.frontend.chat_template import ChatTemplate

NOW = datetime.datetime(2024, 2, 29, 23, 59, 58)
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Well, "}
CHATML = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '</>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        messages or [USER], now=NOW, **options
    )


def test_messages_and_generation_prompt() -> None:
    assert render(CHATML) == "<user>Hi</>\n<assistant>"
    assert render(CHATML, add_generation_prompt=False) == "<user>Hi</>\n"


def test_blocks_are_trimmed() -> None:
    source = (
        "{{ bos_token }}\n    {% for m in messages %}\n  {{ m.content }}\n    {% endfor %}\n{{ eos_token }}\n"
    )
    assert render(source) == "<s>\n  Hi\n</s>"


def test_json_is_plain_json() -> None:
    tools = [{"name": "f", "text": "<é> & 'x'"}]
    assert render("{{ tools | tojson }}", tools=tools) == '[{"name": "f", "text": "<é> & \'x\'"}]'
    assert render("{{ tools | tojson(indent=2) }}", tools=[1]) == "[\n  1\n]"
    assert render("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}") == '{"a":2,"b":1}'
    assert render("{{ 'é' | tojson(ensure_ascii=true) }}") == '"\\u00e9"'


def test_absent_tools_and_documents_are_none() -> None:
    assert render("{{ tools is none }} {{ documents is none }} {{ nothing is defined }}") == "True True False"


def test_extra_variables() -> None:
    source = "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}"
    assert (render(source), render(source, variables={"enable_thinking": False})) == ("on", "off")


def test_loop_controls_and_generation_tag() -> None:
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHib"


def test_strftime_now_formats_the_time_of_the_render() -> None:
    assert render("{{ strftime_now('%d %b %Y, %H:%M:%S') }}") == "29 Feb 2024, 23:59:58"
    assert render("{{ strftime_now(format='%j') }}{{ '%02d' % (strftime_now('%m') | int) }}") == "06002"


def test_continue_the_final_message() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(CHATML, [USER, ASSISTANT], **options) == "<user>Hi</>\n<assistant>Well, "
    trimming = CHATML.replace("m.content", "m.content | trim")
    assert render(trimming, [USER, ASSISTANT], **options) == "<user>Hi</>\n<assistant>Well,"
    twice = {"role": "assistant", "content": "Hi"}
    assert render(CHATML, [USER, twice], **options) == "<user>Hi</>\n<assistant>Hi", "the last one counts"
    assert ASSISTANT["content"] == "Well, ", "the caller's messages stay"


def test_continue_a_message_of_parts() -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, [{"role": "assistant", "content": parts}], **options) == "[a][b"


@pytest.mark.parametrize(
    ("messages", "source", "match"),
    [
        ([USER], "constant", "does not show the last message"),
        ([{"role": "assistant", "content": None}], CHATML, "no text to continue"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], CHATML, "no text to continue"),
    ],
)
def test_what_cannot_be_continued(messages: list[dict[str, Any]], source: str, match: str) -> None:
    with pytest.raises(RequestError, match=match) as e:
        render(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert e.value.param == "continue_final_message"


def test_continuing_excludes_a_generation_prompt() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render(CHATML, continue_final_message=True)
    with pytest.raises(RequestError, match="no message to continue"):
        ChatTemplate(CHATML).render([], now=NOW, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ strftime_now.__self__.max }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ messages[0].missing.more }}",
        "{{ 1 // 0 }}",
        "{{ messages + 1 }}",
        "{% include 'file' %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
def test_a_template_cannot_reach_out_of_the_sandbox(source: str) -> None:
    """Each is refused at compile or render time, in one line."""
    with pytest.raises((RequestError, ConfigError)) as e:
        render(source)
    assert "\n" not in str(e.value) and "Traceback" not in str(e.value)


def test_a_templates_own_refusal_is_shown() -> None:
    source = "{{ raise_exception('Roles must\n alternate') }}"
    with pytest.raises(RequestError, match="cannot render these messages; got Roles must alternate") as e:
        render(source)
    assert e.value.param == "messages"


def test_too_long_a_text_is_refused() -> None:
    source = "{% for i in range(70) %}{{ 'x' * 1000000 }}{% endfor %}"
    with pytest.raises(RequestError, match="rendered chat is too long"):
        render(source)


@pytest.mark.parametrize("name", ["messages", "tools", "bos_token", "raise_exception", "strftime_now"])
def test_the_servers_own_variables_cannot_be_set(name: str) -> None:
    with pytest.raises(RequestError, match=f"the server sets itself; got {name}") as e:
        render(CHATML, variables={name: "x"})
    assert e.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x", "{% unknown %}", "{{ x | no_filter }}", "{% generation %}"]
)
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template does not compile"):
        ChatTemplate(source)


def test_a_template_of_absurd_length_or_depth() -> None:
    with pytest.raises(ConfigError, match="too long"):
        ChatTemplate("x" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
