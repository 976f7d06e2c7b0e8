// The chat page: wires the session to what is seen.

import { models, remedy } from "../lib/api.js";
import { themeButton } from "../lib/appearance.js";
import { openDialog } from "../lib/dialog.js";
import { byId, download, el, icon } from "../lib/dom.js";
import { Composer } from "./composer.js";
import { count } from "./figures.js";
import { Follower } from "./follow.js";
import { Session } from "./session.js";
import { editSettings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { Transcript } from "./transcript.js";
import { fileName, fromJson, toJson, toMarkdown } from "./transfer.js";
import { ROOT, shownPath } from "./tree.js";

const STARTERS = [
  "Explain how a prefix cache makes the first token come sooner.",
  "Write a Python function that merges overlapping intervals.",
  "Compare TCP and UDP in a small table.",
];

let begin;
const begun = new Promise((resolve) => (begin = resolve)); // a conversation is there
// Before anything is waited for: one may have written and pressed Enter by then.
const composer = new Composer({
  send: async (text) => {
    await begun;
    session.send(text);
    follower.toEnd();
  },
  stop: () => session.stop(),
  editLast: () => begun.then(() => transcript.editLast()),
  unreadable: (text) => notice("attach", text),
});
const store = await Store.open();
const rooms = new Map(); // model → tokens that it can hold
const follower = new Follower(byId("scroller"), byId("transcript"), byId("to-end"));
const session = new Session(store, {
  model: () => byId("model").value || undefined,
  shown: showConversation,
  grew: () => transcript.grew(),
  finished: () => {
    transcript.finish();
    composer.busy = false;
    showContext();
  },
  listed: listConversations,
  unsaved: (error) =>
    notice("store", `This browser did not keep the conversation: ${error.message} Export it.`),
});
const transcript = new Transcript(byId("transcript"), messageActions(), follower);
const sidebar = new Sidebar({
  open: async (id) => {
    await session.open(id);
    follower.toEnd();
    sidebar.toggle(false);
  },
  rename: (id, title) => session.change(id, { title }).then(showTitle),
  remove: (id) => session.remove(id),
  search: listConversations,
});

wireButtons();
if (!store.keeps)
  notice(
    "store",
    "This browser keeps nothing for this page: conversations end with it. Export what you need.",
  );
if (!(await session.open(location.hash.slice(1)))) session.start();
begin();
await listConversations();
await listModels();

function messageActions() {
  return {
    edit: (node, text) => {
      session.edit(node, text);
      if (node.role === "user") {
        follower.toEnd();
        composer.focus();
      }
    },
    again: (node) => {
      session.again(node);
      follower.toEnd();
      composer.focus();
    },
    goOn: (node) => {
      session.goOn(node);
      composer.focus();
    },
    results: (node, texts) => {
      session.results(node, texts);
      follower.toEnd();
      composer.focus();
    },
    switchTo: (node, by) => {
      follower.stay();
      const shown = session.switchTo(node, by);
      if (shown) transcript.focus(shown.id, by < 0 ? "previous" : "next", by < 0 ? "next" : "previous");
    },
    siblings: (node) => session.siblings(node),
    isLeaf: (node) => node.children.length === 0,
  };
}

function showConversation() {
  const { conversation, live } = session;
  const empty = conversation.nodes[ROOT].children.length === 0;
  byId("welcome").hidden = !empty;
  byId("export").disabled = empty;
  composer.busy = live !== null;
  transcript.show(conversation, live);
  history.replaceState(null, "", empty ? location.pathname : `#${conversation.id}`);
  showTitle();
  showContext();
}

/** How full the model's context is with the shown branch, as far as the last answer told. */
function showContext() {
  const figures = shownPath(session.conversation).findLast((node) => node.figures?.prompt)?.figures;
  const room = rooms.get(byId("model").value);
  const used = figures && figures.prompt + (figures.tokens ?? 0);
  byId("context").textContent = used && room ? `${count(used)} of ${count(room)} tokens` : "";
}

function showTitle() {
  const { title } = session.conversation;
  byId("title").textContent = title || "New conversation";
  document.title = title ? `${title} · pegainfer` : "pegainfer";
}

async function listConversations() {
  sidebar.show(await store.all(), session.conversation.id);
}

async function listModels() {
  const select = byId("model");
  try {
    const served = await models();
    for (const model of served) rooms.set(model.id, model.max_model_len);
    select.replaceChildren(...served.map((model) => el("option", { value: model.id }, model.id)));
    showWelcome(served[0]);
    showContext();
    notice("models", null);
  } catch (error) {
    showWelcome(null);
    notice("models", `${error.message} ${remedy(error)}`, listModels);
  }
}

function showWelcome(model) {
  const facts = model ? `${model.id}, with room for ${count(model.max_model_len)} tokens` : "";
  const starters = STARTERS.map((text) =>
    el(
      "li",
      {},
      el("button", { type: "button", class: "starter", on: { click: () => composer.fill(text) } }, text),
    ),
  );
  byId("welcome").replaceChildren(
    el("p", { class: "welcome-line" }, "What shall we look at?"),
    el("p", { class: "quiet" }, facts),
    el("ul", { class: "starters" }, ...starters),
  );
}

/** One line a subject above the conversation; null takes it away. */
function notice(subject, text, retry = null) {
  const box = byId("notice");
  box.querySelector(`[data-subject=${subject}]`)?.remove();
  const away = {
    type: "button",
    class: "icon-button",
    "aria-label": "Put this line away",
    on: { click: () => notice(subject, null) },
  };
  const button = retry
    ? el("button", { type: "button", class: "text-button", on: { click: retry } }, "Try again")
    : el("button", away, icon("close"));
  if (text !== null) box.append(el("p", { data: { subject } }, text, button));
  box.hidden = box.childNodes.length === 0;
}

function wireButtons() {
  byId("settings-button").append(icon("settings"));
  byId("export").append(icon("download"));
  themeButton(byId("theme"));
  byId("model").addEventListener("change", showContext);
  byId("new-chat").addEventListener("click", () => {
    session.start();
    listConversations();
    sidebar.toggle(false);
    composer.focus();
  });
  byId("settings-button").addEventListener("click", async () => {
    const { id, settings } = session.conversation;
    const changed = await editSettings(settings);
    if (changed) await session.change(id, { settings: changed });
  });
  byId("export").addEventListener("click", exportOne);
  byId("export-all").addEventListener("click", async () => {
    download("pegainfer-conversations.json", toJson(await store.all()), "application/json");
  });
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", importFile);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]") && session.stop()) composer.focus();
  });
  addEventListener("pagehide", () => session.leave());
  store.onChange(async (id) => {
    await session.reread(id);
    await listConversations();
  });
}

async function exportOne() {
  const { conversation } = session;
  const button = (kind, label) =>
    el("button", { type: "button", class: "button wide", data: { kind } }, label);
  const kind = await openDialog(
    "Export this conversation",
    (close) =>
      el(
        "div",
        {
          class: "dialog-body",
          on: { click: (event) => event.target.dataset.kind && close(event.target.dataset.kind) },
        },
        el(
          "p",
          { class: "quiet" },
          "JSON holds every branch and can be imported again; Markdown holds the branch that is shown.",
        ),
        button("json", "JSON"),
        button("md", "Markdown"),
      ),
    { className: "small" },
  );
  if (!kind) return;
  const text = kind === "json" ? toJson([conversation]) : toMarkdown(conversation);
  download(fileName(conversation.title, kind), text, kind === "json" ? "application/json" : "text/markdown");
}

async function importFile(event) {
  const [file] = event.target.files;
  event.target.value = ""; // so that the same file can be chosen again
  if (!file) return;
  try {
    const read = fromJson(await file.text());
    for (const conversation of read) await store.put(conversation);
    if (read.length) await session.open(read[0].id);
    await listConversations();
    notice("import", null);
  } catch (error) {
    notice("import", `${file.name}: ${error.message}`);
  }
}
