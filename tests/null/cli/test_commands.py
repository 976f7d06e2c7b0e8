"""Which commands the command line has, and what making one of them imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from pegainfer.cli.commands import build_app
from pegainfer.cli.main import main
from pegainfer.contract.errors import EXIT_USER

LISTING = """
import sys
from pegainfer.cli.commands import build_app
build_app("serve")
print(*(name for name in sys.modules if name.startswith("pegainfer.cli.")))
"""


def commands(first: str) -> set[str]:
    group = typer.main.get_command(build_app(first))
    return set(group.commands)  # type: ignore[attr-defined]


def test_the_first_word_of_a_line_selects_its_command() -> None:
    everything = commands("")
    assert {"serve", "chat", "bench", "trace", "kernels", "ps"} <= everything
    assert commands("serve") == {"serve"}
    assert commands("bench") == {"bench"}
    assert commands("--version") == commands("serv") == everything


@pytest.mark.parametrize(
    ("line", "equivalent"),
    [
        (["run", "owner/model", "hello"], "pegainfer chat MODEL"),
        (["ls"], "pegainfer list"),
        (["complete", "--url", "x"], "pegainfer generate"),
        (["bench", "throughput"], "pegainfer bench engine"),
        (["stop", "model"], "/admin/models/unload"),
    ],
)
def test_commands_of_other_engines_are_answered_with_their_equivalent(
    line: list[str], equivalent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == EXIT_USER
    said = capsys.readouterr().err
    assert said.startswith(
        f"pegainfer: error: there is no command {line[-1] if 'bench' in line else line[0]};"
    )
    assert equivalent in said.partition("remedy: ")[2]


def test_a_server_imports_no_other_commands() -> None:
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, check=True)
    imported = {name.removeprefix("pegainfer.cli.") for name in done.stdout.split()}
    assert "serve" in imported
    assert not imported & {"bench_engine", "bench_serve", "run_batch", "chat", "simulate", "models"}
