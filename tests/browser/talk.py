"""What people do on the chat page."""

from __future__ import annotations

import contextlib

from playwright.sync_api import Locator, Page, TimeoutError, expect

FIELD = "#composer-text"


def ask(page: Page, text: str) -> None:
    page.fill(FIELD, text)
    page.press(FIELD, "Enter")


def answered(page: Page) -> None:
    """Waits until nothing is being answered."""
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".message.live")).to_have_count(0)


def ask_and_wait(page: Page, text: str) -> Locator:
    """Returns the answer's message."""
    ask(page, text)
    answered(page)
    return answers(page).last


def answers(page: Page) -> Locator:
    return page.locator("article.assistant")


# The browser skips what is far from the window, as a message is until the page has followed it: no innerText.
_SHOWN = """() => [...document.querySelectorAll("article.message")].map(message => {
  message.style.contentVisibility = "visible";
  const text = [...message.querySelectorAll(".markdown, .plain")].at(-1).innerText.trim();
  message.style.contentVisibility = "";
  return [message.classList[1], text];
})"""


def shown(page: Page) -> list[tuple[str, str]]:
    """Role and text of each message on the page."""
    return [(role, text) for role, text in page.evaluate(_SHOWN)]


def shows(page: Page, *messages: tuple[str, str]) -> None:
    """Waits until these are the messages on the page."""
    with contextlib.suppress(TimeoutError):
        page.wait_for_function(
            f"expected => JSON.stringify(({_SHOWN})()) === JSON.stringify(expected)", arg=messages
        )
    assert shown(page) == list(messages)


def ends(page: Page, role: str, text: str) -> None:
    """Waits until the last message on the page is this."""
    with contextlib.suppress(TimeoutError):
        page.wait_for_function(
            f"expected => JSON.stringify(({_SHOWN})().at(-1)) === JSON.stringify(expected)", arg=[role, text]
        )
    assert shown(page)[-1] == (role, text)
