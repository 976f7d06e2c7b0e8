// Conversations as files: JSON that can be read back, Markdown for people.

import { newId } from "../lib/dom.js";
import { ROOT, shownPath } from "./tree.js";

const FORMAT = "pegainfer-conversations";
const VERSION = 1;
const ROLES = new Set(["user", "assistant", "tool"]);
const MAX_NODES = 100_000;

export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 2);
}

/** The branch that is shown. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.settings.system) parts.push("## System", conversation.settings.system);
  for (const node of shownPath(conversation)) {
    parts.push(`## ${{ user: "User", assistant: "Assistant", tool: `Result of ${node.name}` }[node.role]}`);
    if (node.reasoning) parts.push(node.reasoning.trim().replace(/^/gm, "> "));
    if (node.content) parts.push(node.role === "tool" ? fenced(node.content, "") : node.content);
    for (const call of node.calls ?? [])
      parts.push(`Calls \`${call.name}\`:`, fenced(call.arguments, "json"));
  }
  return parts.join("\n\n") + "\n";
}

function fenced(text, language) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** A file's name from a title. */
export function fileName(title, ending) {
  const stem = title
    .toLowerCase()
    .replace(/[^\p{L}\p{N}]+/gu, "-")
    .replace(/^-|-$/g, "")
    .slice(0, 60);
  return `${stem || "conversation"}.${ending}`;
}

/**
 * Conversations from a file's text, each with a new id, only the known fields, and a tree that holds together.
 * Throws Error with what is wrong and where.
 */
export function fromJson(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("Expected a JSON file that this page exported; this is no JSON.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error(`Expected "format": "${FORMAT}" and a list of conversations.`);
  }
  if (file.version !== VERSION) throw new Error(`Expected version ${VERSION}, got ${file.version}.`);
  return file.conversations.map((c, i) => readConversation(c, `conversations[${i}]`));
}

function readConversation(c, where) {
  expect(
    isObject(c) && isObject(c.nodes) && isObject(c.nodes[ROOT]),
    where,
    "a conversation with nodes and a root",
  );
  const count = Object.keys(c.nodes).length;
  expect(count <= MAX_NODES, where, `at most ${MAX_NODES} messages`);
  const nodes = {};
  const stack = [ROOT]; // from the root down, so that what is no tree shows as a node met twice
  while (stack.length) {
    const id = stack.pop();
    const raw = Object.hasOwn(c.nodes, id) ? c.nodes[id] : null;
    expect(
      isObject(raw) && !Object.hasOwn(nodes, id),
      `${where}.nodes.${id}`,
      "one message that is there once",
    );
    const node = readNode(raw, id, `${where}.nodes.${id}`);
    for (const child of node.children) {
      expect(c.nodes[child]?.parent === id, `${where}.nodes.${child}`, `parent ${id}`);
      stack.push(child);
    }
    nodes[id] = node;
  }
  return {
    id: newId(),
    title: text(c.title).slice(0, 200),
    created: number(c.created) ?? Date.now(),
    updated: Date.now(),
    settings: isObject(c.settings) ? readSettings(c.settings) : {},
    nodes,
  };
}

function readNode(raw, id, where) {
  const children = Array.isArray(raw.children) ? raw.children : [];
  expect(
    children.every((child) => typeof child === "string" && child !== "__proto__"),
    where,
    "ids of messages as children",
  );
  const chosen = children.includes(raw.chosen) ? raw.chosen : (children[0] ?? null);
  const node = { id, parent: id === ROOT ? null : raw.parent, children, chosen };
  if (id === ROOT) return node;
  expect(ROLES.has(raw.role), where, `a role among ${[...ROLES].join(", ")}`);
  Object.assign(node, {
    role: raw.role,
    content: text(raw.content),
    created: number(raw.created) ?? Date.now(),
  });
  for (const name of ["reasoning", "finish", "model", "callId", "name"]) {
    if (typeof raw[name] === "string") node[name] = raw[name];
  }
  if (Array.isArray(raw.calls)) {
    node.calls = raw.calls.filter(isObject).map((call) => ({
      id: text(call.id),
      name: text(call.name),
      arguments: text(call.arguments),
    }));
  }
  if (isObject(raw.figures)) {
    node.figures = {};
    for (const [name, value] of Object.entries(raw.figures)) {
      if (/^[a-zA-Z]{1,40}$/.test(name) && number(value) !== null) node.figures[name] = value;
    }
  }
  return node;
}

function readSettings(raw) {
  const settings = {};
  for (const [name, value] of Object.entries(raw)) {
    if (/^[a-z_]{1,40}$/.test(name) && ["string", "number"].includes(typeof value)) settings[name] = value;
  }
  return settings;
}

function expect(condition, where, what) {
  if (!condition) throw new Error(`${where}: expected ${what}.`);
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function text(value) {
  return typeof value === "string" ? value : "";
}

function number(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}
