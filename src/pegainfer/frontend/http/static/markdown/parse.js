// Markdown to HTML, by markdown-it, with this page's rules. The HTML still has to be sanitised.

import "../vendor/markdown-it.min.js";
import { addMath } from "./math.js";

/** The absolute http(s) address, or null for anything else. */
export function safeAddress(href) {
  try {
    const url = new URL(href);
    return url.protocol === "http:" || url.protocol === "https:" ? url : null;
  } catch {
    return null;
  }
}

// Without definitions of links and without indented code, a top-level block does not depend on what stands
// before it. HTML is text.
const markdown = globalThis.markdownit({ html: false, linkify: true }).disable(["reference", "code"]);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
markdown.validateLink = (href) => safeAddress(href) !== null;
markdown.inline.ruler.before("html_inline", "line_break", lineBreak);
addMath(markdown);

/** The top-level blocks of `text`: [{line, tokens}], `line` being the number of the first line, from 0. */
export function parseBlocks(text) {
  const blocks = [];
  for (const token of markdown.parse(text, {})) {
    if (token.level === 0 && token.nesting >= 0) blocks.push({ line: token.map[0], tokens: [] });
    blocks.at(-1).tokens.push(token);
  }
  return blocks;
}

/** The HTML of blocks: one element each. */
export function renderBlocks(blocks) {
  return blocks.map(({ tokens }) => markdown.renderer.render(tokens, markdown.options, {})).join("");
}

/** <br>, which models write in the cells of tables. */
function lineBreak(state, silent) {
  const tag = /^<br\s{0,3}\/?>/i.exec(state.src.slice(state.pos, state.pos + 9));
  if (!tag) return false;
  if (!silent) state.push("hardbreak", "br", 0);
  state.pos += tag[0].length;
  return true;
}

const { escapeHtml, unescapeAll } = markdown.utils;
const { rules } = markdown.renderer;

// The conversation's title is the page's first heading.
rules.heading_open = (tokens, i) => {
  const level = Number(tokens[i].tag.slice(1));
  return `<h${Math.min(6, level + 1)} class="heading-${level}">`;
};
rules.heading_close = (tokens, i) => `</h${Math.min(6, Number(tokens[i].tag.slice(1)) + 1)}>`;

rules.fence = (tokens, i) => {
  const language = /^[\w+#.-]{1,30}/.exec(unescapeAll(tokens[i].info).trim())?.[0] ?? "";
  const name = language ? `Code, ${language}` : "Code";
  return (
    `<figure class="code"><figcaption><span>${escapeHtml(language)}</span></figcaption>` +
    `<pre tabindex="0" role="group" aria-label="${escapeHtml(name)}">` +
    `<code>${escapeHtml(tokens[i].content.replace(/\n$/, ""))}</code></pre></figure>`
  );
};

rules.table_open = () => '<div class="table" tabindex="0" role="group" aria-label="Table"><table>';
rules.table_close = () => "</table></div>";
rules.th_open = rules.td_open = (tokens, i) => {
  const align = /text-align:(\w+)/.exec(tokens[i].attrGet("style") ?? "")?.[1];
  const scope = tokens[i].tag === "th" ? ' scope="col"' : "";
  return `<${tokens[i].tag}${align ? ` class="to-${align}"` : ""}${scope}>`;
};

// An image is linked, not loaded: an address could carry away what was said.
rules.image = (tokens, i, options, env, renderer) =>
  `<a${renderer.renderAttrs({ attrs: [["href", tokens[i].attrGet("src")]] })}>` +
  '<span class="link-kind">image </span>' +
  `${escapeHtml(renderer.renderInlineAsText(tokens[i].children, options, env))}</a>`;
