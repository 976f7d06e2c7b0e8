// Markdown as DOM nodes, brought up to date block by block while a model writes.
//
// markdown-it makes HTML of it, DOMPurify nodes of that HTML. Links lead to http and https and nowhere else;
// images are not loaded but linked. Formulas and colours of code come from libraries that load when needed.

import "../vendor/purify.min.js";
import { copyButton, el } from "../lib/dom.js";
import { formula } from "./math.js";
import { parseBlocks, renderBlocks, safeAddress } from "./parse.js";

const LONGEST_COLOURED = 100_000; // characters; longer code is shown plain
const SANITISING = {
  USE_PROFILES: { html: true },
  FORBID_TAGS: ["style", "img", "form", "input", "button"],
  FORBID_ATTR: ["style", "id", "name"],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const libraries = {}; // name → module, once loaded
const loading = {};

/** Loads a library of vendor/ and resolves when it is in `libraries`. */
function load(name) {
  loading[name] ??= import(`../vendor/${name}.min.js`).then((module) => (libraries[name] = module.default));
  return loading[name];
}

export class MarkdownView {
  /** `settled(node)` is called once for each block that will not change any more. */
  constructor({ settled = () => {} } = {}) {
    this.node = el("div", { class: "markdown" });
    this.#settled = settled;
  }

  #settled;
  #text = "";
  #done = false;
  #tops = []; // {start, node}: the top-level blocks and where their source begins
  #told = 0; // so many of them were reported settled

  /**
   * Shows `text`, which usually has grown. All but its last block stay as they are: a block starts without
   * regard to what stands before it, so only the last one can change. A block that began with the line which
   * was still being written, or the one above it (a table's head), does not count: it may yet turn out to
   * belong to the block before.
   */
  update(text, { done = false } = {}) {
    if (text === this.#text && done === this.#done) return;
    if (!text.startsWith(this.#text)) this.#tops.length = 0;
    const written = this.#text.lastIndexOf("\n");
    const unsure = written < 0 ? 0 : this.#text.lastIndexOf("\n", written - 1) + 1;
    const keep = Math.max(
      0,
      this.#tops.findLastIndex((top) => top.start < unsure),
    );
    this.#text = text;
    this.#done = done;
    this.#replace(keep, this.#render(this.#tops[keep]?.start ?? 0));
    this.#told = Math.min(this.#told, keep);
    const sure = done ? this.#tops.length : keep;
    for (; this.#told < sure; this.#told++) {
      const { node } = this.#tops[this.#told];
      colour(node);
      this.#settled(node);
    }
  }

  /** The blocks of the text from `from` on: [{start, node}]. */
  #render(from) {
    const text = this.#text.slice(from);
    const starts = [from];
    for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(from + at + 1);
    const blocks = parseBlocks(text);
    const root = complete(sanitised(renderBlocks(blocks)));
    if (!typeset(root)) load("temml").then(() => typeset(this.node));
    return Array.from(root.children, (node, i) => ({ start: starts[blocks[i].line], node }));
  }

  /** Puts `tops` in place of all blocks from `keep` on. */
  #replace(keep, tops) {
    const old = this.#tops.splice(keep);
    const nodes = this.node.childNodes;
    while (nodes.length > keep + tops.length) this.node.lastChild.remove();
    tops.forEach((top, i) => {
      const present = nodes[keep + i];
      if (i === 0 && old[0]?.start === top.start) top.node = brought(old[0].node, top.node);
      else if (present) present.replaceWith(top.node);
      else this.node.append(top.node);
      this.#tops.push(top);
    });
  }
}

function sanitised(html) {
  return globalThis.DOMPurify.sanitize(html, SANITISING);
}

/** Adds what Markdown does not say: buttons, tasks, where links lead. */
function complete(root) {
  for (const caption of root.querySelectorAll("figure.code > figcaption")) {
    const code = () => caption.parentNode.querySelector("code").textContent;
    caption.append(copyButton(code, "Copy the code"));
  }
  root.querySelectorAll("li").forEach(completeTask);
  root.querySelectorAll("a").forEach(completeLink);
  return root;
}

/** An item that begins with [ ] or [x]. */
function completeTask(item) {
  const text = item.firstChild?.nodeName === "P" ? item.firstChild.firstChild : item.firstChild;
  const mark = text?.nodeType === Node.TEXT_NODE && /^\s*\[([ xX])\]\s/.exec(text.data);
  if (!mark) return;
  text.deleteData(0, mark[0].length);
  const checked = mark[1] !== " ";
  const box = el("input", {
    type: "checkbox",
    disabled: true,
    checked,
    "aria-label": checked ? "Done" : "To do",
  });
  const rest = el("div", {}, ...item.childNodes);
  item.classList.add("task");
  item.replaceChildren(box, rest);
}

function completeLink(link) {
  const url = safeAddress(link.getAttribute("href"));
  if (!url) {
    link.replaceWith(...link.childNodes);
    return;
  }
  link.href = link.title = url.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  // Text that reads like an address is not to hide another one.
  const said = /^\s*(?:https?:\/\/)?([\w-]+(?:\.[\w-]+)+)/i.exec(link.textContent)?.[1];
  if (said && said.toLowerCase() !== url.hostname)
    link.append(el("span", { class: "link-kind" }, ` (${url.hostname})`));
}

/**
 * Sets the formulas in `root` as MathML. Those that cannot be read stay as they were written. Returns false
 * where the library is needed and not there yet.
 */
function typeset(root) {
  const sources = root.querySelectorAll("code.math:not(.unreadable)");
  if (sources.length > 0 && !libraries.temml) return false;
  for (const source of sources) {
    const set = el("span", { class: "math" });
    const options = { displayMode: source.classList.contains("display"), throwOnError: true };
    try {
      libraries.temml.render(formula(source.textContent), set, options);
      source.replaceWith(set);
    } catch {
      source.classList.add("unreadable");
    }
  }
  return true;
}

/** Colours the code in a complete block, where its language is known. */
async function colour(node) {
  for (const figure of node.matches("figure.code") ? [node] : node.querySelectorAll("figure.code")) {
    const language = figure.querySelector("figcaption span").textContent;
    const code = figure.querySelector("code");
    const text = code.textContent;
    if (!language || text.length > LONGEST_COLOURED) continue;
    const highlighter = libraries.highlight ?? (await load("highlight"));
    if (!highlighter.getLanguage(language) || code.textContent !== text) continue;
    code.replaceChildren(sanitised(highlighter.highlight(text, { language, ignoreIllegals: true }).value));
  }
}

/**
 * Makes `old` equal to `fresh` with as few changes as possible, so that what the user selected, focused or
 * scrolled stays. Returns the node that now stands in the place of `old`.
 */
function brought(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE && fresh.nodeType === Node.TEXT_NODE) {
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.data.length));
    else old.data = fresh.data;
    return old;
  }
  if (!old.cloneNode(false).isEqualNode(fresh.cloneNode(false))) {
    old.replaceWith(fresh);
    return fresh;
  }
  const children = [...fresh.childNodes];
  while (old.childNodes.length > children.length) old.lastChild.remove();
  children.forEach((child, i) => {
    if (i < old.childNodes.length) brought(old.childNodes[i], child);
    else old.append(child);
  });
  return old;
}
