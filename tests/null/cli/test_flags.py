"""Flags derived from config dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from pegainfer.app.options import parse_bytes, parse_count
from pegainfer.cli.commands import build_app
from pegainfer.cli.flags import Given, expand
from pegainfer.contract.errors import ConfigError


@dataclass(frozen=True)
class Room:
    port: int = field(default=8000, metadata={"help": "port to listen on"})
    names: tuple[str, ...] = field(default=(), metadata={"help": "names"})
    prefix_cache: bool = field(default=True, metadata={"help": "reuse"})
    max_slots: int | None = field(default=None, metadata={"help": "sequences"})
    memory: int = field(default=1 << 20, metadata={"help": "memory", "parse": "bytes"})
    device: Literal["cpu", "null"] = field(default="cpu", metadata={"help": "device"})
    seed: int | None = field(default=None, metadata={"help": "seed"})
    inner: int = 7  # without help: no flag of its own

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ConfigError("no such port", got=self.port)


@dataclass(frozen=True)
class Lists:
    names: tuple[str, ...] = field(default=("a", "b"), metadata={"help": "Names."})
    sizes: tuple[int, ...] = field(default=(), metadata={"help": "Sizes; may be repeated."})


def run(*argv: str) -> tuple[str | None, Room, Given]:
    got: list[Any] = []

    def command(model: Annotated[str | None, typer.Argument()] = None, *, room: Room, given: Given) -> None:
        got.append((model, room, given))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(expand(command))
    app(list(argv), standalone_mode=False)
    (only,) = got
    return only


def test_defaults_are_those_of_the_dataclass() -> None:
    assert run() == (None, Room(), frozenset())


def test_each_kind_of_field_becomes_a_flag() -> None:
    flags = [
        "--port=9",
        "--names=a",
        "--names=b",
        "--no-prefix-cache",
        "--memory=2GiB",
        "--device=null",
        "--seed=0",
    ]
    model, room, given = run("m", *flags)
    assert model == "m"
    assert room == Room(port=9, names=("a", "b"), prefix_cache=False, memory=2 << 30, device="null", seed=0)
    assert given == {"--port", "--names", "--prefix-cache", "--memory", "--device", "--seed"}


def test_a_flag_typed_with_its_default_was_still_given() -> None:
    _, room, given = run("--port", "8000")
    assert room == Room()
    assert given == {"--port"}


def test_the_dataclass_refuses_bad_values() -> None:
    with pytest.raises(ConfigError, match="no such port"):
        run("--port=-1")


@pytest.mark.parametrize("argv", [["--inner", "3"], ["--device", "tpu"], ["--port", "x"], ["a", "b"]])
def test_unknown_flags_and_values_are_refused(argv: list[str]) -> None:
    with pytest.raises(Exception) as caught:
        run(*argv)
    assert hasattr(caught.value, "format_message")  # typer's usage errors, which main turns into one line


def test_fields_have_the_names_that_users_know() -> None:
    _, room, given = run("--max-num-seqs", "3")
    assert room.max_slots == 3
    assert given == {"--max-num-seqs"}


def test_a_field_of_two_rooms_is_one_flag_that_sets_both() -> None:
    @dataclass(frozen=True)
    class Other:
        seed: int | None = field(default=None, metadata={"help": "other seed"})
        other: int = field(default=1, metadata={"help": "other"})

    got: list[tuple[Room, Other]] = []

    def command(*, room: Room, other: Other) -> None:
        got.append((room, other))

    command.__annotations__ = {"room": Room, "other": Other}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(expand(command))
    app(["--seed", "5", "--other", "2"], standalone_mode=False)
    assert got == [(Room(seed=5), Other(seed=5, other=2))]


@dataclass(frozen=True)
class Texts:
    host: str = field(default="127.0.0.1", metadata={"help": "address"})
    key: str = field(default="", metadata={"help": "key"})
    system: str | None = field(default=None, metadata={"help": "message", "empty": True})
    stop: tuple[str, ...] = field(default=(), metadata={"help": "texts"})


def texts(*argv: str) -> Texts:
    got: list[Texts] = []

    def command(*, room: Texts) -> None:
        got.append(room)

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(expand(command))
    app(list(argv), standalone_mode=False)
    return got[0]


@pytest.mark.parametrize("argv", [["--host", ""], ["--stop", "a", "--stop", ""]])
def test_an_empty_text_is_refused(argv: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=f"{argv[0]} is empty; expected a value; remedy: leave {argv[0]} out"
    ):
        texts(*argv)


def test_an_empty_text_where_it_is_a_value() -> None:
    assert texts("--key", "", "--system", "") == Texts(system="")


def test_refuse_names_the_flag_that_does_not_apply() -> None:
    expected = r"--seed does not apply; at --device null; remedy: leave --seed out"
    with pytest.raises(ConfigError, match=expected):
        Given({"--seed"}).refuse(Room, "--device null")
    Given({"--other"}).refuse(Room, "--device null")
    Given({"--seed"}).refuse(Room, "--device null", but=("--seed",))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("2G", 2 << 30),
        ("1.5 kb", 1536),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "1PiB", "nan", "inf", "1e400", "1e300T", "MiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("2.5k", 2500),
        ("1m", 1_000_000),
        ("1M", 1 << 20),
        ("-1", -1),
    ],
)
def test_counts(text: str, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "k", "2.5", "2.5K", "4kk", "nank", "1e999k", "4 096"])
def test_bad_counts(text: str) -> None:
    with pytest.raises(ConfigError, match="not a whole number"):
        parse_count(text)


def test_help_names_lists_and_their_defaults_as_one_types_them() -> None:
    def command(*, lists: Lists) -> None:
        """Nothing."""

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(expand(command))
    help_text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "--names <str> Names. May be repeated. [default: a, b]" in help_text
    assert "--sizes <int> Sizes; may be repeated." in help_text


def test_help_names_what_a_parsed_flag_takes_and_not_its_parser() -> None:
    def command(*, room: Room) -> None:
        """Nothing."""

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(expand(command))
    help_text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "--memory <bytes> memory [default:" in help_text


@pytest.mark.parametrize("command", [[], ["serve"], ["bench"], ["bench", "engine"], ["kernels", "build"]])
def test_every_command_has_the_short_form_of_help(command: list[str]) -> None:
    run_command = CliRunner().invoke
    short, long = (run_command(build_app(), [*command, flag]) for flag in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage:" in short.output


def test_refuse_names_a_flag_as_it_was_typed() -> None:
    *_, given = run("--no-prefix-cache")
    with pytest.raises(ConfigError, match=r"--no-prefix-cache does not apply.*leave --no-prefix-cache out"):
        given.refuse(Room, "--device null")
    *_, given = run("--prefix-cache")
    with pytest.raises(ConfigError, match=r"^--prefix-cache does not apply"):
        given.refuse(Room, "--device null")
