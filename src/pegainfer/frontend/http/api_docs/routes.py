"""GET /openapi.json and GET /docs."""

from __future__ import annotations

import asyncio
import html
import re

from starlette.types import Receive, Scope, Send

from pegainfer.frontend.http.answer.responses import send_bytes, send_json
from pegainfer.frontend.http.api_docs.document import openapi
from pegainfer.frontend.http.api_docs.markdown import to_markdown
from pegainfer.frontend.http.front import Front

# The document is made anew for each request, off the event loop: few ask for it.
HTML = b"text/html; charset=utf-8"
# The page is text and tables: nothing of it needs a script.
POLICY = (
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; display: block; overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; }
code { font-family: ui-monospace, monospace; font-size: .95em; }
"""


async def document(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, await asyncio.to_thread(openapi, front))


async def page(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """The document as one page, readable without a script."""
    body = await asyncio.to_thread(lambda: to_html(to_markdown(openapi(front))))
    await send_bytes(send, body.encode(), content_type=HTML, headers=POLICY)


def to_html(markdown: str) -> str:
    """Of the Markdown that `to_markdown` writes: headings, paragraphs, tables, code and links."""
    out = ["<!doctype html><html lang=en><meta charset=utf-8><title>pegainfer: the API</title>",
           '<meta name=viewport content="width=device-width">', f"<style>{STYLE}</style><body>",
           '<p><a href="/openapi.json">openapi.json</a></p>']  # fmt: skip
    rows: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            rows.append(line)
            continue
        if rows:
            out.append(_table(rows))
            rows = []
        if heading := re.fullmatch(r"(#+) (.*)", line):
            level, text = len(heading[1]), heading[2]
            out.append(f'<h{level} id="{html.escape(text.lower())}">{_inline(text)}</h{level}>')
        elif line:
            out.append(f"<p>{_inline(line)}</p>")
    return "\n".join([*out, "</body></html>"])


def _table(rows: list[str]) -> str:
    cells = [re.split(r"(?<!\\)\|", row.strip("|")) for row in rows]
    head, body = cells[0], cells[2:]

    def line(row: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_inline(c.strip())}</{tag}>" for c in row) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(r, "td") for r in body) + "</table>"


def _inline(text: str) -> str:
    text = html.escape(text.replace("\\|", "|"))
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    return re.sub(r"\[([\w.]+)\]\(#([\w.-]+)\)", r'<a href="#\2">\1</a>', text)
