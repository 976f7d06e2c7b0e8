"""The API's description says what the server does: routes, bounds, defaults, and the page that it becomes."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pegainfer.frontend.http.api_docs.fields import ABOUT, bounds
from pegainfer.frontend.http.api_docs.markdown import to_markdown
from pegainfer.frontend.http.api_docs.operations import OPERATIONS
from pegainfer.frontend.http.app import _ROUTES
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import ask
from tests.support.fake_engine import FakeEngine

API = Path(__file__).parents[4] / "docs" / "api.md"


def document(**config: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(FakeEngine(), "/openapi.json", **config).json()
    return found


def test_every_route_is_described_and_no_other() -> None:
    pages = {"/", "/dashboard", "/static/{name}"}  # for people
    served = {(method, path.replace(":path", "")) for method, path, _ in _ROUTES}
    described = {(op.method, op.path) for op in OPERATIONS}
    assert {(m, p) for m, p in served if p not in pages} == described
    assert {(m.upper(), p) for p, methods in document()["paths"].items() for m in methods} == described


def test_docs_api_md_is_this_document() -> None:
    assert API.read_text() == to_markdown(document()), "make docs-api writes it anew"


FIELDS = bounds(HttpConfig())
EDGES = [
    *((name, b["minimum"], b["minimum"] - 1) for name, b in FIELDS.items() if "minimum" in b),
    *((name, b["maximum"], b["maximum"] + 1) for name, b in FIELDS.items() if "maximum" in b),
    *((name, 0.5, b["exclusiveMinimum"]) for name, b in FIELDS.items() if "exclusiveMinimum" in b),
    ("request_id", "r" * 128, "r" * 129),
    ("request_id", "!~", "a b"),
]


@pytest.mark.parametrize(("name", "inside", "outside"), EDGES)
def test_bounds_are_the_servers(name: str, inside: object, outside: object) -> None:
    path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}
    if name == "max_output_tokens":
        path, body = "/v1/responses", {"input": "a"}  # type: ignore[dict-item]
    if name == "min_tokens" and inside:
        body["max_tokens"] = 2**31 - 1  # type: ignore[assignment]
    accepted = ask(FakeEngine(), path, {**body, name: inside})
    assert accepted.status_code == 200, accepted.text
    refused = ask(FakeEngine(), path, {**body, name: outside})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == name, refused.text


def test_defaults_are_those_in_force() -> None:
    def default(name: str, **config: Any) -> object:
        fields = document(**config)["components"]["schemas"]["CompletionRequest"]["properties"]
        return fields[name].get("default")

    assert (default("max_tokens"), default("temperature"), default("top_k")) == (128, 0.0, 50)
    openai = {"openai_defaults": True}
    assert (default("max_tokens", **openai), default("temperature", **openai)) == (16, 1.0)
    assert (
        document(max_n=7)["components"]["schemas"]["ChatRequest"]["properties"]["n"]["anyOf"][0]["maximum"]
        == 7
    )


def test_what_is_not_served_is_told_with_what_may_stand_there() -> None:
    fields = document()["components"]["schemas"]["ChatRequest"]["properties"]
    for value in fields["modalities"]["enum"]:
        body = {"messages": [{"role": "user", "content": "a"}], "modalities": value}
        assert ask(FakeEngine(), "/v1/chat/completions", body).status_code == 200
    assert fields["modalities"]["enum"] == [None, [], ["text"]]


def test_words_about_fields_are_about_fields() -> None:
    schemas = document()["components"]["schemas"]
    names = {n for op in OPERATIONS if op.request for n in schemas[op.request.__name__]["properties"]}
    assert set(ABOUT) <= names


def test_a_key_is_asked_for_where_one_is_set() -> None:
    opened = document()
    assert "security" not in opened and "401" not in opened["paths"]["/v1/models"]["get"]["responses"]
    from tests.support.asgi import client, make_app, run

    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=("k",)), authorization="Bearer k") as http:
            found = (await http.get("/openapi.json")).json()
            assert found["security"] and "401" in found["paths"]["/v1/models"]["get"]["responses"]
            assert found["paths"]["/health"]["get"]["security"] == []

    run(main)


def test_the_page_has_every_operation_and_whole_links() -> None:
    page = ask(FakeEngine(), "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "script" not in page.headers["content-security-policy"]
    ids: set[str] = set()
    links: set[str] = set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found = dict(attrs)
            ids.add(found.get("id") or "")
            if tag == "a":
                links.add(found.get("href") or "")

    Reader().feed(page.text)
    assert {f"{op.method.lower()} {op.path.lower()}" for op in OPERATIONS} <= ids
    assert {link.removeprefix("#") for link in links if link.startswith("#")} <= ids
    assert "<script" not in page.text
