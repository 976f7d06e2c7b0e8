// Runs of *, _ and ~ in a list of inline nodes become emphasis, by CommonMark's algorithm: a stack of open runs.
//
// A run: {run: "*", count, length, opens, closes} with `count` what is left of its `length` characters.

const MAX_OPEN = 100; // runs at a time; more are text

/** Delimiter runs become emphasis (CommonMark's algorithm), what is left of them text. */
export function resolve(items) {
  const stack = [{ children: [], run: null }]; // open runs: {run, opener, children}
  const open = { "*": 0, _: 0, "~": 0 }; // how many of each are on the stack
  for (const item of items) {
    if (item.run) closeRuns(stack, item, open);
    else append(stack.at(-1).children, item);
    if (item.run && item.count > 0) {
      if (item.opens && stack.length < MAX_OPEN) {
        stack.push({ run: item.run, opener: item, children: [] });
        open[item.run]++;
      } else append(stack.at(-1).children, { type: "text", text: item.run.repeat(item.count) });
    }
  }
  while (stack.length > 1) unwind(stack, open);
  return stack[0].children;
}

function closeRuns(stack, item, open) {
  while (item.closes && item.count > 0 && open[item.run] > 0) {
    let i = stack.length - 1;
    while (i > 0 && !matches(stack[i].opener, item)) i--;
    if (i === 0) return;
    while (stack.length - 1 > i) unwind(stack, open);
    const level = stack.pop();
    const used = Math.min(2, level.opener.count, item.count);
    const type = item.run === "~" ? "strike" : used === 2 ? "strong" : "emphasis";
    const node = { type, children: level.children };
    level.opener.count -= used;
    item.count -= used;
    if (level.opener.count > 0) stack.push({ run: level.run, opener: level.opener, children: [node] });
    else {
      open[level.run]--;
      append(stack.at(-1).children, node);
    }
  }
}

function matches(opener, closer) {
  if (opener.run !== closer.run || opener.count === 0) return false;
  // "A run that can both open and close does not match where the lengths add up to a multiple of three."
  const both = opener.closes || closer.opens;
  return !(both && (opener.length + closer.length) % 3 === 0 && (opener.length % 3 || closer.length % 3));
}

/** The innermost open run was none: its characters are text. */
function unwind(stack, open) {
  const level = stack.pop();
  open[level.run]--;
  const into = stack.at(-1).children;
  append(into, { type: "text", text: level.run.repeat(level.opener.count) });
  for (const child of level.children) append(into, child);
}

function append(list, node) {
  const last = list.at(-1);
  if (node.type === "text" && node.text === "") return;
  if (node.type === "text" && last?.type === "text") last.text += node.text;
  else list.push(node);
}
