// Inline Markdown to a tree: emphasis, code, links, bare addresses, math as it stands. Raw HTML stays text.
//
// Every scan is linear in the text, because a model may write anything: searches that failed are remembered.
// Nodes: {type: "text" | "code" | "math", text}, {type: "break"},
//        {type: "strong" | "emphasis" | "strike" | "link" | "image", children | text, href}

import { resolve } from "./emphasis.js";

const ESCAPABLE = /[!-/:-@[-`{-~]/;
const BARE = /^https?:\/\/[^\s<>"`]+/i;
const ANGLED = /^<(https?:\/\/[^\s<>]*)>/i;
const ENTITY = /^&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]{2,8}));/;
const ENTITIES = {
  amp: "&",
  lt: "<",
  gt: ">",
  quot: '"',
  apos: "'",
  nbsp: "\u00a0",
  hellip: "…",
  mdash: "—",
  ndash: "–",
  times: "×",
  rarr: "→",
  larr: "←",
  copy: "©",
  deg: "°",
};
const SPECIAL = /[\\`*_~[\]!<&\n$hH]/g;
const MAX_DEPTH = 40; // of brackets in brackets; deeper ones are text

/** The nodes of one block's text. */
export function parseInline(text) {
  return new Parser(text).run();
}

class Parser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.out = []; // nodes and delimiter runs {run: "*", count, opens, closes}
    this.brackets = []; // {index in out, image}
    this.noCodeEnd = new Set(); // lengths of backtick runs that close nowhere
    this.missing = new Set(); // ends of math that come nowhere
  }

  run() {
    while (this.at < this.text.length) this.step();
    return resolve(this.out);
  }

  step() {
    const { text, at } = this;
    switch (text[at]) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "*":
      case "_":
      case "~":
        return this.delimiters();
      case "[":
        return this.open(1, false);
      case "!":
        return text[at + 1] === "[" ? this.open(2, true) : this.literal(1);
      case "]":
        return this.close();
      case "<":
        return this.angle();
      case "&":
        return this.entity();
      case "\n":
        return this.newline();
      case "$":
        return text[at + 1] === "$" ? this.math("$$", "$$") : this.literal(1);
      case "h":
      case "H":
        return this.bare();
      default:
        return this.plain();
    }
  }

  push(node) {
    const last = this.out.at(-1);
    if (node.type === "text" && last?.type === "text") last.text += node.text;
    else this.out.push(node);
  }

  literal(length) {
    this.push({ type: "text", text: this.text.slice(this.at, this.at + length) });
    this.at += length;
  }

  plain() {
    SPECIAL.lastIndex = this.at;
    const next = SPECIAL.exec(this.text);
    this.literal((next ? next.index : this.text.length) - this.at);
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "(") return this.math("\\(", "\\)");
    if (next === "[") return this.math("\\[", "\\]");
    if (next === "\n") {
      this.push({ type: "break" });
      this.at += 2;
    } else if (next !== undefined && ESCAPABLE.test(next)) {
      this.push({ type: "text", text: next });
      this.at += 2;
    } else this.literal(1);
  }

  math(start, end) {
    const from = this.at + start.length;
    const to = this.missing.has(end) ? -1 : this.text.indexOf(end, from);
    if (to < 0) {
      this.missing.add(end);
      if (start === "\\[" || start === "\\(") {
        this.push({ type: "text", text: start[1] }); // an escaped bracket after all
        this.at += 2;
      } else this.literal(start.length);
      return;
    }
    this.push({ type: "math", text: this.text.slice(this.at, to + end.length) });
    this.at = to + end.length;
  }

  code() {
    let length = 1;
    while (this.text[this.at + length] === "`") length++;
    const from = this.at + length;
    const to = this.noCodeEnd.has(length) ? -1 : this.codeEnd(from, length);
    if (to < 0) {
      this.noCodeEnd.add(length);
      return this.literal(length);
    }
    let text = this.text.slice(from, to).replace(/\n/g, " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    this.push({ type: "code", text });
    this.at = to + length;
  }

  codeEnd(from, length) {
    for (let i = this.text.indexOf("`", from); i >= 0; i = this.text.indexOf("`", i)) {
      const start = i;
      while (this.text[i] === "`") i++;
      if (i - start === length) return start;
    }
    return -1;
  }

  delimiters() {
    const { text, at } = this;
    const char = text[at];
    let count = 1;
    while (text[at + count] === char) count++;
    if (char === "~" && count !== 2) return this.literal(count);
    const before = at === 0 ? " " : text[at - 1];
    const after = text[at + count] ?? " ";
    const left = flanks(after, before);
    const right = flanks(before, after);
    const inWord = char === "_";
    this.out.push({
      run: char,
      count,
      length: count,
      opens: left && (!inWord || !right || isPunctuation(before)),
      closes: right && (!inWord || !left || isPunctuation(after)),
    });
    this.at += count;
  }

  open(length, image) {
    if (this.brackets.length < MAX_DEPTH) this.brackets.push({ index: this.out.length, image });
    this.out.push({ type: "text", text: this.text.slice(this.at, this.at + length) });
    this.at += length;
    this.out.push({ type: "text", text: "" }); // so that what follows is not merged into the bracket
  }

  close() {
    const bracket = this.brackets.pop();
    const target = bracket && linkTarget(this.text, this.at + 1);
    if (!target) return this.literal(1);
    const children = withoutLinks(resolve(this.out.splice(bracket.index).slice(1)));
    // Links do not stand in links: brackets further out are text.
    if (!bracket.image) this.brackets = this.brackets.filter((b) => b.image);
    this.out.push({ type: bracket.image ? "image" : "link", href: target.href, children });
    this.at = target.end;
  }

  angle() {
    const rest = this.text.slice(this.at, this.at + 2048);
    const line = /^<br\s*\/?>/i.exec(rest);
    const address = line ? null : ANGLED.exec(rest);
    if (line) this.push({ type: "break" });
    else if (address) {
      this.push({ type: "link", href: address[1], children: [{ type: "text", text: address[1] }] });
    } else return this.literal(1);
    this.at += (line ?? address)[0].length;
  }

  bare() {
    const before = this.at === 0 ? " " : this.text[this.at - 1];
    const match = /[\p{L}\p{N}]/u.test(before) ? null : BARE.exec(this.text.slice(this.at, this.at + 2048));
    if (!match) return this.literal(1);
    const found = this.brackets.length ? match[0].split("]", 1)[0] : match[0];
    let href = found.replace(/[.,:;!?'"*_~\]]+$/, "");
    while (href.endsWith(")") && href.split(")").length > href.split("(").length) href = href.slice(0, -1);
    this.push({ type: "link", href, children: [{ type: "text", text: href }] });
    this.at += href.length;
  }

  entity() {
    const match = ENTITY.exec(this.text.slice(this.at, this.at + 12));
    const code = match && (match[1] ? parseInt(match[1], 10) : match[2] ? parseInt(match[2], 16) : null);
    const valid = code !== null && code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
    const named = match?.[3] && Object.hasOwn(ENTITIES, match[3]) ? ENTITIES[match[3]] : null;
    const text = valid ? String.fromCodePoint(code) : named;
    if (text === null) return this.literal(1);
    this.push({ type: "text", text });
    this.at += match[0].length;
  }

  newline() {
    const last = this.out.at(-1);
    const hard = last?.type === "text" && last.text.endsWith("  ");
    if (last?.type === "text") last.text = last.text.trimEnd();
    this.push(hard ? { type: "break" } : { type: "text", text: "\n" });
    this.at++;
    while (this.text[this.at] === " ") this.at++;
  }
}

/** Links do not stand in links: what looks like one within a link's text is its text. */
function withoutLinks(nodes) {
  return nodes.flatMap((node) => {
    if (!node.children) return [node];
    const children = withoutLinks(node.children);
    return node.type === "link" ? children : [{ ...node, children }];
  });
}

/** Whether a run of delimiters leans on `near`, with `far` on its other side (CommonMark's flanking rule). */
function flanks(near, far) {
  if (/\s/.test(near)) return false;
  return !isPunctuation(near) || /\s/.test(far) || isPunctuation(far);
}

function isPunctuation(char) {
  return /[\p{P}\p{S}]/u.test(char);
}

/** `(address "title")` at a position: {href, end}, or null. */
function linkTarget(text, from) {
  if (text[from] !== "(") return null;
  const match =
    /^\(\s{0,3}(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s{1,3}(?:"[^"]*"|'[^']*'))?\s{0,3}\)/.exec(
      text.slice(from, from + 4096),
    );
  if (!match) return null;
  return { href: (match[1] ?? match[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1"), end: from + match[0].length };
}
