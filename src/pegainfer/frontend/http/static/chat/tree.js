// A conversation is a tree of messages: editing or asking again adds a sibling, nothing is overwritten.
//
//   {id, title, created, updated, settings, nodes: {root: {id: "root", parent: null, children, chosen}, …}}
//
// A node: {id, parent, children: [id], chosen: id | null, role, content, created} and, of an assistant,
// {reasoning, calls: [{id, name, arguments}], figures, finish, error, model}, of a tool's result {callId,
// name}. `chosen` is the child on the path that is shown. These functions change nothing but what they say.

import { newId } from "../lib/dom.js";

export const ROOT = "root";

export function newConversation(settings) {
  const now = Date.now();
  const root = { id: ROOT, parent: null, children: [], chosen: null };
  return {
    id: newId(),
    title: "",
    created: now,
    updated: now,
    settings: { ...settings },
    nodes: { [ROOT]: root },
  };
}

/** Adds a child and shows it. Changes the conversation; returns the node. */
export function addNode(conversation, parentId, fields) {
  const parent = conversation.nodes[parentId];
  const node = { id: newId(), parent: parentId, children: [], chosen: null, created: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  parent.children.push(node.id);
  parent.chosen = node.id;
  conversation.updated = node.created;
  return node;
}

/** The shown messages, first to last. */
export function shownPath(conversation) {
  const path = [];
  let node = conversation.nodes[conversation.nodes[ROOT].chosen];
  while (node) {
    path.push(node);
    node = conversation.nodes[node.chosen];
  }
  return path;
}

/** The messages up to and including a node. */
export function pathTo(conversation, id) {
  const path = [];
  for (let node = conversation.nodes[id]; node.id !== ROOT; node = conversation.nodes[node.parent])
    path.push(node);
  return path.reverse();
}

/** The id under which the next message goes. */
export function leafId(conversation) {
  return shownPath(conversation).at(-1)?.id ?? ROOT;
}

/** {ids, index} of a node among its parent's children. */
export function siblings(conversation, node) {
  const ids = conversation.nodes[node.parent].children;
  return { ids, index: ids.indexOf(node.id) };
}

/** Shows the sibling `step` places on. Changes the conversation; returns the sibling, or null at the end. */
export function step(conversation, node, by) {
  const { ids, index } = siblings(conversation, node);
  const id = ids[index + by];
  if (id === undefined) return null;
  conversation.nodes[node.parent].chosen = id;
  return conversation.nodes[id];
}

/** What the API gets: the system prompt and the messages up to a node. */
export function toMessages(conversation, id) {
  const system = conversation.settings.system?.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  return messages.concat(pathTo(conversation, id).map(toMessage));
}

function toMessage(node) {
  if (node.role === "tool") return { role: "tool", content: node.content, tool_call_id: node.callId };
  const message = { role: node.role, content: node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.calls?.length) {
    message.tool_calls = node.calls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
  }
  return message;
}

/** A title from what was asked first: one line, at most 60 characters. */
export function titleOf(text) {
  const line = text
    .trim()
    .split("\n", 1)[0]
    .replace(/\s+/g, " ")
    .replace(/^[#>*\-\s]+/, "");
  const letters = Array.from(line);
  return letters.length <= 60 ? line : letters.slice(0, 59).join("") + "…";
}
