"""A real Chromium. It may ask the server under test and nobody else, and no script of a page may fail.

Without the extra 'browser' these tests are not collected, without a Chromium they are skipped.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.page_server import PageServer, page_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Playwright

if importlib.util.find_spec("playwright") is None:
    collect_ignore_glob = ["test_*.py"]

DESKTOP = (1280, 860)
PHONE = (360, 740)
TIMEOUT = 20_000  # milliseconds; the machine may be busy with others
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

Opener = Callable[..., "Page"]


# Not of the session: while it lives, this thread has a running event loop, which other tests could not bear.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=TIMEOUT)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=_chromium(playwright))
        yield launched
        launched.close()


def _chromium(playwright: Playwright) -> str:
    own = playwright.chromium.executable_path
    if Path(own).exists():
        return own
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("needs Chromium: apt-get install chromium, or playwright install chromium")
    return found


@pytest.fixture
def server() -> Iterator[PageServer]:
    with page_server(reasoning_parser="think", tool_call_parser="hermes") as running:
        yield running


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opener]:
    """Opens pages: `opened(url, size=…, **options of the browser's context)`."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def open_page(url: str, *, size: tuple[int, int] = DESKTOP, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        contexts.append(context)
        origin = "/".join(url.split("/")[:3])

        def check(address: str) -> None:
            if not address.startswith((origin + "/", "blob:" + origin, "data:")):
                problems.append(f"asked for {address}")

        context.on("request", lambda request: check(request.url))
        context.on("weberror", lambda error: problems.append(f"failed: {error.error}"))
        page = context.new_page()
        page.set_default_timeout(TIMEOUT)
        page.on("console", lambda m: problems.append(f"said: {m.text}") if _alarming(m.text) else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not problems


def _alarming(text: str) -> bool:
    return any(
        word in text for word in ("Content Security Policy", "TrustedHTML", "TrustedScript", "Refused")
    )


@pytest.fixture
def chat(opened: Opener, server: PageServer) -> Page:
    """The chat page at desktop width, with its models listed."""
    page = opened(server.url)
    page.wait_for_selector("#model option", state="attached")
    return page
