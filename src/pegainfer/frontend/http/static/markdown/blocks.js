// Markdown's blocks. The subset that models write: headings, paragraphs, fenced code, quotes, lists (nested,
// with tasks), tables, rules. Indented code, HTML and link definitions are paragraphs: their text is shown.
// Expressions are such that none takes more than linear time on any line: a model may write anything.
//
// A block: {type, line} with `line` the index of its first line, and by type
//   heading {level, text}, paragraph {text}, code {info, text, closed}, quote {blocks}, rule,
//   list {ordered, start, loose, items: [{task: null | boolean, blocks}]}, table {align, head, rows}

const MAX_DEPTH = 20; // of quotes and lists in each other; deeper ones are paragraphs
const MAX_COLUMNS = 64;

const BLANK = /^\s*$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const FENCE = /^( {0,3})(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const QUOTE = /^ {0,3}>[ ]?/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])( +|$)/;
const NESTED_ITEM = /^ {2,}(?:[-*+]|\d{1,9}[.)]) /; // models indent sublists by two, whatever the marker
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const DELIMITERS = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/; // of a trimmed line
const TASK = /^\[([ xX])\][ \t]+/;

/** The blocks of some lines. */
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let i = 0;
  while (i < lines.length) {
    if (BLANK.test(lines[i])) {
      i++;
      continue;
    }
    const [block, next] = readBlock(lines, i, depth);
    block.line = i;
    blocks.push(block);
    i = next;
  }
  return blocks;
}

/** [block, the line after it]. */
function readBlock(lines, i, depth) {
  const line = lines[i];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, i, fence);
  const heading = HEADING.exec(line);
  if (heading)
    return [{ type: "heading", level: heading[1].length, text: headingText(line, heading) }, i + 1];
  if (RULE.test(line)) return [{ type: "rule" }, i + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return readQuote(lines, i, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return readList(lines, i, depth);
  if (startsTable(lines, i)) return readTable(lines, i);
  return readParagraph(lines, i);
}

function headingText(line, heading) {
  const text = line.slice(heading[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || text[end - 1] === " " || text[end - 1] === "\t" ? text.slice(0, end).trimEnd() : text;
}

function readCode(lines, i, fence) {
  const [, indent, ticks, tickInfo, tildes, tildeInfo] = fence;
  const mark = ticks ?? tildes;
  const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \\t]*$`);
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const content = [];
  let closed = false;
  for (i++; i < lines.length && !closed; i++) {
    closed = end.test(lines[i]);
    if (!closed) content.push(indent ? lines[i].replace(strip, "") : lines[i]);
  }
  return [{ type: "code", info: (tickInfo ?? tildeInfo).trim(), text: content.join("\n"), closed }, i];
}

function readQuote(lines, i, depth) {
  const inner = [];
  for (; i < lines.length; i++) {
    const quoted = QUOTE.test(lines[i]);
    // A paragraph in a quote goes on without its mark.
    if (!quoted && (BLANK.test(lines[i]) || BLANK.test(inner.at(-1)) || interrupts(lines, i))) break;
    inner.push(quoted ? lines[i].replace(QUOTE, "") : lines[i]);
  }
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, i];
}

function readList(lines, i, depth) {
  const kind = kindOf(ITEM.exec(lines[i]));
  const list = {
    type: "list",
    ordered: kind !== "-" && kind !== "*" && kind !== "+",
    start: 1,
    loose: false,
    items: [],
  };
  if (list.ordered) list.start = Number(ITEM.exec(lines[i])[3]);
  let blankBefore = false;
  while (i < lines.length) {
    const marker = ITEM.exec(lines[i]);
    if (!marker || kindOf(marker) !== kind || RULE.test(lines[i])) break;
    if (blankBefore) list.loose = true;
    const [inner, next] = itemLines(lines, i, marker);
    i = next;
    const trailing = inner.length - inner.findLastIndex((line) => !BLANK.test(line)) - 1;
    inner.length -= trailing;
    blankBefore = trailing > 0;
    const task = TASK.exec(inner[0] ?? "");
    if (task) inner[0] = inner[0].slice(task[0].length);
    const blocks = parseBlocks(inner, depth + 1);
    if (blocks.some((block, k) => k > 0 && block.type === "paragraph")) list.loose = true;
    list.items.push({ task: task ? task[1] !== " " : null, blocks });
  }
  return [list, i];
}

function kindOf(marker) {
  return marker[2].at(-1); // "-", "*", "+", "." or ")"
}

/** [an item's lines without marker and indentation, the line after them]. */
function itemLines(lines, i, marker) {
  const [whole, before, mark, , space] = marker;
  const indent = before.length + mark.length + (space.length > 4 || space === "" ? 1 : space.length);
  const inner = [lines[i].slice(Math.min(indent, whole.length))];
  const strip = new RegExp(`^ {0,${indent}}`);
  const belongs = new RegExp(`^ {${indent}}`);
  for (i++; i < lines.length; i++) {
    const line = lines[i];
    if (!BLANK.test(line) && !belongs.test(line) && !NESTED_ITEM.test(line)) {
      // A paragraph goes on without indentation, but not after a blank line.
      if (BLANK.test(inner.at(-1)) || ITEM.test(line) || interrupts(lines, i)) break;
    }
    inner.push(line.replace(strip, ""));
  }
  return [inner, i];
}

function startsTable(lines, i) {
  const next = lines[i + 1];
  if (next === undefined || !lines[i].includes("|") || !DELIMITERS.test(next.trim())) return false;
  const columns = cells(lines[i]).length;
  return columns <= MAX_COLUMNS && columns === cells(next).length;
}

function readTable(lines, i) {
  const head = cells(lines[i]);
  const align = cells(lines[i + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return left && right ? "center" : right ? "right" : left ? "left" : null;
  });
  const rows = [];
  for (i += 2; i < lines.length && !BLANK.test(lines[i]) && !interrupts(lines, i); i++) {
    const row = cells(lines[i]).slice(0, head.length);
    while (row.length < head.length) row.push("");
    rows.push(row);
  }
  return [{ type: "table", align, head, rows }, i];
}

function cells(line) {
  const trimmed = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(^|[^\\])\|$/, "$1");
  const out = [""];
  for (let k = 0; k < trimmed.length; k++) {
    if (trimmed[k] === "\\" && trimmed[k + 1] === "|") out[out.length - 1] += trimmed[++k];
    else if (trimmed[k] === "|") out.push("");
    else out[out.length - 1] += trimmed[k];
  }
  return out.map((cell) => cell.trim());
}

function readParagraph(lines, i) {
  const text = [lines[i].trimStart()];
  for (i++; i < lines.length && !BLANK.test(lines[i]); i++) {
    const underline = UNDERLINE.exec(lines[i]);
    if (underline) {
      return [
        { type: "heading", level: underline[1][0] === "=" ? 1 : 2, text: text.join("\n").trim() },
        i + 1,
      ];
    }
    if (interrupts(lines, i)) break;
    text.push(lines[i].trimStart());
  }
  return [{ type: "paragraph", text: text.join("\n").trimEnd() }, i];
}

/** Whether a line ends the paragraph before it. Of numbers only 1 does: a line may begin with "2024.". */
function interrupts(lines, i) {
  const line = lines[i];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item && item[4] !== "" && (item[3] === undefined || Number(item[3]) === 1)) return true;
  return startsTable(lines, i);
}
