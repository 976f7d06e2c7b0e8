"""What a model writes: shown well, and never run, loaded or followed."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.talk import answers, ask_and_wait
from tests.support.page_server import PageServer

# ruff: noqa: E501  Markdown and HTML are compared as they are
HOSTILE = """
<script>window.pwned = 1</script>
<img src="https://evil.example/a.png" onerror="window.pwned = 2">
<svg onload="window.pwned = 3"><a href="javascript:window.pwned=4">x</a></svg>
<iframe src="https://evil.example/"></iframe><style>body { display: none }</style>
<a href="https://evil.example" onclick="window.pwned=5">raw</a> <base href="https://evil.example/">

[one](javascript:window.pwned=6) [two](JaVaScRiPt:window.pwned=7) [three](data:text/html,<script>window.pwned=8</script>)
[four](vbscript:x) [five](file:///etc/passwd) [six](//evil.example/x) [seven](/v1/models) [eight](\tjavascript:alert(1))
[nine](&#106;avascript:window.pwned=9) <javascript:window.pwned=10> [ten](https://good.example/a"onclick="window.pwned=11)
![picture](https://evil.example/p.png) ![bad](javascript:window.pwned=12) ![data](data:image/svg+xml,<svg/>)
[https://bank.example](https://evil.example/login) https://plain.example/x.

| <b>head</b> | `<i>` |
|---|---|
| <img src=x onerror=window.pwned=13> | [x](javascript:window.pwned=14) |

```html"><script>window.pwned=15</script>
<script>window.pwned = 16</script>
```

> <script>window.pwned = 17</script>

```python
print("an open fence <script>window.pwned=18</script>")
"""


def test_hostile_markdown_does_nothing(chat: Page, server: PageServer) -> None:
    """That no request left and no policy was violated is what the fixtures assert."""
    server.say(f"<think>{HOSTILE}</think>{HOSTILE}")
    answer = ask_and_wait(chat, HOSTILE)
    answer.locator("details.thoughts summary").click()
    assert chat.evaluate("window.pwned") is None
    assert chat.evaluate("getComputedStyle(document.body).display") != "none"
    for part in (".markdown", "article.user .plain"):
        made = chat.locator(
            f"{part} :is(script, img, iframe, style, base, object, form, [onclick], [onerror])"
        )
        expect(made).to_have_count(0)
    links = answer.locator(".markdown").last.locator("a")
    told = links.evaluate_all("all => all.map(a => [a.protocol, a.hostname, a.rel, a.target])")
    assert {(protocol, rel, target) for protocol, _, rel, target in told} == {
        ("https:", "noopener noreferrer", "_blank")
    }
    assert {host for _, host, *_ in told} == {"evil.example", "good.example", "plain.example"}
    text = answer.locator(".markdown").last.inner_text()
    assert "<script>window.pwned = 1</script>" in text
    assert "https://bank.example (evil.example)" in text
    assert "image picture" in text
    assert chat.locator("article.user .plain").text_content() == HOSTILE


CASES: dict[str, tuple[str, str]] = {
    "emphasis": ("a *b* **c** ***d*** _e_ ~~f~~", "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <em>e</em> <s>f</s></p>"),
    "not in words": ("snake_case_name 2*3*4 a * b", "<p>snake_case_name 2<em>3</em>4 a * b</p>"),
    "open": ("**never closed and `neither", "<p>**never closed and `neither</p>"),
    "nested": ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    "code": ("`` a`b `` and `<b>`", "<p><code>a`b</code> and <code>&lt;b&gt;</code></p>"),
    "escapes": (r"\*a\* \\ &lt;b&gt; &#65; &bogus;", "<p>*a* \\ &lt;b&gt; A &amp;bogus;</p>"),
    "breaks": ("a  \nb\\\nc\nd<br>e", "<p>a<br>b<br>c\nd<br>e</p>"),
    "money": ("$5 and $6, \\$7", "<p>$5 and $6, $7</p>"),
    "an open formula": ("\\[\na\n\n$$ b", "<p>[\na</p><p>$$ b</p>"),
    "tasks": ("- [ ] a\n- [x] b", '<ul><li class="task"><input type="checkbox" disabled="" aria-label="To do"><div>a</div></li><li class="task"><input type="checkbox" disabled="" checked="" aria-label="Done"><div>b</div></li></ul>'),
    "definitions": ("[a]\n\n[a]: https://x.example", '<p>[a]</p><p>[a]: <a href="https://x.example/" title="https://x.example/" target="_blank" rel="noopener noreferrer">https://x.example</a></p>'),
    "headings": ("# One\n### Three ##\nText\n===\n#no", '<h2 class="heading-1">One</h2><h4 class="heading-3">Three</h4><h2 class="heading-1">Text</h2><p>#no</p>'),
    "list": ("- a\n- b\n  - c\n\nend", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><p>end</p>"),
    "numbers": ("3. a\n4. b\n   - c", '<ol start="3"><li>a</li><li>b<ul><li>c</li></ul></li></ol>'),
    "loose": ("1. a\n\n   more\n2. b", "<ol><li><p>a</p><p>more</p></li><li><p>b</p></li></ol>"),
    "a year is no list": ("born in\n1985. Then", "<p>born in\n1985. Then</p>"),
    "quote": ("> a\nlazy\n> - b\n\nc", "<blockquote><p>a\nlazy</p><ul><li>b</li></ul></blockquote><p>c</p>"),
    "rule": ("a\n\n---\n***\nb", "<p>a</p><hr><hr><p>b</p>"),
    "table": (
        "| a | b \\| c |\n|:-:|--:|\n| 1 |\n| 2 | 3 | 4 |",
        '<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th class="to-center" scope="col">a</th>'
        '<th class="to-right" scope="col">b | c</th></tr></thead><tbody><tr><td class="to-center">1</td><td class="to-right"></td></tr>'
        '<tr><td class="to-center">2</td><td class="to-right">3</td></tr></tbody></table></div>',
    ),
    "link": (
        "[a *b*](https://x.example/y_(z)?q=1 \"title\").",
        '<p><a href="https://x.example/y_(z)?q=1" title="https://x.example/y_(z)?q=1" target="_blank" '
        'rel="noopener noreferrer">a <em>b</em></a>.</p>',
    ),
    "brackets": ("[a] [b]( c d) [", "<p>[a] [b]( c d) [</p>"),
}  # fmt: skip

RENDER = """async text => {
  const { MarkdownView } = await import("/static/markdown/view.js");
  const view = new MarkdownView();
  view.update(text, { done: true });
  return view.node.innerHTML.replace(/(?<=>)\\n|\\n(?=<)/g, "");
}"""


@pytest.fixture(scope="module")
def module_page(browser: Any) -> Any:
    from tests.support.page_server import page_server

    with page_server() as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        yield page
        context.close()


@pytest.mark.parametrize("name", CASES)
def test_markdown(module_page: Page, name: str) -> None:
    source, html = CASES[name]
    assert module_page.evaluate(RENDER, source) == html


def test_code_has_its_language_its_colours_and_a_copy_button(chat: Page, server: PageServer) -> None:
    chat.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = 'def f(x):  # it <b>\n    return "s" + str(1.5)\n'
    server.say(f"Here:\n\n```python title=x\n{code}```\n")
    block = ask_and_wait(chat, "Code").locator("figure.code")
    expect(block.locator("figcaption span")).to_have_text("python")
    spans = block.locator("code span").evaluate_all("all => all.map(s => [s.className, s.textContent])")
    assert [span for span in spans if span[0] != "hljs-params"] == [
        ["hljs-keyword", "def"],
        ["hljs-title function_", "f"],
        ["hljs-comment", "# it <b>"],
        ["hljs-keyword", "return"],
        ["hljs-string", '"s"'],
        ["hljs-built_in", "str"],
        ["hljs-number", "1.5"],
    ]
    block.get_by_role("button", name="Copy the code").click()
    expect(block.get_by_role("button", name="Copied")).to_be_visible()
    assert chat.evaluate("navigator.clipboard.readText()") == code.rstrip("\n")


def test_formulas_are_set_as_mathml(chat: Page, server: PageServer) -> None:
    server.say(
        r"So \(a_1 * b_2\) and $c^2$, not $5:"
        + "\n\\[\n\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}\n- x\n\\]\n"
        r"then $$\frac{1}{2}$$ and \(\nosuchcommand\)."
    )
    answer = ask_and_wait(chat, "Formulas").locator(".markdown")
    expect(answer.locator("math")).to_have_count(4)
    tags = answer.locator("math").evaluate_all(
        "all => all.map(m => [m.getAttribute('display'), m.firstChild.localName])"
    )
    assert [display for display, _ in tags] == [None, None, "block", "block"]
    expect(answer.locator("math mfrac")).to_have_count(1)
    expect(answer.locator("math mtable mtd")).to_have_count(4)
    cell = answer.locator("math mtd").first
    assert cell.evaluate("c => parseFloat(getComputedStyle(c).paddingRight)") > 1
    expect(answer.locator("code.math.unreadable")).to_have_text(r"\(\nosuchcommand\)")
    expect(answer).to_contain_text("not $5:")


# Documents whose pieces change what stands before them, or nearly so.
TRICKY = [
    HOSTILE,
    *(source for source, _ in CASES.values()),
    "foo\n``` `x`\nbar\n- a\n-\n- b\n1. c\n\n   ```\n   d\n   ```\n\n\nend\n---\n",
    "a\n| b |\n|---|\n| c |\nd\n> q\n>\n> r\n\n~~~\ncode\n```\n~~~\n* * *\n*x\n**y*\n",
    "a\n| b |\n|---\n|---x\nc\n| d |\n|:-\n| 1 |\n\n| e |\nf\n",
    "a\n\\[\nb\n- c\n\\]\nd $x$ e\n$$\nf\n\ng\n$$\n\n$$\nh\n\n\n- \\[ i\n  \\] j\n\\[ k \\] l\n",
    "\n\n  - x\n\n\n    y\n\nz\n===\n\n```a\n```\n```b",
]

GROW = """async documents => {
  const { MarkdownView } = await import("/static/markdown/view.js");
  const whole = text => { const v = new MarkdownView(); v.update(text, { done: true }); return v.node; };
  let state = 7;
  const random = below => (state = (state * 1103515245 + 12345) % 2147483648) % below;
  const wrong = [];
  documents.forEach(whole); // loads the libraries
  await new Promise(done => setTimeout(done, 1000));
  for (const text of documents) {
    for (let round = 0; round < 30; round++) {
      const settled = [];
      const view = new MarkdownView({ settled: node => settled.push(node) });
      for (let at = 0; at < text.length; ) {
        at = Math.min(text.length, at + 1 + random(round < 10 ? 1 : 25));
        view.update(text.slice(0, at));
      }
      view.update(text, { done: true });
      const same = view.node.isEqualNode(whole(text));
      const told = settled.length === view.node.childNodes.length && new Set(settled).size === settled.length;
      if (!same || !told) wrong.push([text, view.node.innerHTML, whole(text).innerHTML, told]);
    }
  }
  return wrong.slice(0, 3);
}"""


def test_text_that_grows_in_any_pieces_ends_as_the_whole_would(module_page: Page) -> None:
    assert module_page.evaluate(GROW, TRICKY) == []


def test_no_text_takes_more_than_linear_time(module_page: Page) -> None:
    """Quadratic scans of these would take minutes: the test's timeout is the assertion."""
    n = 60_000
    repeated = [
        "*",
        "_",
        "**a ",
        "~~",
        "`",
        "`` ` ",
        "[",
        "[a](",
        "](",
        "![",
        "<",
        "<a ",
        "&",
        "\\[",
        "$$ ",
        " ",
        "\t",
    ]
    repeated += [
        "> ",
        "- ",
        "1. ",
        "|",
        "|-",
        "# ",
        "http://",
        "h",
        "(",
        "-",
        "=",
        "\\",
        "*a_",
        "a\n",
        "|a\n|-\n",
        "``` ",
    ]
    texts = [piece * (n // len(piece)) for piece in repeated]
    texts += [
        "# " + " " * n + "x",
        "-" + " " * n + "x\n|",
        "[a](" + " " * n,
        "[a](<" + "a" * n,
        "a " * n + "\n---",
    ]
    texts += ["\n".join(">" * k for k in range(400)), "\n".join(" " * k + "- a" for k in range(400))]
    sizes = module_page.evaluate(
        """async texts => {
          const { MarkdownView } = await import("/static/markdown/view.js");
          return texts.map(text => {
            const view = new MarkdownView();
            view.update(text, { done: true });
            return view.node.childNodes.length;
          });
        }""",
        texts,
    )
    assert len(sizes) == len(texts) and min(sizes) >= 0


def test_a_giant_table_scrolls_in_its_own_box(chat: Page, server: PageServer) -> None:
    columns = 40
    row = "|" + "wide cell|" * columns + "\n"
    server.say(row + "|" + "---|" * columns + "\n" + row * 200)
    answer = ask_and_wait(chat, "Table")
    expect(answer.locator("tbody tr")).to_have_count(200)
    box = answer.locator(".table")
    assert box.evaluate("b => b.scrollWidth > b.clientWidth && b.scrollHeight > b.clientHeight")
    assert chat.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert answers(chat).evaluate("a => a.scrollWidth <= a.clientWidth")
