// Markdown as DOM nodes, brought up to date piece by piece while a model writes.
//
// Model text reaches the page as text nodes only. Links lead to http and https and nowhere else; images are not
// loaded but linked.

import { copyButton, el } from "../lib/dom.js";
import { parseBlocks } from "./blocks.js";
import { highlight } from "./highlight.js";
import { parseInline } from "./inline.js";

/** The absolute http(s) address, or null for anything else. */
export function safeAddress(href) {
  try {
    const url = new URL(href);
    return url.protocol === "http:" || url.protocol === "https:" ? url : null;
  } catch {
    return null;
  }
}

export class MarkdownView {
  /** `settled(node)` is called once for each block that will not change any more. */
  constructor({ settled = () => {} } = {}) {
    this.node = el("div", { class: "markdown" });
    this.#settled = settled;
  }

  #settled;
  #text = "";
  #tops = []; // {start, view}: the top-level blocks and where their source begins
  #told = 0; // so many of them were reported settled

  /**
   * Shows `text`, which usually has grown. All but its last block stay as they are: a block starts without
   * regard to what stands before it, so only the last one can change. A block that began with the line which
   * was still being written, or the one above it (a table's head), does not count: it may yet turn out to
   * belong to the block before.
   */
  update(text, { done = false } = {}) {
    if (!text.startsWith(this.#text)) this.#tops.length = this.#told = 0;
    const written = this.#text.lastIndexOf("\n");
    const unsure = written < 0 ? 0 : this.#text.lastIndexOf("\n", written - 1) + 1;
    const keep = Math.max(
      0,
      this.#tops.findLastIndex((top) => top.start < unsure),
    );
    this.#text = text;
    const from = this.#tops[keep]?.start ?? 0;
    const lines = text.slice(from).split("\n");
    const starts = [from];
    for (const line of lines) starts.push(starts.at(-1) + line.length + 1);
    const blocks = parseBlocks(lines);
    const old = this.#tops[keep];
    this.#tops.length = Math.min(this.#tops.length, keep);
    blocks.forEach((block, i) => {
      const start = starts[block.line];
      const grown = i === 0 && old?.start === start && old.view.grow?.(block, done);
      this.#tops.push(grown ? old : { start, view: viewOf(block, done) });
    });
    const nodes = this.#tops.map((top) => top.view.node);
    while (this.node.childNodes.length > nodes.length) this.node.lastChild.remove();
    for (let i = Math.min(keep, nodes.length); i < nodes.length; i++) {
      const present = this.node.childNodes[i];
      if (present === undefined) this.node.append(nodes[i]);
      else if (present !== nodes[i]) present.replaceWith(nodes[i]);
    }
    const sure = done ? this.#tops.length : keep;
    for (; this.#told < sure; this.#told++) this.#settled(this.#tops[this.#told].view.node);
  }
}

/** {node} and, of what grows long, `grow(block, done)`: whether it could become that block as it stands. */
function viewOf(block, done) {
  if (block.type === "code") return new CodeView(block, done);
  if (block.type === "table") return new TableView(block);
  return { node: renderBlock(block) };
}

/** A code block; while it is open, its text grows in place. Colours come when it is complete. */
class CodeView {
  constructor(block, done) {
    this.#info = block.info;
    this.#language = /^[\w+#.-]{1,30}/.exec(block.info)?.[0] ?? "";
    this.#text = document.createTextNode(block.text);
    this.#code = el("code", {}, this.#text);
    const name = this.#language ? `Code, ${this.#language}` : "Code";
    this.node = el(
      "figure",
      { class: "code" },
      el(
        "figcaption",
        {},
        el("span", {}, this.#language),
        copyButton(() => this.#code.textContent, "Copy the code"),
      ),
      el("pre", { tabindex: "0", role: "group", "aria-label": name }, this.#code),
    );
    if (block.closed || done) this.#finish();
  }

  #info;
  #language;
  #text; // null once highlighted
  #code;

  /** Takes more text; false where what was shown is not its beginning. */
  grow(block, done) {
    const shown = this.#text?.data;
    if (
      block.type !== "code" ||
      shown === undefined ||
      block.info !== this.#info ||
      !block.text.startsWith(shown)
    )
      return false;
    this.#text.appendData(block.text.slice(shown.length));
    if (block.closed || done) this.#finish();
    return true;
  }

  #finish() {
    const text = this.#text.data;
    this.#text = null;
    this.#code.replaceChildren(highlight(text, this.#language));
  }
}

/** A table; rows are added to it while it grows. */
class TableView {
  constructor(block) {
    this.#block = block;
    const head = block.head.map((text, i) => this.#cell("th", text, i, "col"));
    this.#body = el("tbody", {}, ...block.rows.map((row) => this.#row(row)));
    const table = el("table", {}, el("thead", {}, el("tr", {}, ...head)), this.#body);
    this.node = el("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, table);
  }

  #block;
  #body;

  grow(block) {
    const old = this.#block;
    const same =
      block.type === "table" &&
      String(block.head) === String(old.head) &&
      String(block.align) === String(old.align);
    if (!same || block.rows.length < old.rows.length) return false;
    this.#block = block;
    this.#body.lastChild?.remove(); // it may have been half a row
    for (const row of block.rows.slice(this.#body.childNodes.length)) this.#body.append(this.#row(row));
    return true;
  }

  #row(row) {
    return el("tr", {}, ...row.map((text, i) => this.#cell("td", text, i)));
  }

  #cell(tag, text, i, scope) {
    const align = this.#block.align[i];
    return el(tag, { class: align ? `to-${align}` : null, scope }, inline(text));
  }
}

function renderBlock(block) {
  switch (block.type) {
    case "heading": {
      const level = Math.min(6, block.level + 1); // the conversation's title is the page's first
      return el(`h${level}`, { class: `heading-${block.level}` }, inline(block.text));
    }
    case "code":
      return new CodeView(block, true).node;
    case "quote":
      return el("blockquote", {}, ...block.blocks.map(renderBlock));
    case "list":
      return renderList(block);
    case "table":
      return new TableView(block).node;
    case "rule":
      return el("hr");
    default:
      return el("p", {}, inline(block.text));
  }
}

function renderList(list) {
  const items = list.items.map((item) => {
    const parts = item.blocks.map((block) =>
      block.type === "paragraph" && !list.loose ? inline(block.text) : renderBlock(block),
    );
    if (item.task === null) return el("li", {}, ...parts);
    const mark = el("input", {
      type: "checkbox",
      disabled: true,
      checked: item.task,
      "aria-label": item.task ? "Done" : "To do",
    });
    return el("li", { class: "task" }, mark, el("div", {}, ...parts));
  });
  if (!list.ordered) return el("ul", {}, ...items);
  return el("ol", { start: list.start === 1 ? null : list.start }, ...items);
}

function inline(text) {
  const out = document.createDocumentFragment();
  for (const node of parseInline(text)) out.append(renderInline(node));
  return out;
}

const TAGS = { strong: "strong", emphasis: "em", strike: "del" };

function renderInline(node) {
  switch (node.type) {
    case "text":
      return document.createTextNode(node.text);
    case "break":
      return el("br");
    case "code":
      return el("code", {}, node.text);
    case "math":
      return el("code", { class: "math" }, node.text);
    case "link":
      return renderLink(node, node.children.map(renderInline), null);
    case "image":
      return renderLink(node, node.children.map(renderInline), "image");
    default:
      return el(TAGS[node.type], {}, ...node.children.map(renderInline));
  }
}

function renderLink(node, children, kind) {
  const label = kind ? [el("span", { class: "link-kind" }, `${kind} `), ...children] : children;
  const url = safeAddress(node.href);
  if (!url)
    return el("span", { title: "This page does not follow such links", class: "dead-link" }, ...label);
  const link = el(
    "a",
    { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer" },
    ...label,
  );
  // Text that reads like an address is not to hide another one.
  const said = /^\s*(?:https?:\/\/)?([\w-]+(?:\.[\w-]+)+)/i.exec(link.textContent)?.[1];
  if (said && said.toLowerCase() !== url.hostname)
    link.append(el("span", { class: "link-kind" }, ` (${url.hostname})`));
  return link;
}
