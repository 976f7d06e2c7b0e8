"""The families' styles by name, and which one a model's chat template speaks."""

from __future__ import annotations

import importlib
import secrets
import string
from collections.abc import Iterator, Mapping

import msgspec

from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.reasoning.think import ThinkSyntax
from pegainfer.frontend.tools.call import new_call_id
from pegainfer.frontend.tools.enforce import FRAMES, Frame
from pegainfer.frontend.tools.prompt import knows_tools
from pegainfer.frontend.tools.syntax import Syntax

_FURTHER = ("[ARGS]", "[CALL_ID]", "<|python_end|>")  # that models write and no grammar of ours asks for
AUTO, NONE = "auto", "none"


class Style(msgspec.Struct, frozen=True):
    """How a family writes calls, and the grammar's frame for the same."""

    name: str
    syntax: Syntax
    short_ids: bool = False  # nine letters and digits, which is all that its template takes

    @property
    def frame(self) -> Frame:
        return FRAMES[self.name]

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts in which special tokens of this style stand."""
        syntax, frame = self.syntax, self.frame
        ends = () if syntax.end is None else (syntax.end,)
        around = (frame.begin, frame.end, frame.open, frame.close, frame.number)
        return (*syntax.starts, *ends, *syntax.skips, *around, *(frame.fields or ()), *_FURTHER)

    def new_id(self, name: str, index: int) -> str:
        """For the call number `index` of an answer, where the model gave none."""
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"functions.{name}:{index}" if self.name == "kimi_k2" else new_call_id()


# Style -> module and class of its syntax.
_SYNTAXES = {
    "hermes": ("json_syntax", "Hermes"),
    "qwen3_coder": ("field_syntax", "QwenCoder"),
    "llama3_json": ("json_syntax", "LlamaJson"),
    "pythonic": ("python_syntax", "Pythonic"),
    "deepseek_v3": ("json_syntax", "DeepSeek"),
    "deepseek_v31": ("json_syntax", "DeepSeek"),
    "deepseek_v32": ("field_syntax", "Dsml"),
    "deepseek_v4": ("field_syntax", "Dsml"),
    "kimi_k2": ("json_syntax", "Kimi"),
    "mistral": ("json_syntax", "Mistral"),
    "mistral_v11": ("json_syntax", "Mistral"),
}
_SHORT_IDS = ("mistral", "mistral_v11")


class _Styles(Mapping[str, Style]):
    """Makes a style when it is first looked up: a server has one, and syntaxes compile many expressions."""

    def __init__(self) -> None:
        self._made: dict[str, Style] = {}

    def __getitem__(self, name: str) -> Style:
        if name not in self._made:
            module, syntax = _SYNTAXES[name]
            found = getattr(importlib.import_module(f"pegainfer.frontend.tools.{module}"), syntax)
            self._made[name] = Style(name, found(), short_ids=name in _SHORT_IDS)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_SYNTAXES)

    def __len__(self) -> int:
        return len(_SYNTAXES)


STYLES: Mapping[str, Style] = _Styles()
# What a template that speaks a style must contain; the first line that fits holds.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("func_name1(params_name1",)),
    ("llama3_json", ("ipython",)),
    ("llama3_json", ('"parameters": dictionary',)),
)
_KIMI_CALLS = "<|tool_calls_section_begin|>"
REASONING: Mapping[str, ThinkSyntax] = {"think": ThinkSyntax(), "kimi_k2": ThinkSyntax(calls=_KIMI_CALLS)}
_STYLE_ALIASES = {"qwen3_xml": "qwen3_coder", "llama4_pythonic": "pythonic", "llama4_json": "llama3_json"}
_REASONING_ALIASES = ("qwen3", "deepseek_r1", "deepseek_v3")  # vLLM's names for the same


def check_style(wanted: str) -> None:
    """Raises ConfigError for an unknown name."""
    if wanted not in (AUTO, *_SYNTAXES, *_STYLE_ALIASES):
        raise ConfigError(
            "no such tool call parser",
            expected=", ".join((AUTO, *_SYNTAXES, *_STYLE_ALIASES)),
            got=wanted,
            where="--tool-call-parser",
        )


def choose_style(wanted: str, template: str | None) -> Style:
    """The style of this name, or by the template. Raises ConfigError for an unknown name."""
    check_style(wanted)
    if wanted != AUTO:
        return STYLES[_STYLE_ALIASES.get(wanted, wanted)]
    if template is None or not knows_tools(template):
        return STYLES["hermes"]  # in which the prompt tells of them
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return STYLES[name]
    return STYLES["hermes"]


def choose_reasoning(wanted: str, template: str | None) -> ThinkSyntax | None:
    """How the model's thoughts are marked, None if it has none. Raises ConfigError for an unknown name."""
    if wanted == NONE:
        return None
    if wanted == AUTO:
        if template is None or "</think>" not in template:
            return None
        return REASONING["kimi_k2" if _KIMI_CALLS in template else "think"]
    name = "think" if wanted in _REASONING_ALIASES else wanted
    if name not in REASONING:
        raise ConfigError(
            "no such reasoning parser",
            expected=", ".join((AUTO, NONE, *REASONING, *_REASONING_ALIASES)),
            got=wanted,
            where="--reasoning-parser",
        )
    return REASONING[name]
