"""Flags of a command, derived from the rooms' config dataclasses, so that a default stands in one place.

    @expand
    def serve(model: Model = None, *, http: HttpConfig, engine: EngineConfig, given: Given) -> int: ...

Each field of `http` and `engine` with a help text becomes a flag; a field that both have becomes one flag
that sets both. The command gets the dataclasses built, and in `given` the flags that the user typed. The
metadata of a field may hold `help`, `parse` (a key of options.PARSERS: how text becomes a value) and `empty`
(whether an empty text is a value: elsewhere it is what a shell makes of a variable that is not set, and
refused). What flags are called is in app/options.py.
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

from pegainfer.app import options
from pegainfer.contract.errors import ConfigError

NO_FLAG = frozenset({"backend"})  # --device chooses it
FROM_ENVIRONMENT = "pegainfer.environment"  # in a context's meta: options that the environment has set


class Given(frozenset[str]):
    """The flags that the user typed, as '--max-model-len'; each in the form that switches on."""

    off: frozenset[str] = frozenset()  # those that were typed in the other form
    environment: frozenset[str] = frozenset()  # those that were not typed, but set by the environment

    def refuse(self, config: type, why: str, *, but: tuple[str, ...] = ()) -> None:
        """Raises ConfigError if a flag of `config` was typed: it would do nothing here. `but`: these do.

        The environment is for every command and device, so that what it sets need not apply to this one.
        """
        for flag in map(flag_of, flag_fields(config)):
            if flag in self and flag not in but and flag not in self.environment:
                typed = off_form(flag) if flag in self.off else flag
                raise ConfigError(f"{typed} does not apply", where=why, remedy=f"leave {typed} out")


def flag_fields(config: type) -> list[dataclasses.Field[Any]]:
    """The fields that have a flag: those with a help text."""
    return [f for f in dataclasses.fields(config) if "help" in f.metadata and f.name not in NO_FLAG]


def flag_of(field: dataclasses.Field[Any]) -> str:
    """The field's flag, in the form that switches on: '--prefix-cache'."""
    return options.flag_of(options.name_of(field.name))


def off_form(flag: str) -> str:
    """'--no-prefix-cache' of '--prefix-cache'."""
    return f"--no-{flag.removeprefix('--')}"


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
    flags: dict[str, inspect.Parameter] = {}
    for config in configs.values():
        for flag in _parameters(config):
            flags.setdefault(flag.name, flag)

    @functools.wraps(command)
    def run(ctx: typer.Context, **values: Any) -> int | None:
        flag_values = {name: values.pop(name) for name in flags}
        given: set[str] = set()
        off: set[str] = set()
        built: dict[str, Any] = {}
        for name, config in configs.items():
            typed = {}
            for field in flag_fields(config):
                value = flag_values[field.name]
                if value is not None and value != []:
                    _refuse_empty(field, value)
                    typed[field.name] = tuple(value) if isinstance(value, list) else value
                    given.add(flag_of(field))
                    if value is False:
                        off.add(flag_of(field))
            built[name] = config(**typed)
        if wants_given is not None:
            built[wants_given] = typed_flags = Given(given)
            typed_flags.off = frozenset(off)
            typed_flags.environment = frozenset(ctx.meta.get(FROM_ENVIRONMENT, ()))
        return command(**values, **built)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters = [context, *sorted([*plain, *flags.values()], key=lambda p: p.kind)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__
    return run


def _refuse_empty(field: dataclasses.Field[Any], value: object) -> None:
    """Raises ConfigError for an empty text that would otherwise be taken for a flag left out."""
    empty = value == "" or (isinstance(value, list) and "" in value)
    if empty and field.default != "" and not field.metadata.get("empty", False):
        flag = flag_of(field)
        raise ConfigError(f"{flag} is empty", expected="a value", remedy=f"leave {flag} out")


def _parameters(config: type) -> list[inspect.Parameter]:
    """Each field as a keyword parameter that is None unless the user typed its flag."""
    hints = typing.get_type_hints(config)
    out = []
    for field in flag_fields(config):
        kind = _kind_of_flag(hints[field.name])
        names = _names(options.name_of(field.name), switch=kind is bool)
        parser = options.PARSERS[field.metadata["parse"]] if "parse" in field.metadata else None
        metavar = None  # typer's own, which would be Python's spelling of a list
        if typing.get_origin(kind) is list and parser is None:
            metavar = f"<{typing.get_args(kind)[0].__name__}>"
        elif parser is not None:  # else typer shows the name of the parsing function
            metavar = f"<{field.metadata['parse']}>"
        option = typer.Option(*names, help=help_of(field), show_default=False, parser=parser, metavar=metavar)
        hint: Any = Annotated[kind | None, option]
        out.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
        )
    return out


def _names(option: str, *, switch: bool) -> list[str]:
    """All names of an option; those of a switch in both forms, as '--prefix-cache/--no-prefix-cache'."""
    flags = [options.flag_of(name) for name in (option, *options.ALIASES.get(option, ()))]
    if not switch:
        return [*flags, *options.LETTERS.get(option, ())]
    opposites = [options.flag_of(name) for name in options.OPPOSITES.get(option, ())]
    return [*(f"{flag}/{off_form(flag)}" for flag in flags), *(f"{off_form(o)}/{o}" for o in opposites)]


def _kind_of_flag(hint: Any) -> Any:
    """The type that a flag takes: the field's without None, and a list where the field is a tuple."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]]  # type: ignore[misc]
    return hint


def help_of(field: dataclasses.Field[Any]) -> str:
    """The help text of a flag, with its default."""
    text: str = field.metadata.get("help", "")
    default = field.default
    if isinstance(default, tuple) and "may be repeated" not in text:
        text += " May be repeated."
    if default is None or default is dataclasses.MISSING or default == () or default == "":
        return text
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = ", ".join(map(str, default))
    elif field.metadata.get("parse") == "bytes":
        default = f"{default >> 20} MiB"
    return f"{text} [default: {default}]"
