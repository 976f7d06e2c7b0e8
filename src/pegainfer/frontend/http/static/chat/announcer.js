// What a screen reader is told of an answer: each block once, when it is complete, and how the answer ended.

import { byId, el } from "../lib/dom.js";

const KEPT = 20; // lines; older ones have been read

export function announce(text) {
  const log = byId("announcer");
  log.append(el("p", {}, text));
  while (log.childNodes.length > KEPT) log.firstChild.remove();
}

/** One block of an answer. Code and tables are named, not read out. */
export function announceBlock(node) {
  if (node.matches("figure.code")) {
    const lines = node.querySelector("code").textContent.split("\n").length;
    announce(`Code block, ${lines} ${lines === 1 ? "line" : "lines"}.`);
  } else if (node.matches(".table")) {
    announce(`Table, ${node.querySelectorAll("tbody tr").length} rows.`);
  } else announce(node.textContent);
}
