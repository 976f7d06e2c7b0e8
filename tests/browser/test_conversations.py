"""What is kept in the browser: the list, files out and in, a second tab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, expect

from tests.browser.conftest import Opener
from tests.browser.talk import FIELD, answers, ask, ask_and_wait, shown, shows
from tests.support.page_server import PageServer

ITEM = "#conversation-list .item"


def branched(chat: Page, server: PageServer) -> None:
    """A conversation with two answers, of which the first one is shown and was gone on with."""
    server.say("<think>Hm.</think>First **one**.", "Second one.", "Going on:\n\n```py\nx = '``'\n```")
    ask_and_wait(chat, "# Which is *it*?\nSay.")
    answers(chat).locator("[data-action=again]").click()
    expect(chat.locator(".branch-place")).to_have_text("2/2")
    chat.locator("[data-action=previous]").click()
    ask_and_wait(chat, "On")


def saved(page: Page, click: str) -> tuple[str, str]:
    with page.expect_download() as download:
        page.locator(click).click()
    return download.value.suggested_filename, Path(download.value.path()).read_text()


def export(page: Page, kind: str) -> tuple[str, str]:
    page.click("#export")
    return saved(page, f"dialog [data-kind={kind}]")


def put(page: Page, text: str) -> None:
    file: Any = {"name": "in.json", "mimeType": "application/json", "buffer": text.encode()}
    page.set_input_files("#import-file", file)


def test_a_reload_brings_everything_back(chat: Page, server: PageServer) -> None:
    branched(chat, server)
    before = shown(chat)
    chat.fill(FIELD, "not yet sent")
    chat.reload()
    expect(answers(chat)).to_have_count(2)
    assert shown(chat) == before
    expect(chat.locator(".branch-place")).to_have_text("1/2")
    expect(chat.locator(FIELD)).to_have_value("not yet sent")
    assert chat.title() == "Which is *it*? · pegainfer"


def test_an_answer_that_a_reload_cut_off_says_so(chat: Page, server: PageServer) -> None:
    server.hold()
    server.say("Half of an answer that never ends")
    ask(chat, "Long?")
    server.let(1)
    expect(answers(chat).locator(".markdown")).to_have_text("Half of an answer that n")
    chat.reload()
    expect(answers(chat).locator(".ending")).to_contain_text("Interrupted.")
    expect(answers(chat).locator(".markdown")).to_have_text("Half of an answer that n")
    expect(chat.locator("#send")).to_be_visible()


def test_the_list_opens_renames_and_deletes(chat: Page, server: PageServer) -> None:
    for text in ("About cats", "About dogs"):
        chat.click("#new-chat")
        ask_and_wait(chat, text)
    expect(chat.locator(ITEM)).to_have_text(["About dogs", "About cats"])
    expect(chat.locator(".item-open[aria-current=true]")).to_have_text("About dogs")
    chat.click(f"{ITEM} >> text=About cats")
    shows(chat, ("user", "About cats"), ("assistant", "All right."))
    chat.get_by_role("button", name="Rename About cats").click()
    chat.get_by_label("Title").fill("<b>Cats</b>")
    chat.keyboard.press("Enter")
    expect(chat.locator(ITEM).first).to_have_text("<b>Cats</b>")
    expect(chat.locator("#title")).to_have_text("<b>Cats</b>")
    chat.get_by_role("button", name="Delete <b>Cats</b>").click()
    chat.get_by_role("button", name="Keep").click()
    expect(chat.locator(ITEM)).to_have_count(2)
    chat.get_by_role("button", name="Delete <b>Cats</b>").click()
    chat.locator("dialog").get_by_role("button", name="Delete", exact=True).click()
    expect(chat.locator(ITEM)).to_have_text(["About dogs"])
    expect(answers(chat)).to_have_count(0)  # it was open: a new one takes its place
    chat.reload()
    expect(chat.locator(ITEM)).to_have_text(["About dogs"])


def test_json_out_and_in_again_is_the_same_tree(chat: Page, server: PageServer) -> None:
    branched(chat, server)
    name, text = export(chat, "json")
    assert name == "which-is-it.json"
    before = json.loads(text)["conversations"][0]
    put(chat, text)
    expect(chat.locator(ITEM)).to_have_count(2)
    assert [t for _, t in shown(chat)][:3] == ["# Which is *it*?\nSay.", "First one.", "On"]
    after = json.loads(export(chat, "json")[1])["conversations"][0]
    assert after["id"] != before["id"]
    assert after["title"] == before["title"] and after["settings"] == before["settings"]
    for node in before["nodes"].values():
        node.pop("error", None)
    assert after["nodes"] == before["nodes"]
    both = json.loads(saved(chat, "#export-all")[1])
    assert [c["id"] for c in both["conversations"]] == [after["id"], before["id"]]


def test_markdown_out_is_the_shown_branch(chat: Page, server: PageServer) -> None:
    branched(chat, server)
    name, text = export(chat, "md")
    assert name == "which-is-it.md"
    assert text == (
        "# Which is *it*?\n\n## User\n\n# Which is *it*?\nSay.\n\n## Assistant\n\n> Hm.\n\nFirst **one**.\n\n"
        "## User\n\nOn\n\n## Assistant\n\nGoing on:\n\n```py\nx = '``'\n```\n"
    )


def test_files_that_are_none_are_refused_and_say_why(chat: Page, server: PageServer) -> None:
    def tree(**nodes: Any) -> str:
        head = {"format": "pegainfer-conversations", "version": 1}
        return json.dumps({**head, "conversations": [{"title": "t", "nodes": nodes}]})

    root = {"children": ["a"], "chosen": "a"}
    node = {"parent": "root", "children": [], "role": "user", "content": "x"}
    cases = {
        "{": "no JSON",
        "{}": '"format"',
        json.dumps(
            {"format": "pegainfer-conversations", "version": 9, "conversations": []}
        ): "version 1, got 9",
        tree(): "a root",
        tree(root=root): "parent root",
        tree(root=root, a={**node, "role": "admin"}): "a role among",
        tree(root=root, a={**node, "parent": "b"}): "parent root",
        tree(root={"children": ["a", "a"]}, a=node): "there once",
        tree(root=root, a={**node, "children": ["a"]}): "parent a",
    }
    for text, said in cases.items():
        put(chat, text)
        expect(chat.locator("#notice")).to_contain_text("in.json")
        expect(chat.locator("#notice")).to_contain_text(said)
    expect(chat.locator(ITEM)).to_have_count(0)
    put(
        chat,
        tree(root=root, a={**node, "__proto__": {"polluted": 1}, "onclick": "x", "content": "<b>hi</b>"}),
    )
    expect(chat.locator("#notice")).to_be_hidden()
    shows(chat, ("user", "<b>hi</b>"))
    assert chat.evaluate("({}).polluted") is None
    assert "onclick" not in export(chat, "json")[1]


def test_a_second_tab_sees_what_the_first_one_does(chat: Page, server: PageServer) -> None:
    ask_and_wait(chat, "One")
    second = chat.context.new_page()
    second.goto(chat.url)
    expect(answers(second)).to_have_count(1)
    ask_and_wait(chat, "Two")
    expect(answers(second)).to_have_count(2)
    chat.click("#new-chat")
    ask_and_wait(chat, "Three")
    expect(second.locator(ITEM)).to_have_text(["Three", "One"])


def test_without_a_database_the_page_works_and_says_what_that_means(
    opened: Opener, server: PageServer
) -> None:
    page = opened(server.url)
    page.add_init_script("Object.defineProperty(window, 'indexedDB', { get() { throw new Error('off') } })")
    page.reload()
    expect(page.locator("#notice")).to_contain_text("keeps nothing")
    ask_and_wait(page, "Anyway?")
    shows(page, ("user", "Anyway?"), ("assistant", "All right."))
    expect(page.locator(ITEM)).to_have_text(["Anyway?"])


SLOW_DATABASE = """
const open = IDBFactory.prototype.open;
IDBFactory.prototype.open = function (...args) {
  const request = open.apply(this, args);
  Object.defineProperty(request, "onsuccess", {
    set: (then) => request.addEventListener("success", () => (window.letIt = then)),
  });
  return request;
};
"""


def test_what_is_sent_before_the_conversations_are_read_is_not_lost(
    opened: Opener, server: PageServer
) -> None:
    page = opened(server.url)
    page.add_init_script(SLOW_DATABASE)
    page.reload()
    page.wait_for_function("window.letIt !== undefined")
    page.keyboard.type("Already?")
    page.keyboard.press("Enter")
    expect(page.locator(FIELD)).to_have_value("")
    page.evaluate("letIt()")
    shows(page, ("user", "Already?"), ("assistant", "All right."))


def test_a_full_disk_is_told_and_does_not_stop_the_talk(opened: Opener, server: PageServer) -> None:
    page = opened(server.url)
    page.add_init_script(
        "IDBObjectStore.prototype.put = () => { throw new DOMException('No room.', 'QuotaExceededError'); }"
    )
    page.reload()
    ask_and_wait(page, "Anyway?")
    shows(page, ("user", "Anyway?"), ("assistant", "All right."))
    expect(page.locator("#notice")).to_contain_text("did not keep the conversation: No room.")
    assert "All right." in export(page, "json")[1]


def test_what_is_deleted_while_it_is_answered_stays_deleted(chat: Page, server: PageServer) -> None:
    server.hold()
    server.say("An answer that nobody waits for any more.")
    ask(chat, "Never mind")
    server.let(1)
    expect(answers(chat).locator(".markdown")).to_have_text("An answer that nobody wa")
    chat.get_by_role("button", name="Delete Never mind").click()
    chat.locator("dialog").get_by_role("button", name="Delete", exact=True).click()
    server.wait_until(lambda: server.engine.cancelled and not server.engine.num_live)
    server.release()
    ask_and_wait(chat, "Another thing")
    expect(chat.locator(ITEM)).to_have_text(["Another thing"])
    chat.reload()
    expect(chat.locator(ITEM)).to_have_text(["Another thing"])


def test_the_search_finds_words_of_titles_and_of_every_branch(chat: Page, server: PageServer) -> None:
    server.say("The Danube.", "Another Elbe.", "Forty-two.")
    ask_and_wait(chat, "Longest river?")
    answers(chat).locator("[data-action=again]").click()
    expect(chat.locator(".branch-place")).to_have_text("2/2")
    chat.click("#new-chat")
    ask_and_wait(chat, "The answer?")
    items = chat.locator(f"{ITEM} .item-open")
    expect(items).to_have_text(["The answer?", "Longest river?"])
    for words, found in (
        ("RIVER", ["Longest river?"]),
        ("danube elbe", ["Longest river?"]),
        ("the", ["The answer?", "Longest river?"]),
        ("danube answer", []),
    ):
        chat.fill("#search", words)
        expect(items).to_have_text(found)
    expect(chat.locator("#no-conversations")).to_have_text("No conversation holds these words.")
    chat.fill("#search", "")
    expect(items).to_have_count(2)
    expect(chat.locator("#no-conversations")).to_have_text("")
