"""Blocks of a continuation: however its text comes in pieces, the same blocks, opened and closed in order."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pegainfer.frontend.http.answer.choice import Delta
from pegainfer.frontend.http.answer.reply import ReplySyntax
from pegainfer.frontend.http.request.blocks import Block, Blocks
from pegainfer.frontend.reasoning.think import ThinkState, ThinkSyntax
from pegainfer.frontend.tools.call import Tool
from pegainfer.frontend.tools.styles import choose_style

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "é"}}\n</tool_call>'
TEXTS = [
    "hello there",
    f"so it is\n</think>\n\nLet me see. {CALL}\n{CALL} done",
    f"only thoughts about <tool_call> and {CALL[:30]}",
    f"</think>{CALL}",
    "</think>",
    f"a</think>{CALL[:-12]}",
]
END = 999  # the token that ends the thoughts, here and there in place of its text's last letter


def syntax() -> ReplySyntax:
    return ReplySyntax(
        style=choose_style("hermes", None),
        tools=(Tool("now"),),
        reasoning=ThinkSyntax(),
        state=ThinkState.OPEN,
    )


def run(pieces: list[str], finish: str, end: int | None) -> tuple[list[tuple[str, str]], int]:
    """Kinds and texts of the blocks, and how many tokens were thoughts, a token a letter."""
    blocks = Blocks(syntax(), end)
    seen: list[Block] = []
    open_block: Block | None = None
    added: dict[int, str] = {}
    position = 0
    text = "".join(pieces)
    after = text.find("</think>") + len("</think>") if "</think>" in text else -1
    for i, piece in enumerate(pieces):
        tokens = [END if position + j + 1 == after else 1 for j in range(len(piece))]
        position += len(piece)
        last = finish if i == len(pieces) - 1 else None
        for step in blocks.push(Delta(0, text=piece, tokens=tokens, finish=last)):
            if step.what == "open":
                assert open_block is None and step.block.index == len(seen)
                open_block = step.block
                seen.append(step.block)
                added[step.block.index] = ""
            elif step.what == "add":
                assert step.block is open_block and step.text
                added[step.block.index] += step.text
            else:
                assert step.block is open_block
                open_block = None
    assert open_block is None and blocks.finish == finish
    assert [added[b.index] for b in seen] == [b.text for b in blocks.blocks]
    return [(b.kind, b.text) for b in blocks.blocks], blocks.reasoning_tokens


@given(
    st.sampled_from(TEXTS), st.lists(st.integers(0, 200), max_size=12), st.sampled_from(["stop", "length"])
)
def test_where_the_text_is_cut_makes_no_difference(text: str, cuts: list[int], finish: str) -> None:
    places = sorted({c for c in cuts if c < len(text)} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert run(pieces, finish, END) == run([text], finish, END)


def test_what_the_blocks_are() -> None:
    found, thought = run([TEXTS[1]], "stop", END)
    arguments = '{"zone": "é"}'
    assert found == [
        ("thinking", "so it is"),
        ("text", "Let me see."),
        ("call", arguments),
        ("call", arguments),
        ("text", " done"),
    ]
    assert thought == len("so it is\n</think>")
    assert run([TEXTS[0]], "length", END) == ([("thinking", "hello there")], len("hello there"))
    assert run([TEXTS[4]], "stop", END) == ([], 0)


def test_thoughts_are_counted_by_text_where_no_token_ends_them() -> None:
    assert run(list(TEXTS[1]), "stop", None)[1] == len("so it is\n</think>")
