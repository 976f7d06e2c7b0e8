"""What a page in somebody's browser may do with a server that asks for no key."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.http.config import HttpConfig
from tests.support.asgi import client, make_app, run
from tests.support.fake_engine import FakeEngine

PATH = "/v1/completions"
BODY = b'{"prompt": "a", "max_tokens": 1}'
JSON = {"content-type": "application/json"}
OWN = {"host": "localhost:8000", "origin": "http://localhost:8000"}


def send(
    headers: dict[str, str], *, method: str = "POST", path: str = PATH, **config: Any
) -> tuple[int, dict[str, str], str]:
    """Status, headers and the error's code."""
    engine = FakeEngine()
    out: list[tuple[int, dict[str, str], str]] = []

    async def main() -> None:
        async with client(make_app(engine, **config)) as http:
            answer = await http.request(
                method, path, headers=headers, content=BODY if method == "POST" else b""
            )
            code = answer.json()["error"].get("code") if answer.status_code >= 400 else ""
            out.append((answer.status_code, dict(answer.headers), code))

    run(main)
    if out[0][0] != 200:
        assert not engine.requests
    return out[0]


@pytest.mark.parametrize(
    "headers",
    [
        {},  # no browser at all
        OWN,
        {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"},
        {"host": "[::1]:8000", "origin": "http://[::1]:8000"},
        {"host": "localhost", "origin": "http://localhost"},
        {"host": "localhost:80", "origin": "http://LOCALHOST"},
        {"host": "localhost:443", "origin": "https://localhost"},
        {"origin": "http://localhost:5173"},  # a page that the user's own machine serves
        {"origin": "http://127.0.0.1:3000", "sec-fetch-site": "cross-site"},
        {"origin": "vscode-webview://0a1b"},  # what is installed is no page of the web
        {"origin": "app://obsidian.md", "sec-fetch-site": "cross-site"},
        {"origin": "chrome-extension://abc"},
        {"sec-fetch-site": "same-origin"},
        {"origin": "https://models.example.org", "sec-fetch-site": "same-origin"},  # a proxy renamed the host
        {"sec-fetch-site": "none"},
    ],
)
def test_the_servers_own_page_and_what_is_no_page_is_served(headers: dict[str, str]) -> None:
    assert send(JSON | headers)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "https://evil.example", "sec-fetch-site": "cross-site"},
        {"origin": "null"},  # a sandboxed frame, or a file
        {"origin": "http://localhost.evil.example"},
        {"origin": "http://127.0.0.1.evil.example"},
        {"origin": "http://evil.example:8000", "host": "localhost:8000"},
        {"origin": "http://user@localhost@evil.example"},
        {"origin": "http://[::1"},
        {"origin": "http:evil"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "https://a.example"},
    ],
)
@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
def test_pages_of_others_are_refused(headers: dict[str, str], kind: str | None) -> None:
    given = headers if kind is None else {**headers, "content-type": kind}
    status, answered, code = send(given)
    assert (status, code) == (403, "foreign_origin")
    assert "access-control-allow-origin" not in answered


def test_pages_of_others_may_look_at_nothing_but_break_nothing_by_looking() -> None:
    status, answered, _ = send({"origin": "https://evil.example"}, method="GET", path="/v1/models")
    # The browser keeps the answer from the page.
    assert status == 200 and "access-control-allow-origin" not in answered


@pytest.mark.parametrize(
    "path", ["/v1/responses/a/cancel", "/v1/abort", "/tokenize", "/v1/messages", "/no/such"]
)
def test_every_route_is_closed_to_them(path: str) -> None:
    assert send(JSON | {"origin": "https://evil.example"}, path=path)[0] == 403


def test_a_key_is_enough_and_no_page_of_others_has_one() -> None:
    foreign = JSON | {"origin": "https://evil.example", "host": "evil.example"}
    assert send(foreign | {"authorization": "Bearer k"}, api_key=("k",))[0] == 200
    assert send(foreign, api_key=("k",))[0] == 401
    # An admin key closes the admin's routes alone.
    assert send(foreign, admin_key=("k",))[0] == 403


# ---------------------------------------------------------------------- names that lead here


@pytest.mark.parametrize(
    ("host", "config", "status"),
    [
        ("localhost:8000", {}, 200),
        ("LOCALHOST.", {}, 200),
        ("me.localhost", {}, 200),
        ("host.docker.internal:8000", {}, 200),
        ("127.0.0.1", {}, 200),
        ("192.168.0.7:8000", {}, 200),
        ("[::1]:8000", {}, 200),
        ("evil.example", {}, 403),  # made to lead to 127.0.0.1
        ("evil.example:8000", {}, 403),
        ("localhost.evil.example", {}, 403),
        ("localhost@evil.example", {}, 403),
        ("[::1", {}, 403),
        ("", {}, 403),
        ("models.example.org", {"allowed_host": ("Models.example.org",)}, 200),
        ("evil.example", {"allowed_host": ("models.example.org",)}, 403),
        ("evil.example", {"allowed_host": ("*",)}, 200),
        ("gpubox:8000", {"host": "0.0.0.0"}, 200),  # the network's names are not known here
        ("evil.example", {"host": "0.0.0.0", "allowed_host": ("gpubox",)}, 403),
        ("evil.example", {"host": "::1"}, 403),
        ("evil.example", {"host": "localhost"}, 403),
        ("evil.example", {"api_key": ("k",)}, 200),
    ],
)
def test_the_name_by_which_a_browser_came(host: str, config: dict[str, Any], status: int) -> None:
    headers = {"host": host, "origin": f"http://{host}", "authorization": "Bearer k"}
    got, _, code = send(JSON | headers, **config)
    assert got == status
    assert code == ("foreign_host" if status == 403 else "")
    # Reading is closed as well: such a page would be let to read it.
    assert send(headers, method="GET", path="/v1/models", **config)[0] == status
    assert send(headers, method="GET", path="/health", **config)[0] == 200


# ---------------------------------------------------------------------- pages that are allowed


@pytest.mark.parametrize("config", [{}, {"api_key": ("k",)}])
def test_an_allowed_page_is_served_and_may_read(config: dict[str, Any]) -> None:
    page = {"origin": "https://chat.example.org", "sec-fetch-site": "cross-site"}
    config = {**config, "allowed_origin": ("https://Chat.example.org",)}
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    status, answered, _ = send(page | asks, method="OPTIONS", **config)  # which shows no key
    assert status == 204
    assert answered["access-control-allow-origin"] == page["origin"]
    assert answered["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in answered["access-control-allow-methods"]
    status, answered, _ = send(JSON | page | {"authorization": "Bearer k"}, **config)
    assert (status, answered["access-control-allow-origin"]) == (200, page["origin"])
    assert answered["vary"] == "origin"
    # Refusals may be read, too: a page wants to tell its user why.
    status, answered, _ = send(page | {"content-type": "text/plain", "authorization": "Bearer k"}, **config)
    assert (status, answered["access-control-allow-origin"]) == (415, page["origin"])
    other = {**page, "origin": "https://other.example.org"}
    assert send(other | asks, method="OPTIONS", **config)[0] in (401, 405)
    assert send(JSON | other, **config)[0] in (401, 403)


def test_all_pages_may_be_allowed() -> None:
    status, answered, _ = send(JSON | {"origin": "null"}, allowed_origin=("*",))
    assert (status, answered["access-control-allow-origin"]) == (200, "null")
    status, answered, _ = send(JSON | {"origin": "App://Own"}, allowed_origin=("app://own",))
    assert (status, answered["access-control-allow-origin"]) == (200, "App://Own")  # as the browser wrote it


@pytest.mark.parametrize(
    "bad",
    [
        {"allowed_origin": ("chat.example.org",)},
        {"allowed_origin": ("https://chat.example.org/",)},
        {"allowed_origin": ("https://chat.example.org/path",)},
        {"allowed_host": ("https://chat.example.org",)},
        {"allowed_host": ("a b",)},
    ],
)
def test_what_is_no_origin_and_no_host_is_a_fault(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--allowed-"):
        HttpConfig(**bad)
