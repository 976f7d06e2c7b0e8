"""What a command is told: the words that the user typed, then the environment, then a config file.

All three are brought into one command line before it is parsed, so that names, values and errors are the same
wherever an option was set. What was typed goes first; the environment goes before the file.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from typer.core import TyperCommand

from pegainfer.app import options
from pegainfer.app.unserved import SHORT, UNSERVED, check_unserved
from pegainfer.cli.flags import FROM_ENVIRONMENT
from pegainfer.contract.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
CONFIG = "config"
_ON, _OFF = ("true", "1", "on", "yes"), ("false", "0", "off", "no")
_SWITCH = {**dict.fromkeys(_ON, True), **dict.fromkeys(_OFF, False)}


class Flag(msgspec.Struct, frozen=True, kw_only=True):
    """One name of an option on the command line.

    option: the option's name, with underscores.
    on, off: the flag as it is written; a switch has both, or `on` alone.
    takes: whether a value follows.
    switches_on: whether this name is a form that switches on.
    """

    option: str
    on: str
    off: str = ""
    takes: bool = True
    switches_on: bool = True


class Word(msgspec.Struct):
    """One option with its values, or one argument.

    option: '' for an argument and for what is not known, which the parser refuses.
    more: arguments that follow a flag that may take several values.
    """

    tokens: list[str]
    option: str = ""
    more: list[str] = msgspec.field(default_factory=list)


class ModelCommand(TyperCommand):
    """A command whose options may come from the environment and from a config file as well."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if ctx.resilient_parsing:  # a shell asks how the line may go on
            return super().parse_args(ctx, args)
        flags, takes_model = _flags_of(self.params)
        words = list(read_words(args, flags))
        given = {word.option for word in words if word.option}
        arguments = any(not word.option for word in words)
        if takes_model and arguments:
            given.add("model")  # MODEL takes the place of what the environment or the file names
        environment = _from_environment(flags, given, os.environ)
        path = next((w.tokens[-1].removeprefix("--config=") for w in words if w.option == CONFIG), "")
        path = path or os.environ.get(options.variable_of(CONFIG), "")
        from_file = _from_file(path, flags, given | environment.keys(), ctx.command_path) if path else []
        typed = _spread(words, takes_model=takes_model and not arguments and "model" not in given)
        ctx.meta[FROM_ENVIRONMENT] = frozenset(options.flag_of(name) for name in environment)
        try:
            return super().parse_args(ctx, [*itertools.chain(*environment.values()), *from_file, *typed])
        except Exception as error:  # typer's usage errors, whose class moved between its versions
            _name_source(error, flags, environment)
            raise


def _flags_of(params: Sequence[Any]) -> tuple[dict[str, Flag], bool]:
    """By each of their names, the flags of a command; and whether it has an argument MODEL."""
    found: dict[str, Flag] = {}
    for param in params:
        if param.param_type_name != "option":
            continue
        takes = not (param.is_flag or param.count)
        option = options.name_of(param.name)
        off = param.secondary_opts[0] if param.secondary_opts else ""
        for on, names in ((True, param.opts), (False, param.secondary_opts)):
            flag = Flag(option=option, on=param.opts[0], off=off, takes=takes, switches_on=on)
            found.update(dict.fromkeys(names, flag))
    return found, any(p.name == "model" and p.param_type_name == "argument" for p in params)


def read_words(args: Sequence[str], flags: Mapping[str, Flag]) -> Iterator[Word]:
    """The command line in words; flags are written as they are declared here.

    Raises ConfigError for a flag of another engine that is not served here.
    """
    i = 0
    while i < len(args):
        arg, i = args[i], i + 1
        if arg == "--":
            yield Word(["--"], "--")
            yield from (Word([rest]) for rest in args[i:])
            return
        if not arg.startswith("-") or arg == "-":
            yield Word([arg])
            continue
        name, has_value, value = arg.partition("=")
        name = _declared(name, flags)
        flag = flags.get(name)
        if flag is None:
            i += _pass_unserved(name, value if has_value else None, args[i : i + 1], shown=arg)
            if name.removeprefix("--").removeprefix("no-").replace("-", "_") not in UNSERVED:
                short = flags.get(arg[:2])  # a letter with its value, as -t4
                yield Word([arg], short.option if short is not None else "?")
            continue
        word = Word([name + has_value + value], flag.option)
        if flag.takes and not has_value and i < len(args):
            word.tokens.append(args[i])
            i += 1
        while flag.option in options.SEVERAL and i < len(args) and not args[i].startswith("-"):
            word.more.append(args[i])
            i += 1
        yield word


def _declared(name: str, flags: Mapping[str, Flag]) -> str:
    """A flag as it is declared: other engines take underscores, and have short forms of several letters."""
    if name in flags:
        return name
    if name in SHORT:
        return options.flag_of(SHORT[name])
    return "--" + name[2:].replace("_", "-") if name.startswith("--") else name


def _pass_unserved(name: str, value: str | None, following: Sequence[str], *, shown: str) -> int:
    """How many of the following words belong to a flag that states what holds here anyway.

    Raises ConfigError for one that does not. 0 for a name that no engine has.
    """
    plain = name.removeprefix("--").replace("-", "_")
    if plain.startswith("no_") and plain not in UNSERVED:
        if plain[3:] in UNSERVED:
            check_unserved(plain[3:], "false", shown=shown)
        return 0
    if plain not in UNSERVED:
        return 0
    takes = UNSERVED[plain].takes and value is None and bool(following)
    check_unserved(plain, following[0] if takes else value, shown=shown.partition("=")[0])
    return int(takes)


def _spread(words: Sequence[Word], *, takes_model: bool) -> Iterator[str]:
    """The tokens, with several values of one flag as that flag several times.

    Args:
        takes_model: an argument MODEL may be given and is not yet: one word behind such a flag's value is it.

    Raises ConfigError where several words could be MODEL or values.
    """
    for word in words:
        yield from word.tokens
        if takes_model and len(word.more) > 1:
            flag = word.tokens[0].partition("=")[0]
            raise ConfigError(
                f"{flag} has several values, and one of them may be meant as MODEL",
                expected=f"MODEL before {flag}, or --model MODEL",
                got=f"{len(word.more) + 1} values",
            )
        if takes_model:
            yield from word.more
        else:
            flag = word.tokens[0].partition("=")[0]
            yield from (token for value in word.more for token in (flag, value))


def _from_environment(
    flags: Mapping[str, Flag], given: set[str], environ: Mapping[str, str]
) -> dict[str, list[str]]:
    """Option -> its tokens, for those that the environment sets and nobody typed. Raises ConfigError."""
    found: dict[str, list[str]] = {}
    for flag in flags.values():
        variable = options.variable_of(flag.option)
        text = environ.get(variable, "")
        if not text or flag.option in (CONFIG, *options.KEYS, *given, *found):
            continue
        if flag.option == "port" and text.startswith("tcp://"):
            continue  # Kubernetes sets this variable for a Service that is called pegainfer
        values = text.split() if flag.option in options.SEVERAL else [text]
        found[flag.option] = _tokens(flag, values if len(values) > 1 else text, variable)
    return found


def _from_file(path: str, flags: Mapping[str, Flag], given: set[str], command: str) -> list[str]:
    """The tokens of a config file's options that are not set elsewhere. Raises ConfigError."""
    tokens: list[str] = []
    seen: dict[str, str] = {}
    for key, value in read_config(path).items():
        name = str(key).replace("-", "_")
        where = f"{path}, {key}"
        flag = flags.get(options.flag_of(name))
        if flag is None and name in UNSERVED:
            check_unserved(name, value, shown=str(key))
            continue
        if flag is None or flag.option == CONFIG:
            raise ConfigError(
                f"{command} has no such option", got=f"{key!s:.80}", where=path,
                remedy=f"see {command} --help; in a file its flags stand without --",
            )  # fmt: skip
        if flag.option in seen:
            raise ConfigError("an option is set twice", got=f"{seen[flag.option]} and {key}", where=path)
        seen[flag.option] = str(key)
        if flag.option not in given:
            tokens += _tokens(flag, value, where)
    return tokens


def read_config(path: str) -> dict[Any, Any]:
    """The mapping in a YAML file. Raises ConfigError."""
    import yaml  # takes 20 ms, which a command line without a file does not pay

    where = f"--config {path}"
    try:
        with open(os.path.expanduser(path), "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(
                "the config file is too large", expected=f"≤ {MAX_CONFIG_BYTES} bytes", where=where
            )
        value = yaml.safe_load(data)
    except OSError as e:
        raise ConfigError(f"cannot read the config file: {e.strerror}", where=where) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(
            "the config file is not valid YAML", got=" ".join(f"{e!s:.200}".split()), where=where
        ) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            "the config file holds no options", expected="lines such as 'max-model-len: 4096'",
            got=type(value).__name__, where=where,
        )  # fmt: skip
    return value


def _tokens(flag: Flag, value: Any, where: str) -> list[str]:
    """A value of the environment or of a file, as it would be typed. Raises ConfigError."""
    if not flag.takes:
        state = value if isinstance(value, bool) else _SWITCH.get(str(value).strip().lower())
        if state is None:
            raise ConfigError("not a switch", expected="true or false", got=f"{value!s:.80}", where=where)
        form = flag.on if state == flag.switches_on else flag.off
        return [form] if form else []
    if isinstance(value, list):
        if not value or not all(isinstance(item, str | int | float) for item in value):
            raise ConfigError(
                "not a list of values", expected="texts or numbers", got=f"{value!s:.80}", where=where
            )
        return [token for item in value for token in (flag.on, _text(item))]
    if value is None:
        raise ConfigError("the option has no value", where=where, remedy="leave it out")
    return [flag.on, _text(value)]


def _text(value: Any) -> str:
    """As one would type it; a mapping is typed as JSON."""
    if isinstance(value, dict):
        import json

        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name_source(error: Exception, flags: Mapping[str, Flag], environment: Mapping[str, list[str]]) -> None:
    """Adds to a usage error which variable has set the option that is at fault."""
    param = getattr(error, "param", None)
    option = options.name_of(param.name) if param is not None else ""
    if option in environment and hasattr(error, "message"):
        error.message = f"{error.message} (set by {options.variable_of(option)})"
