"""Asking, stopping, asking again, branching."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Opener
from tests.browser.talk import FIELD, answered, answers, ask, ask_and_wait, ends, shown, shows
from tests.support.page_server import PIECE, PageServer


def test_an_answer_is_shown_as_it_comes_with_its_figures(chat: Page, server: PageServer) -> None:
    text = "The first piece of the answer. " * 4
    server.hold()
    server.say(text)
    ask(chat, "Question?")
    answer = answers(chat)
    expect(chat.locator("#stop")).to_be_visible()
    expect(answer).to_have_attribute("aria-busy", "true")
    server.let(2)
    expect(answer.locator(".markdown")).to_have_text(text[: 2 * PIECE].strip())
    expect(answer.locator(".figures")).to_contain_text(f"{2 * PIECE} tokens")
    server.release()
    answered(chat)
    expect(answer.locator(".markdown")).to_have_text(text.strip())
    expect(answer).to_have_attribute("aria-busy", "false")
    figures = answer.locator(".figures").inner_text()
    assert re.search(r"\d s|\d ms to first token", figures)
    prompt = len("<|im_start|>user\nQuestion?<|im_end|>\n<|im_start|>assistant\n") - 2 * 11 - 9
    assert f"{len(text) + 1} tokens" in figures  # with the one that ends it
    assert f"{prompt} prompt tokens" in figures and "16 cached" in figures
    expect(chat.locator("#context")).to_have_text(f"{prompt + len(text) + 1} of 4,194,304 tokens")


def test_stop_keeps_what_there_is_and_the_engine_is_told(chat: Page, server: PageServer) -> None:
    server.hold()
    server.say("One two three four five six seven. " * 50)
    ask(chat, "Count")
    for _ in range(2):
        server.let(1)
    expect(answers(chat).locator(".markdown")).to_contain_text("seven")
    chat.click("#stop")
    answered(chat)
    expect(answers(chat).locator(".ending")).to_contain_text("Stopped")
    expect(chat.locator(FIELD)).to_be_focused()
    text = shown(chat)[-1][1]
    assert "One two three" in text
    server.wait_until(lambda: server.engine.cancelled and not server.engine.num_live)
    server.release()
    ask_and_wait(chat, "And on")
    assert f"<|im_start|>assistant\n{text}" in server.prompts()[-1]


def test_continue_goes_on_with_the_same_message(chat: Page, server: PageServer) -> None:
    server.say("The cat sat on")
    chat.click("#settings-button")
    chat.fill("#set-max_tokens", "14")
    chat.click("dialog >> text=Done")
    answer = ask_and_wait(chat, "A rhyme")
    expect(answer.locator(".ending")).to_contain_text("Cut off")
    server.say(" the mat.")
    answer.get_by_role("button", name="Continue").click()
    answered(chat)
    shows(chat, ("user", "A rhyme"), ("assistant", "The cat sat on the mat."))
    assert server.prompts()[-1].endswith("assistant\nThe cat sat on")


def test_asking_again_makes_a_branch_and_one_can_go_back(chat: Page, server: PageServer) -> None:
    server.say("First answer.", "Second answer.", "Third answer.")
    ask_and_wait(chat, "Which?")
    for _ in range(2):
        answers(chat).last.locator("[data-action=again]").click()
        answered(chat)
    place = chat.locator(".branch-place")
    expect(place).to_have_text("3/3")
    ends(chat, "assistant", "Third answer.")
    chat.click("[data-action=previous]")
    expect(place).to_have_text("2/3")
    expect(chat.locator("[data-action=previous]")).to_be_focused()
    chat.keyboard.press("Enter")
    expect(place).to_have_text("1/3")
    expect(chat.locator("[data-action=previous]")).to_be_disabled()
    expect(chat.locator("[data-action=next]")).to_be_focused()
    ends(chat, "assistant", "First answer.")
    server.say("More on the first.")
    ask_and_wait(chat, "Go on")
    assert "First answer." in server.prompts()[-1] and "Third answer." not in server.prompts()[-1]


def test_an_edited_question_is_a_branch_and_the_old_one_stays(chat: Page, server: PageServer) -> None:
    server.say("About cats.", "And more.", "About dogs.")
    ask_and_wait(chat, "Cats?")
    ask_and_wait(chat, "More?")
    chat.locator("article.user").first.locator("[data-action=edit]").click()
    field = chat.get_by_label("Your message", exact=True)
    expect(field).to_be_focused()
    expect(field).to_have_value("Cats?")
    field.fill("Dogs?")
    chat.get_by_role("button", name="Send as a new branch").click()
    answered(chat)
    shows(chat, ("user", "Dogs?"), ("assistant", "About dogs."))
    assert "Cats" not in server.prompts()[-1]
    chat.locator("article.user [data-action=previous]").click()
    shows(
        chat, ("user", "Cats?"), ("assistant", "About cats."), ("user", "More?"), ("assistant", "And more.")
    )


def test_an_edited_answer_is_what_the_model_sees_from_then_on(chat: Page, server: PageServer) -> None:
    server.say("Blue.", "Because.")
    ask_and_wait(chat, "A colour?")
    answers(chat).locator("[data-action=edit]").click()
    chat.get_by_label("The answer", exact=True).fill("**Red.**")
    chat.get_by_role("button", name="Keep as a new branch").click()
    ends(chat, "assistant", "Red.")
    ask_and_wait(chat, "Why?")
    assert "**Red.**" in server.prompts()[-1] and "Blue" not in server.prompts()[-1]


def test_settings_become_the_request(chat: Page, server: PageServer) -> None:
    chat.click("#settings-button")
    for name, value in {
        "system": "Be brief.",
        "temperature": "0.25",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "max_tokens": "77",
        "seed": "-12",
        "stop": "END\n\\n\\n",
    }.items():
        chat.fill(f"#set-{name}", value)
    chat.click("dialog >> text=Done")
    with chat.expect_request("**/v1/chat/completions") as sent:
        ask_and_wait(chat, "Go")
    body = sent.value.post_data_json
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {k: body[k] for k in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop")} == {
        "temperature": 0.25,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 77,
        "seed": -12,
        "stop": ["END", "\n\n"],
    }
    sampling = server.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.25, 40, -12)


def test_what_is_left_empty_is_not_sent_and_what_is_wrong_is_named(chat: Page, server: PageServer) -> None:
    chat.click("#settings-button")
    chat.fill("#set-temperature", "3")
    chat.click("dialog >> text=Done")
    expect(chat.locator(".form-error")).to_have_text("Temperature: expected a number from 0 to 2.")
    expect(chat.locator("#set-temperature")).to_be_focused()
    chat.fill("#set-temperature", "")
    chat.fill("#set-tools", "[{")
    chat.click("dialog >> text=Done")
    expect(chat.locator(".form-error")).to_contain_text("Tools: expected JSON")
    chat.fill("#set-tools", "")
    chat.click("dialog >> text=Done")
    with chat.expect_request("**/v1/chat/completions") as sent:
        ask_and_wait(chat, "Go")
    assert set(sent.value.post_data_json) == {"model", "messages", "stream", "stream_options"}


def test_another_model_can_be_chosen(chat: Page, server: PageServer) -> None:
    chat.select_option("#model", "demo-model-b")
    with chat.expect_request("**/v1/chat/completions") as sent:
        ask_and_wait(chat, "Go")
    assert sent.value.post_data_json["model"] == "demo-model-b"


def test_thoughts_are_folded_and_go_back_to_the_model(chat: Page, server: PageServer) -> None:
    server.say("<think>Let me *see*.</think>It is four.")
    with chat.expect_response("**/v1/chat/completions"):
        answer = ask_and_wait(chat, "2+2?")
    thoughts = answer.locator("details.thoughts")
    expect(thoughts).not_to_have_attribute("open", "")
    expect(thoughts.locator("summary")).to_contain_text("Thought")
    expect(thoughts.locator("em")).to_have_count(0)  # not even rendered
    thoughts.locator("summary").click()
    expect(thoughts.locator("em")).to_have_text("see")
    ends(chat, "assistant", "It is four.")
    with chat.expect_request("**/v1/chat/completions") as sent:
        ask_and_wait(chat, "Sure?")
    assert sent.value.post_data_json["messages"][1]["reasoning_content"] == "Let me *see*."


TOOL = '[{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich <b>"}}\n</tool_call>'


def test_calls_are_shown_and_their_results_sent(chat: Page, server: PageServer) -> None:
    chat.click("#settings-button")
    chat.fill("#set-tools", TOOL)
    chat.click("dialog >> text=Done")
    server.say(CALL, "It is sunny.")
    answer = ask_and_wait(chat, "Weather?")
    expect(answer.locator(".call summary")).to_have_text("Calls weather")
    expect(answer.locator(".call pre")).to_have_text('{\n  "city": "Zürich <b>"\n}')
    answer.get_by_label("Result of weather").fill('{"sun": true}')
    with chat.expect_request("**/v1/chat/completions") as sent:
        answer.get_by_role("button", name="Send results").click()
        answered(chat)
    asked, called, result = sent.value.post_data_json["messages"]
    assert asked["role"] == "user"
    assert called["tool_calls"][0]["function"]["name"] == "weather"
    assert result == {
        "role": "tool",
        "content": '{"sun": true}',
        "tool_call_id": called["tool_calls"][0]["id"],
    }
    ends(chat, "assistant", "It is sunny.")
    assert sent.value.post_data_json["tools"][0]["type"] == "function"


def attach(chat: Page, name: str, content: bytes) -> None:
    file: Any = {"name": name, "mimeType": "text/plain", "buffer": content}
    chat.set_input_files("#attach-files", file)


def test_text_files_go_with_a_message(chat: Page, server: PageServer) -> None:
    attach(chat, "a.py", b"x = 1\n")
    attach(chat, "notes.md", "```sh\nls\n```\nüber".encode())
    attach(chat, "away.txt", b"away")
    expect(chat.locator("#attachments li")).to_have_text(["a.py", "notes.md", "away.txt"])
    chat.get_by_role("button", name="Remove away.txt").click()
    chat.fill(FIELD, "What is this?")
    with chat.expect_request("**/v1/chat/completions") as sent:
        chat.press(FIELD, "Enter")
    expected = (
        "What is this?\n\na.py:\n\n```py\nx = 1\n```\n\nnotes.md:\n\n````md\n```sh\nls\n```\nüber\n````"
    )
    assert sent.value.post_data_json["messages"][-1]["content"] == expected
    answered(chat)
    expect(chat.locator("#attachments")).to_be_hidden()
    attach(chat, "alone.txt", b"alone")
    with chat.expect_request("**/v1/chat/completions") as sent:
        chat.click("#send")
    assert sent.value.post_data_json["messages"][-1]["content"] == "alone.txt:\n\n```txt\nalone\n```"
    answered(chat)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x89PNG\r\n\xff", "not a text file"),
        (b"a\0b", "not a text file"),
        (b"x" * (1 << 20) + b"x", "too long"),
    ],
)
def test_what_is_no_text_is_not_attached(chat: Page, content: bytes, reason: str) -> None:
    attach(chat, "file.bin", content)
    expect(chat.locator("#notice")).to_contain_text("file.bin: ")
    expect(chat.locator("#notice")).to_contain_text(reason)
    expect(chat.locator("#attachments")).to_be_hidden()


def test_the_view_follows_the_end_until_the_reader_leaves_it(chat: Page, server: PageServer) -> None:
    server.hold()
    server.say("A line of text.\n\n" * 200)
    ask(chat, "Much")
    server.let(60)
    at_end = "s => s.scrollHeight - s.scrollTop - s.clientHeight < 48"
    scroller = chat.locator("#scroller")
    chat.wait_for_function(f"() => ({at_end})(scroller) && scroller.scrollTop > 100")
    expect(chat.locator("#to-end")).to_be_hidden()
    scroller.hover()
    chat.mouse.wheel(0, -400)
    expect(chat.locator("#to-end")).to_be_visible()
    before = scroller.evaluate("s => s.scrollTop")
    height = scroller.evaluate("s => s.scrollHeight")
    server.let(40)
    chat.wait_for_function("h => scroller.scrollHeight > h", arg=height)
    assert scroller.evaluate("s => s.scrollTop") == before
    chat.click("#to-end")
    expect(chat.locator("#to-end")).to_be_hidden()
    server.release()
    answered(chat)
    chat.wait_for_function(f"() => ({at_end})(scroller)")


def test_a_reader_keeps_the_place_when_the_answer_ends(chat: Page, server: PageServer) -> None:
    server.hold()
    server.say("A line of text.\n\n" * 100)
    ask(chat, "Much")
    server.let(60)
    scroller = chat.locator("#scroller")
    chat.wait_for_function("() => scroller.scrollTop > 600")
    scroller.evaluate("s => { s.scrollTop = 200; }")
    expect(chat.locator("#to-end")).to_be_visible()
    server.release()
    answered(chat)
    assert scroller.evaluate("s => s.scrollTop") == 200
    expect(chat.locator("#to-end")).to_be_visible()


def test_an_answer_goes_on_while_another_conversation_is_open(chat: Page, server: PageServer) -> None:
    server.hold()
    server.say("Slow answer. " * 10)
    ask(chat, "Slow")
    server.let(1)
    expect(answers(chat).locator(".markdown")).to_contain_text("Slow answer.")
    chat.click("#new-chat")
    expect(chat.locator("#send")).to_be_visible()
    expect(answers(chat)).to_have_count(0)
    server.release()
    server.wait_until(lambda: not server.engine.num_live)
    chat.click("#conversation-list >> text=Slow")
    answered(chat)
    shows(chat, ("user", "Slow"), ("assistant", ("Slow answer. " * 10).strip()))


def test_a_long_answer_leaves_the_page_alive_and_whole(chat: Page, server: PageServer) -> None:
    part = "Some *text* with `code`.\n\n```js\nconst x = 1;\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    server.say(part * 1500)
    ask(chat, "All of it")
    chat.fill(FIELD, "typed meanwhile")
    answered(chat)
    expect(answers(chat).locator("table")).to_have_count(1500)
    expect(answers(chat).locator("figure.code .hljs-keyword")).to_have_count(1500)
    expect(chat.locator(FIELD)).to_have_value("typed meanwhile")


def test_without_a_page_flag_there_is_nothing_else_than_it_serves(opened: Opener, server: PageServer) -> None:
    page = opened(server.url)
    names = page.evaluate("performance.getEntriesByType('resource').map(e => new URL(e.name).pathname)")
    assert "/static/chat/main.js" in names
    assert all(name.startswith(("/static/", "/v1/models")) for name in names)
