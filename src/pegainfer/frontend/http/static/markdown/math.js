// Formulas in Markdown: \(…\) and $…$ in a line, \[…\] and $$…$$ displayed, in a line or as a block.

const LONGEST = 10_000; // characters of a formula
const INLINE = [
  { open: "\\(", close: "\\)", display: false },
  { open: "\\[", close: "\\]", display: true },
  { open: "$$", close: "$$", display: true },
  { open: "$", close: "$", display: false },
];
const BLOCK = INLINE.filter(({ display }) => display);

/** Makes `markdown` (a markdown-it parser) recognise formulas: elements of the class "math" with the source. */
export function addMath(markdown) {
  // Before "escape", which takes the backslash of \( for itself.
  markdown.inline.ruler.before("escape", "math", inline);
  markdown.block.ruler.before("fence", "math_block", block, {
    alt: ["paragraph", "blockquote", "list"],
  });
  const { escapeHtml } = markdown.utils;
  markdown.renderer.rules.math = (tokens, i) => {
    const { content, meta } = tokens[i];
    return `<code class="math${meta.display ? " display" : ""}">${escapeHtml(content)}</code>`;
  };
  markdown.renderer.rules.math_block = (tokens, i) =>
    `<div class="formula"><code class="math display">${escapeHtml(tokens[i].content)}</code></div>`;
}

/** The formula that an element of the class "math" holds, without its delimiters. */
export function formula(source) {
  const { open, close } = INLINE.find(({ open }) => source.startsWith(open));
  return source.slice(open.length, -close.length);
}

function inline(state, silent) {
  const { src, pos } = state;
  const form = INLINE.find(({ open }) => src.startsWith(open, pos));
  if (!form) return false;
  const start = pos + form.open.length;
  const end = src.slice(start, start + LONGEST).indexOf(form.close) + start;
  if (end <= start) return false;
  // As in pandoc, so that sums of money are not formulas.
  if (form.open === "$" && (/^\s/.test(src[start]) || /\s$/.test(src[end - 1]) || /^\d/.test(src[end + 1] ?? "")))
    return false;
  if (!silent) {
    const token = state.push("math", "code", 0);
    token.content = src.slice(pos, end + form.close.length);
    token.meta = form;
  }
  state.pos = end + form.close.length;
  return true;
}

/** A displayed formula of whole lines. An empty line before its end makes it text, which reads as it stands. */
function block(state, first, last, silent) {
  if (state.sCount[first] - state.blkIndent >= 4) return false;
  const lineOf = (line) =>
    state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]).trimEnd();
  const head = lineOf(first);
  const form = BLOCK.find(({ open }) => head.startsWith(open));
  if (!form) return false;
  let line = first;
  let text = head.slice(form.open.length);
  while (!text.endsWith(form.close)) {
    if (text.includes(form.close)) return false; // text follows: a formula in a line
    line++;
    if (line >= last || state.isEmpty(line) || state.sCount[line] < state.blkIndent) return false;
    text = lineOf(line);
  }
  if (silent) return true;
  const token = state.push("math_block", "div", 0);
  token.content = state.getLines(first, line + 1, state.blkIndent, false).trim();
  token.map = [first, line + 1];
  token.block = true;
  state.line = line + 1;
  return true;
}
