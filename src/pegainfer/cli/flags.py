"""Flags of a command, derived from the rooms' config dataclasses, so that a default stands in one place.

    @expand
    def serve(model: Model = None, *, http: HttpConfig, engine: EngineConfig, given: Given) -> int: ...

Each field of `http` and `engine` with a help text becomes a flag; the command gets the dataclasses built, and
in `given` the flags that the user typed. A field's metadata may hold `help`, `flag` (its name, if not the
field's own) and `parse` (how text becomes a value: 'bytes').
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pegainfer.contract.errors import ConfigError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class Given(frozenset[str]):
    """The flags that the user typed, as '--max-model-len'."""

    def refuse(self, config: type, why: str, *, remedy: str | None = None) -> None:
        """Raises ConfigError if any flag of `config` was typed, because here it would do nothing."""
        for field in flag_fields(config):
            if flag_of(field) in self:
                raise ConfigError(f"{flag_of(field)} does not apply", where=why, remedy=remedy)


def flag_fields(config: type) -> list[dataclasses.Field[Any]]:
    """The fields that have a flag: those with a help text."""
    return [field for field in dataclasses.fields(config) if "help" in field.metadata]


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The field's first flag, without the negated form: '--prefix-cache'."""
    names: str = field.metadata.get("flag", "--" + field.name.replace("_", "-"))
    return names.split("/")[0]


def parse_bytes(text: str) -> int:
    """'512MiB', '2G' or '1048576' as bytes; units are powers of 1,024."""
    body = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = body[-1:] if body[-1:] in UNITS and body[-1:].isalpha() else ""
    try:
        value = float(body.removesuffix(unit))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(
            "not a size", expected="a number with an optional K, M, G or T, as 512MiB", got=text
        )
    return int(value * UNITS[unit])


def expand(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """The command as typer wants it: each dataclass parameter replaced by its fields' flags."""
    hints = typing.get_type_hints(command, include_extras=True)
    plain: list[inspect.Parameter] = []
    configs: dict[str, type] = {}
    wants_given: str | None = None
    for name, parameter in inspect.signature(command).parameters.items():
        hint = hints[name]
        if hint is Given:
            wants_given = name
        elif dataclasses.is_dataclass(hint) and isinstance(hint, type):
            configs[name] = hint
        else:
            plain.append(parameter.replace(annotation=hint))
    flags = [p for config in configs.values() for p in _parameters(config)]

    @functools.wraps(command)
    def run(**values: Any) -> int | None:
        given: set[str] = set()
        built: dict[str, Any] = {}
        for name, config in configs.items():
            typed = {}
            for field in flag_fields(config):
                value = values.pop(field.name)
                if value is not None and value != []:
                    typed[field.name] = tuple(value) if isinstance(value, list) else value
                    given.add(flag_of(field))
            built[name] = config(**typed)
        if wants_given is not None:
            built[wants_given] = Given(given)
        return command(**values, **built)

    parameters = sorted([*plain, *flags], key=lambda p: p.kind)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


def _parameters(config: type) -> list[inspect.Parameter]:
    """Each field as a keyword parameter that is None unless the user typed its flag."""
    hints = typing.get_type_hints(config)
    out = []
    for field in flag_fields(config):
        kind = _kind_of_flag(hints[field.name])
        names = field.metadata.get("flag", "--" + field.name.replace("_", "-"))
        if kind is bool and "/" not in names:
            names = f"{names}/--no-{names.removeprefix('--')}"
        parser = _PARSERS[field.metadata["parse"]] if "parse" in field.metadata else None
        option = typer.Option(names, help=_help(field), show_default=False, parser=parser)
        annotation = Annotated[kind | None, option]
        out.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        )
    return out


_PARSERS: dict[str, Callable[[str], Any]] = {"bytes": parse_bytes}


def _kind_of_flag(hint: Any) -> Any:
    """The type that a flag takes: the field's without None, and a list where the field is a tuple."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]
    return hint


def _help(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata.get("help", "")
    default = field.default
    if default is None or default is dataclasses.MISSING or default == () or default == "":
        return text
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif field.metadata.get("parse") == "bytes":
        default = f"{default >> 20} MiB"
    return f"{text} [default: {default}]"
