from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import httpx
import pytest

from pegainfer.contract.errors import ConfigError
from pegainfer.frontend.http.config import HttpConfig
from pegainfer.frontend.http.page import CONTENT_SECURITY_POLICY, STATIC, page_paths
from tests.support.asgi import ask, client, make_app, run
from tests.support.fake_engine import FakeEngine

VENDOR = STATIC / "vendor"
PATHS = sorted(path.decode() for path in page_paths())
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
KEY = {"authorization": "Bearer secret"}


def get(
    path: str, *, headers: dict[str, str] | None = None, method: str = "GET", **config: bool
) -> httpx.Response:
    out: list[httpx.Response] = []

    async def main() -> None:
        async with client(make_app(FakeEngine(), **config)) as http:
            out.append(await http.request(method, path, headers=headers or {}))

    run(main)
    return out[0]


@pytest.mark.parametrize("path", PATHS)
def test_every_file_is_served_under_the_strict_policy(path: str) -> None:
    response = get(path)
    assert response.status_code == 200
    kind = next((TYPES[end] for end in TYPES if path.endswith(end)), "text/html")
    assert response.headers["content-type"].split(";")[0] == kind
    assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.content


def test_the_policy_lets_nothing_in_from_elsewhere_and_no_inline_script() -> None:
    rules = dict(rule.split(" ", 1) for rule in CONTENT_SECURITY_POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert {rules[name] for name in ("frame-ancestors", "base-uri", "form-action")} == {"'none'"}
    assert not re.search(r"unsafe|https?:|\*|blob:", CONTENT_SECURITY_POLICY)


@pytest.mark.parametrize(
    "file",
    sorted(file for file in STATIC.rglob("*") if file.is_file() and file.parent != VENDOR),
    ids=lambda file: file.name,
)
def test_no_file_names_another_host_or_parses_markup(file: Path) -> None:
    text = file.read_text()
    assert set(re.findall(r"(?:src|href)=\"(?!/)(?!#)[^\"]*", text)) == set()
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}  # the namespace of SVG
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|Function\(", text)
    assert not re.search(r"<[^>]*\s(?:on\w+|style)=", text)


def test_the_libraries_are_those_that_are_listed() -> None:
    listed = json.loads((VENDOR / "libraries.json").read_text())
    present = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in VENDOR.glob("*.js")}
    assert present == {name: library["sha256"] for name, library in listed.items()}
    for name in listed:
        assert (VENDOR / f"{name.split('.')[0]}.LICENSE").stat().st_size > 500


def test_a_known_version_is_not_sent_again() -> None:
    etag = get("/").headers["etag"]
    same = get("/", headers={"if-none-match": f'"other", {etag}'})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
    assert same.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert get("/", headers={"if-none-match": '"other"'}).status_code == 200
    assert get("/static/theme.js").headers["etag"] != etag


def test_it_is_compressed_for_those_who_ask() -> None:
    plain = get("/", headers={"accept-encoding": "identity"})
    packed = get("/", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < int(plain.headers["content-length"])
    assert packed.content == plain.content == (STATIC / "index.html").read_bytes()


@pytest.mark.parametrize(
    "path",
    [
        "/static/",
        "/static/none.js",
        "/static/../page.py",
        "/static/%2e%2e/page.py",
        "/static//theme.js",
        "/index.html",
    ],
)
def test_nothing_but_its_files_is_found(path: str) -> None:
    assert ask(FakeEngine(), path).status_code == 404


@pytest.mark.parametrize("path", ["/", "/dashboard", "/static/theme.js"])
def test_no_page_serves_none(path: str) -> None:
    response = get(path, page=False)
    assert response.status_code == 404
    assert "--no-page" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/", "/dashboard", "/static/theme.js"])
def test_only_reading_is_allowed(path: str) -> None:
    assert get(path, method="POST").status_code == 405
    assert get(path, method="HEAD").status_code == 200


def test_with_keys_the_page_is_closed_unless_a_flag_opens_its_files_and_nothing_else() -> None:
    async def main() -> None:
        async with client(make_app(FakeEngine(), api_key=("secret",))) as http:
            assert {(await http.get(path)).status_code for path in PATHS} == {401}
            assert {(await http.get(path, headers=KEY)).status_code for path in PATHS} == {200}
        async with client(make_app(FakeEngine(), api_key=("secret",), open_page=True)) as http:
            assert {(await http.get(path)).status_code for path in PATHS} == {200}
            for path in ("/v1/models", "/metrics", "/static/none.js", "/static/", "/dashboard/"):
                assert (await http.get(path)).status_code == 401

    run(main)


def test_a_page_that_is_off_cannot_be_opened() -> None:
    with pytest.raises(ConfigError, match="--open-page"):
        HttpConfig(page=False, open_page=True)


def test_the_wheel_carries_its_files() -> None:
    build = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["tool"]["scikit-build"]
    assert build["wheel"]["packages"] == ["src/pegainfer"]  # with all that git keeps in it
    assert not any("static" in pattern for pattern in build["sdist"]["exclude"])
