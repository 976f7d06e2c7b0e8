"""What pages of the docs name: flags are those of `pegainfer serve`, fields those of the routes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pegainfer.cli.commands import build_app

DOCS = Path(__file__).parents[3] / "docs"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OTHERS = {  # of docker, systemctl, useradd, run-batch and benches
    "deploying.md": {"--build-arg", "--now", "--system"},
    "agent-routes.md": {"--concurrency"},
    "structured-output.md": {"--cost"},
}


def text_of(page: str) -> str:
    """The page; of a table that compares engines only the first column, which is ours."""
    text, _, compared = (DOCS / page).read_text().partition("## Coming from another engine")
    return text + "\n".join(line.split("|")[1] for line in compared.splitlines() if line.startswith("|"))


@pytest.mark.parametrize(
    "page", ["agent-routes.md", "agents.md", "deploying.md", "http.md", "security.md", "structured-output.md",
             "tools.md"],
)  # fmt: skip
def test_every_flag_that_a_page_names_exists(page: str) -> None:
    known = set(FLAG.findall(CliRunner().invoke(build_app(), ["serve", "--help"]).output))
    named = set(FLAG.findall(text_of(page)))
    assert named
    assert named - known - OTHERS.get(page, set()) == set()


def test_the_list_of_fields_is_that_of_the_routes() -> None:
    listed = (DOCS / "http.md").read_text().split("## Fields\n\n")[1].split("\n\n")[0]
    names = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", listed))))
    routes = dict(re.findall(r"^## POST (\S+)$(.*?)(?=^## )", (DOCS / "api.md").read_text(), re.M | re.S))
    rows = re.findall(
        r"^\| `([a-z_]+)` \| (?!not served)", routes["/v1/chat/completions"] + routes["/v1/completions"], re.M
    )
    assert len(rows) > 50
    assert names == set(rows)
