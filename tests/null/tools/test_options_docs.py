from __future__ import annotations

from tools.options_docs import PAGE, to_markdown


def test_docs_options_md_is_the_table() -> None:
    assert PAGE.read_text() == to_markdown(), "make docs-api writes it anew"
