"""axe-core on every state of the page, light and dark, wide and narrow; and that nothing sticks out."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.browser.conftest import DESKTOP, PHONE, Opener
from tests.browser.talk import answers, ask_and_wait
from tests.support.page_server import PageServer

RICH = (
    "# Title\n\nSome **text** with `code`, a [link](https://x.example) and ~~no~~.\n\n"
    "```python\n# comment\ndef f(): return 'text', 1.5\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
    "> quote\n\n- [x] done\n- item\n\n" + "averyverylongword" * 30
)


def check(page: Page) -> None:
    """No serious fault, and nothing wider than the window."""
    found: Any = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    serious = [v for v in found if v["impact"] in ("serious", "critical", "moderate")]
    told = [(v["id"], [node["html"][:120] for node in v["nodes"]][:3]) for v in serious]
    assert not told
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_state_is_accessible(
    opened: Opener, server: PageServer, size: tuple[int, int], scheme: str
) -> None:
    page = opened(server.url, size=size, color_scheme=scheme, reduced_motion="reduce")
    expect(page.locator("#model option")).to_have_count(2)
    check(page)
    server.say(f"<think>Thoughts.</think>{RICH}", "Other.")
    ask_and_wait(page, "A question")
    answers(page).locator("details.thoughts summary").click()
    check(page)
    page.locator("[data-action=again]").click()
    expect(page.locator(".branch-place")).to_have_text("2/2")
    page.locator("article.user [data-action=edit]").click()
    check(page)
    page.keyboard.press("Escape")
    server.engine.refuse = ValueError("broken")
    ask_and_wait(page, "Fail")
    check(page)
    page.click("#settings-button")
    check(page)
    page.keyboard.press("Escape")
    if size == PHONE:
        page.click("#open-sidebar")
        expect(page.locator("#close-sidebar")).to_be_focused()
        check(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_dashboard_is_accessible(
    opened: Opener, server: PageServer, size: tuple[int, int], scheme: str
) -> None:
    page = opened(server.url + "/dashboard", size=size, color_scheme=scheme)
    expect(page.locator("#state")).to_have_text("demo-model on none, every 2 s")
    check(page)


def test_the_theme_is_the_systems_until_one_chooses(opened: Opener, server: PageServer) -> None:
    page = opened(server.url, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert (dark, light) == ("rgb(20, 23, 26)", "rgb(250, 249, 245)")
    page.get_by_role("button", name="Dark theme").click()
    assert page.evaluate(ground) == dark
    page.goto(server.url + "/dashboard")
    assert page.evaluate(ground) == dark
    page.get_by_role("button", name="Light theme").click()
    page.emulate_media(color_scheme="dark")
    page.reload()
    assert page.evaluate(ground) == light


def test_fingers_find_their_targets_on_a_phone(opened: Opener, server: PageServer) -> None:
    page = opened(server.url, size=PHONE, has_touch=True, is_mobile=True)
    ask_and_wait(page, "Hello")
    small = page.locator("button:visible, a:visible:not(.skip), select:visible").evaluate_all(
        """all => all.filter(e => {
          const box = e.getBoundingClientRect();
          return box.width < 32 || box.height < 32;
        }).map(e => e.getAttribute("aria-label") || e.textContent)"""
    )
    assert small == []
