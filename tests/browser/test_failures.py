"""What the page says when something goes wrong, and what one can do then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from pegainfer.contract.errors import QueueFullError, RequestError
from pegainfer.contract.event import FinishReason, TokenEvent
from tests.browser.conftest import Opener
from tests.browser.talk import answered, answers, ask, ask_and_wait, ends, shows
from tests.support.page_server import PageServer, page_server


def test_a_refused_request_says_why_and_can_be_sent_again(chat: Page, server: PageServer) -> None:
    server.engine.refuse = QueueFullError("the queue is full", retry_after=3.0)
    answer = ask_and_wait(chat, "Now?")
    failure = answer.locator(".failure")
    expect(failure).to_contain_text("the queue is full")
    expect(failure).to_contain_text("try again in 3 s")
    expect(chat.locator("#announcer p").last).to_have_text("No answer: the queue is full")
    server.engine.refuse = None
    server.say("Here I am.")
    failure.get_by_role("button", name="Try again").click()
    answered(chat)
    shows(chat, ("user", "Now?"), ("assistant", "Here I am."))
    expect(chat.locator(".branch-place")).to_have_text("2/2")


def test_a_bad_setting_is_named(chat: Page, server: PageServer) -> None:
    server.engine.refuse = RequestError("seed: too odd <b>", param="seed")
    expect(ask_and_wait(chat, "Go").locator(".failure")).to_contain_text("seed: too odd <b>")
    expect(answers(chat).locator(".failure")).to_contain_text("Change the setting")


def test_an_error_within_the_stream_keeps_what_came(chat: Page, server: PageServer) -> None:
    server.hold()
    server.say("This came before the error, and this did not.")
    ask(chat, "Go")
    server.let(1)
    expect(answers(chat).locator(".markdown")).to_have_text("This came before the err")
    (request,) = server.engine.requests
    failed = TokenEvent(request_id=request.id, index=0, finish=FinishReason.ERROR, error="it broke")
    server.call(lambda: server.engine.fail(request.id, failed))
    expect(answers(chat).locator(".failure")).to_contain_text("it broke")
    expect(answers(chat).locator(".markdown")).to_have_text("This came before the err")


def test_a_server_that_is_gone(chat: Page) -> None:
    chat.context.set_offline(True)
    expect(ask_and_wait(chat, "There?").locator(".failure")).to_contain_text("The server did not answer.")
    chat.context.set_offline(False)
    answers(chat).get_by_role("button", name="Try again").click()
    answered(chat)
    ends(chat, "assistant", "All right.")


@pytest.fixture
def closed() -> Iterator[PageServer]:
    with page_server(api_key=("secret",), open_page=True) as server:
        yield server


def test_a_key_is_asked_for_kept_in_the_tab_and_asked_for_again(opened: Opener, closed: PageServer) -> None:
    page = opened(closed.url)
    field = page.get_by_label("API key", exact=True)
    expect(field).to_be_focused()
    assert field.get_attribute("type") == "password"
    field.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("dialog")).to_contain_text("does not know the key")
    page.get_by_label("API key", exact=True).fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model option")).to_have_count(2)
    ask_and_wait(page, "In?")
    ends(page, "assistant", "All right.")
    assert page.evaluate(
        "[sessionStorage.getItem('api-key'), JSON.stringify(localStorage).includes('secret')]"
    ) == [
        "secret",
        False,
    ]
    page.reload()
    expect(page.locator("#model option")).to_have_count(2)
    expect(page.locator("dialog")).to_have_count(0)


def test_without_a_key_the_page_says_so_and_one_can_try_again(opened: Opener, closed: PageServer) -> None:
    page = opened(closed.url)
    expect(page.get_by_label("API key", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#notice")).to_contain_text("Give a key")
    page.locator("#notice").get_by_role("button", name="Try again").click()
    page.get_by_label("API key", exact=True).fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model option")).to_have_count(2)
    expect(page.locator("#notice")).to_be_hidden()


def test_the_dashboard_asks_for_the_key_too(opened: Opener, closed: PageServer) -> None:
    page = opened(closed.url + "/dashboard")
    page.get_by_label("API key", exact=True).fill("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#state")).to_have_text("demo-model on none, every 2 s")
