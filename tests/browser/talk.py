"""What people do on the chat page."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

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


def shown(page: Page) -> list[tuple[str, str]]:
    """Role and text of each message on the page."""
    out = []
    for message in page.locator("article.message").all():
        kind = next(k for k in ("user", "assistant", "tool") if k in (message.get_attribute("class") or ""))
        out.append((kind, message.locator(".markdown, .plain").last.inner_text().strip()))
    return out
