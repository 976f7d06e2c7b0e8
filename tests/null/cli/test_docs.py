"""What pages of the docs name: flags are those of the commands, fields those of the routes, links lead on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pegainfer.cli.commands import build_app

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
COMMANDS = (
    "",
    "serve", "generate", "chat", "run-batch", "pull", "list", "show", "rm", "ps", "doctor",
    "bench engine", "bench ops", "bench perplexity", "bench serve",
    "bench startup", "kernels build", "simulate",
)  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OTHERS = {  # of docker, systemctl, useradd, run-batch, benches and the soak test
    "deploying.md": {"--build-arg", "--now", "--system"},
    "agent-routes.md": {"--concurrency"},
    "structured-output.md": {"--cost"},
    "serving.md": {"--cpu-clock"},
    "accuracy.md": {"--first", "--seeds"},
    "CONTRIBUTING.md": {"--strict"},
}


def text_of(page: str) -> str:
    """The page; of a table that compares engines only the first column, which is ours."""
    text, _, compared = (DOCS / page).read_text().partition("## Coming from another engine")
    return text + "\n".join(line.split("|")[1] for line in compared.splitlines() if line.startswith("|"))


def flags_of(command: str) -> set[str]:
    return set(FLAG.findall(CliRunner().invoke(build_app(), [*command.split(), "--help"]).output))


@pytest.mark.parametrize(
    "page", ["agent-routes.md", "agents.md", "deploying.md", "http.md", "security.md", "structured-output.md",
             "tools.md"],
)  # fmt: skip
def test_every_flag_of_the_server_that_a_page_names_exists(page: str) -> None:
    named = set(FLAG.findall(text_of(page)))
    assert named
    assert named - flags_of("serve") - OTHERS.get(page, set()) == set()


def test_every_flag_that_other_pages_name_exists() -> None:
    known = set().union(*map(flags_of, COMMANDS))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("adding-*.md"))]
    pages += [
        DOCS / name
        for name in ("accuracy.md", "architecture.md", "page.md", "performance-model.md", "serving.md")
    ]
    for page in pages:
        assert set(FLAG.findall(page.read_text())) - known - OTHERS.get(page.name, set()) == set(), page.name


def anchors(page: Path) -> set[str]:
    """Those that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.md")]
    links = [(page, t) for page in pages for t in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    here = [(page, *target.partition("#")[::2]) for page, target in links if "://" not in target]
    assert len(here) > 100 and sum(bool(anchor) for *_, anchor in here) > 10
    for page, path, anchor in here:
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {path}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {path}#{anchor}"


def test_the_list_of_fields_is_that_of_the_routes() -> None:
    listed = (DOCS / "http.md").read_text().split("## Fields\n\n")[1].split("\n\n")[0]
    names = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", listed))))
    routes = dict(re.findall(r"^## POST (\S+)$(.*?)(?=^## )", (DOCS / "api.md").read_text(), re.M | re.S))
    rows = re.findall(
        r"^\| `([a-z_]+)` \| (?!not served|anything \| accepted)",
        routes["/v1/chat/completions"] + routes["/v1/completions"],
        re.M,
    )
    assert len(rows) > 50
    assert names == set(rows)
