"""The whole page by keyboard alone."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import DESKTOP, PHONE, Opener
from tests.browser.talk import FIELD, answered, answers, ask_and_wait, ends, shows
from tests.support.page_server import PageServer

FOCUS = """() => {
  const at = document.activeElement;
  return at === document.body ? null : at.getAttribute("aria-label") || at.textContent.trim() || at.id;
}"""
OUTLINE = """() => {
  const style = getComputedStyle(document.activeElement);
  const frame = document.activeElement.closest(".composer");
  return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2
    || (frame !== null && getComputedStyle(frame).boxShadow !== "none");
}"""


def walk(page: Page, *, most: int = 60) -> list[str]:
    """The names of what Tab leads to, from the page's first element until it comes round."""
    page.locator(".skip").focus()
    names: list[str] = [page.evaluate(FOCUS)]
    for _ in range(most):
        page.keyboard.press("Tab")
        name = page.evaluate(FOCUS)
        if name in (None, names[0]):
            break
        assert page.evaluate(OUTLINE), f"no visible focus on {name}"
        names.append(name)
    return names


def test_tab_leads_through_everything_in_reading_order(chat: Page, server: PageServer) -> None:
    server.say("An answer.\n\n```py\nx\n```")
    ask_and_wait(chat, "Question")
    names = walk(chat)
    order = [
        "Skip to the message field",
        "New conversation",
        "search",
        "Question",
        "Rename Question",
        "Delete Question",
        "Import",
        "Export all",
        "Dashboard",
        "Dark theme",
        "Export this conversation",
        "Settings",
        "Conversation",
        "Copy",
        "Edit",
        "Copy the code",
        "Code, py",
        "Copy",
        "Edit",
        "Answer again",
        "composer-text",
        "Attach text files",
    ]
    assert names[: len(order)] == order
    assert names[-1] == "Send"


def test_the_skip_link_leads_to_the_field(chat: Page) -> None:
    chat.locator(".skip").focus()
    expect(chat.locator(".skip")).to_be_in_viewport()
    chat.keyboard.press("Enter")
    expect(chat.locator(FIELD)).to_be_focused()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_conversation_without_a_pointer(opened: Opener, server: PageServer, size: tuple[int, int]) -> None:
    page = opened(server.url, size=size)
    expect(page.locator(FIELD)).to_be_focused()
    server.say("One.", "Two.", "Three.")
    page.keyboard.type("First line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second line")
    page.keyboard.press("Enter")
    answered(page)
    shows(page, ("user", "First line\nsecond line"), ("assistant", "One."))
    expect(page.locator(FIELD)).to_be_focused()
    page.keyboard.press("ArrowUp")  # edits what was asked last
    expect(page.get_by_label("Your message", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("article.user [data-action=edit]")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Control+End")
    page.keyboard.type("!")
    page.keyboard.press("Control+Enter")
    answered(page)
    shows(page, ("user", "First line\nsecond line!"), ("assistant", "Two."))
    expect(page.locator(FIELD)).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.locator("article.assistant [data-action=again]")).to_be_focused()
    page.keyboard.press("Enter")
    answered(page)
    ends(page, "assistant", "Three.")


def test_escape_stops_an_answer_from_anywhere_but_closes_a_dialog_first(
    chat: Page, server: PageServer
) -> None:
    server.hold()
    server.say("An answer that is long enough to be stopped.")
    chat.keyboard.type("Go")
    chat.keyboard.press("Enter")
    server.let(1)
    expect(answers(chat).locator(".markdown")).to_have_text("An answer that is long e")
    chat.locator("#settings-button").focus()
    chat.keyboard.press("Enter")
    expect(chat.locator("#set-system")).to_be_focused()
    chat.keyboard.press("Escape")
    expect(chat.locator("dialog")).to_have_count(0)
    expect(chat.locator("#settings-button")).to_be_focused()
    expect(chat.locator("#stop")).to_be_visible()
    chat.keyboard.press("Escape")
    answered(chat)
    expect(answers(chat).locator(".ending")).to_contain_text("Stopped.")
    server.release()


def test_enter_while_a_word_is_composed_does_not_send(chat: Page) -> None:
    chat.fill(FIELD, "にほん")
    event = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true, cancelable: true})"
    assert chat.evaluate(f"document.querySelector('{FIELD}').dispatchEvent({event})")
    expect(chat.locator(FIELD)).to_have_value("にほん")
    shows(chat)


def test_the_list_on_a_phone_takes_the_focus_and_gives_it_back(opened: Opener, server: PageServer) -> None:
    page = opened(server.url, size=PHONE)
    ask_and_wait(page, "Hello")
    opener = page.locator("#open-sidebar")
    opener.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#close-sidebar")).to_be_focused()
    expect(opener).to_have_attribute("aria-expanded", "true")
    reached = walk(page)
    assert "Hello" in reached and "Settings" not in reached and "Send" not in reached
    page.locator("#new-chat").focus()
    page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    expect(page.locator("#sidebar")).to_be_hidden()


def test_a_screen_reader_is_told_each_block_once(chat: Page, server: PageServer) -> None:
    told = "() => [...document.querySelectorAll('#announcer p')].map(p => p.textContent)"
    server.hold()
    server.say("The first paragraph.\n\n```py\na\nb\n```\n\nThe last one, cut")
    chat.fill(FIELD, "Go")
    chat.press(FIELD, "Enter")
    for end in ("paragraph.", "last on", "cut"):
        server.let(1)
        expect(answers(chat).locator(".markdown")).to_contain_text(end)
    chat.wait_for_function("() => document.querySelectorAll('#announcer p').length === 2")
    assert chat.evaluate(told) == ["Answering.", "The first paragraph."]
    server.release()
    answered(chat)
    assert chat.evaluate(told) == [
        "Answering.",
        "The first paragraph.",
        "Code block, 2 lines.",
        "The last one, cut",
        "The answer is complete.",
    ]
