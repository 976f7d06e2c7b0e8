"""The options of `LLM(...)` and `AsyncLLM(...)`, under the names of app/options.py."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pegainfer.app import options as table
from pegainfer.app.config import EngineConfig
from pegainfer.app.resolve import ModelRef, find_tokenizer, resolve
from pegainfer.app.text import TextSide, load_text
from pegainfer.app.text_options import TextOptions, read_variables
from pegainfer.app.unserved import UNSERVED, check_unserved
from pegainfer.contract.errors import ConfigError
from pegainfer.engine.config import SchedulerConfig
from pegainfer.frontend.http.request.generation_config import overrides

log = logging.getLogger(__name__)

# Nobody waits for the next token of an offline answer: a step takes as much of the prompts as it can.
OFFLINE = {"target_itl_ms": 0.0}
_PLACE = ("revision", "download_dir", "offline")
_TEXT = (
    "tokenizer", "chat_template", "default_chat_template_kwargs", "generation_config",
    "override_generation_config",
)  # fmt: skip
# Switches of vLLM for what these classes always have: `get_metrics` and `sleep`.
_ALWAYS_HERE = ("disable_log_stats", "enable_sleep_mode")
_TEXT_ALIASES = {alias: name for name in _TEXT for alias in table.ALIASES.get(name, ())}


@dataclass(frozen=True)
class LLMOptions:
    """A model that was found, with everything that its engine and its text side are made from."""

    model: ModelRef
    engine: EngineConfig
    scheduler: SchedulerConfig
    text_options: TextOptions
    own_sampling: bool  # whether the model's own sampling defaults are obeyed
    override_sampling: Mapping[str, Any]  # in the form of generation_config.json

    def text(self) -> TextSide:
        """The text side, whose `generation` is what holds where a prompt has no sampling parameters.

        Raises ModelFileError, UnsupportedError, ConfigError.
        """
        side = load_text(self.model, self.text_options)
        own = side.generation if self.own_sampling else {}
        return msgspec.structs.replace(side, generation={**own, **self.override_sampling})


def read_options(
    model: str | os.PathLike[str], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> LLMOptions:
    """Finds the model and sorts the options.

    Args:
        model: as LLM takes it.
        options: those of the place (revision, download_dir, offline), those of the text side (tokenizer,
            chat_template, default_chat_template_kwargs, generation_config, override_generation_config), and
            what `split` takes.
        defaults: of SchedulerConfig's fields, where they differ from its own.

    Raises ConfigError for an unknown option or model.
    """
    if not isinstance(model, str | os.PathLike):
        raise ConfigError("bad model", expected="a name or a path", got=f"{model!r:.80}")
    given = {_TEXT_ALIASES.get(name, name): value for name, value in options.items()}
    place = {name: given[name] for name in _PLACE if name in given}
    text = {name: given[name] for name in _TEXT if given.get(name) is not None}
    engine, scheduler = split({k: v for k, v in given.items() if k not in (*_PLACE, *_TEXT)}, defaults)
    config = text.get("generation_config", "auto")
    if config not in ("auto", "none", "vllm"):  # vllm: that engine's own defaults, which are these
        raise ConfigError("bad generation_config", expected="auto or none", got=f"{config!r:.80}")
    override = overrides(text.get("override_generation_config", ""))
    variables = read_variables(text.get("default_chat_template_kwargs", ""))
    template = text.get("chat_template")
    weights, tokenizer = engine.load_format != "dummy", text.get("tokenizer")
    found = resolve(os.fspath(model), weights=weights, text=tokenizer is None, **place)
    place.pop("revision", None)  # of the model, not of the other tokenizer's repository
    side = TextOptions(
        tokenizer=None if tokenizer is None else find_tokenizer(os.fspath(tokenizer), **place),
        chat_template=None if template is None else os.fspath(template),
        chat_template_kwargs=variables,
    )
    return LLMOptions(found, engine, scheduler, side, config == "auto", override)


def split(
    options: Mapping[str, Any], defaults: Mapping[str, Any] = OFFLINE
) -> tuple[EngineConfig, SchedulerConfig]:
    """The two configs that hold the options.

    Raises ConfigError for an option that neither of them has, or that does not apply to the device.
    """
    fields = {
        table.name_of(f.name): (config, f)
        for config in (EngineConfig, SchedulerConfig)
        for f in dataclasses.fields(config)
    }
    others = {alias: name for name, aliases in table.ALIASES.items() for alias in aliases}
    opposites = {alias: name for name, aliases in table.OPPOSITES.items() for alias in aliases}
    parts: dict[type, dict[str, Any]] = {EngineConfig: {}, SchedulerConfig: dict(defaults)}
    set_by: dict[str, str] = {}
    for given, value in options.items():
        name = opposites.get(given, others.get(given, given))
        if name not in fields:
            _refuse(given, value, fields)
            continue
        if name in set_by:
            raise ConfigError("an option is set twice", got=f"{set_by[name]} and {given}")
        set_by[name] = given
        config, field = fields[name]
        parts[config][field.name] = _value(field, not value if given in opposites else value)
    backend = parts[EngineConfig].get("backend")
    if backend == "auto":
        parts[EngineConfig]["backend"] = _pick(parts[EngineConfig])
    engine = EngineConfig(**parts[EngineConfig])
    engine.check_backend()
    return engine, SchedulerConfig(**parts[SchedulerConfig])


def _refuse(given: str, value: Any, known: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that is not served.

    It is accepted if its value asks for what is always done here, or for nothing (None, {}).
    """
    if given in UNSERVED:
        if given in _ALWAYS_HERE or value is None or value in ("", {}, [], ()):
            return
        check_unserved(given, value, shown=given)
        return
    renamed = table.name_of(given)
    raise ConfigError(
        "unknown option, or one that does not apply here",
        expected=renamed if renamed in known else " ".join(sorted(known)),
        got=given,
    )


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """A text is read as the command line reads it: '4k', '2GiB', 'bfloat16'."""
    parse = field.metadata.get("parse")
    return table.PARSERS[parse](value) if parse is not None and isinstance(value, str) else value


def _pick(engine: Mapping[str, Any]) -> str:
    """cuda where it can run, else cpu; logs why not."""
    from pegainfer.app.gpu import why_not

    reason = why_not(EngineConfig(**{**engine, "backend": "cuda"}))
    if reason is None:
        return "cuda"
    log.warning("running on the CPU: %s", reason)
    return "cpu"
