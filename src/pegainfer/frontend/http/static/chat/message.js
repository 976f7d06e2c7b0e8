// One message on the page: its text, thoughts and calls, its figures in the margin, what can be done with it.

import { remedy } from "../lib/api.js";
import { copyButton, el, iconButton } from "../lib/dom.js";
import { MarkdownView } from "../markdown/view.js";
import { figureLines } from "./figures.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result" };
const ACTIONS_ON = {
  user: "Actions on your message",
  assistant: "Actions on this answer",
  tool: "Actions on this result",
};
const NOTES = {
  length: "Cut off: “Max tokens” or the context’s end was reached.",
  stopped: "Stopped.",
  abort: "Ended by the server’s operator.",
};

export class MessageView {
  /**
   * @param node the conversation's node
   * @param actions {edit(node, text), again(node), goOn(node), results(node, texts), switchTo(node, by),
   *   siblings(node) → {ids, index}, isLeaf(node)}
   * @param settled called with each block of the answer that is complete
   */
  constructor(node, actions, settled) {
    this.data = node;
    this.#actions = actions;
    this.#margin = el("div", { class: "margin" });
    this.#thoughts = null;
    this.#content = node.role === "assistant" ? new MarkdownView({ settled }) : null;
    this.#extras = el("div", { class: "extras" });
    this.#tools = el("div", { class: "actions", role: "group", "aria-label": ACTIONS_ON[node.role] });
    this.#body = el(
      "div",
      { class: "body" },
      this.#content?.node ?? this.#plain(),
      this.#extras,
      this.#tools,
    );
    this.node = el(
      "article",
      { class: `message ${node.role}`, "aria-label": NAMES[node.role], data: { id: node.id } },
      this.#margin,
      this.#body,
    );
  }

  #actions;
  #margin;
  #body;
  #thoughts; // {details, view, label}: there once the model thought
  #content;
  #extras; // calls, errors, notes
  #tools;

  /** Brings text and figures up to date. `live`: more is to come. Everything else is left to `settle`. */
  update(live) {
    const { data } = this;
    if (data.role === "assistant") {
      if (data.reasoning) this.#think(live);
      this.#content.update(data.content, { done: !live });
    }
    this.node.classList.toggle("live", live);
    if (live) this.node.classList.add("grew");
    this.node.classList.toggle("silent", live && !data.content && !data.reasoning);
    this.node.setAttribute("aria-busy", String(live));
    this.#writeMargin();
    if (live && data.calls?.length !== this.#extras.childNodes.length)
      this.#extras.replaceChildren(...this.#calls());
  }

  /** Shows the whole message as it stands, with what can be done with it. */
  settle() {
    this.update(false);
    this.#extras.replaceChildren(...this.#calls(), ...this.#resultForm(), ...this.#endings());
    this.#tools.replaceChildren(...this.#buttons());
  }

  /** Puts a field in place of the text. */
  edit() {
    const { data } = this;
    const area = el("textarea", {
      class: "input edit",
      "aria-label": data.role === "user" ? "Your message" : "The answer",
      rows: 3,
    });
    area.value = data.content;
    const shown = [...this.#body.childNodes];
    const close = () => {
      this.#body.replaceChildren(...shown);
      this.#tools.querySelector("[data-action=edit]")?.focus();
    };
    const form = el(
      "form",
      { class: "editing" },
      area,
      el(
        "div",
        { class: "dialog-actions" },
        el("button", { type: "button", class: "button", on: { click: close } }, "Cancel"),
        el(
          "button",
          { type: "submit", class: "button primary" },
          data.role === "user" ? "Send as a new branch" : "Keep as a new branch",
        ),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (area.value.trim()) this.#actions.edit(data, area.value);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.#body.replaceChildren(form);
    area.style.height = `${Math.min(area.scrollHeight + 4, 480)}px`;
    area.focus();
  }

  #plain() {
    const text = el("div", { class: "plain" });
    text.textContent = this.data.content;
    return text;
  }

  #think(live) {
    if (!this.#thoughts) {
      const view = new MarkdownView();
      const label = el("span");
      const details = el("details", { class: "thoughts" }, el("summary", {}, label), view.node);
      this.#thoughts = { details, view, label };
      details.addEventListener(
        "toggle",
        () =>
          details.open && view.update(this.data.reasoning, { done: !this.node.classList.contains("live") }),
      );
      this.#body.prepend(details);
    }
    const { details, view, label } = this.#thoughts;
    const thinking = live && !this.data.content;
    const seconds = this.data.figures?.thought;
    label.textContent = thinking ? "Thinking…" : seconds ? `Thought for ${seconds.toFixed(1)} s` : "Thoughts";
    details.classList.toggle("thinking", thinking);
    if (details.open) view.update(this.data.reasoning, { done: !thinking }); // folded: not worth the work
  }

  #calls() {
    return (this.data.calls ?? []).map((call) =>
      el(
        "details",
        { class: "call", open: true },
        el("summary", {}, "Calls ", el("code", {}, call.name)),
        el(
          "pre",
          { tabindex: "0", role: "group", "aria-label": `Arguments of ${call.name}` },
          el("code", {}, pretty(call.arguments)),
        ),
      ),
    );
  }

  #resultForm() {
    const { data } = this;
    if (!data.calls?.length || !this.#actions.isLeaf(data)) return [];
    const areas = data.calls.map((call, i) => {
      const area = el("textarea", {
        id: `result-${data.id}-${i}`,
        class: "input mono",
        rows: 2,
        spellcheck: "false",
      });
      return [el("label", { for: area.id }, `Result of ${call.name}`), area];
    });
    const submit = (event) => {
      event.preventDefault();
      this.#actions.results(
        data,
        areas.map(([, area]) => area.value),
      );
    };
    const button = el("button", { type: "submit", class: "button primary" }, "Send results");
    return [el("form", { class: "results needs-idle", on: { submit } }, ...areas.flat(), button)];
  }

  #endings() {
    const { data } = this;
    if (data.role !== "assistant") return [];
    if (data.error) {
      const retry = el(
        "button",
        { type: "button", class: "button needs-idle", on: { click: () => this.#actions.again(data) } },
        "Try again",
      );
      return [
        el(
          "div",
          { class: "failure" },
          el("p", { class: "failure-what" }, data.error.message),
          el("p", {}, remedy(data.error)),
          retry,
        ),
      ];
    }
    const note = NOTES[data.finish] ?? (data.finish ? null : "Interrupted.");
    if (!note) return [];
    const goOn = data.content && !data.calls?.length && this.#actions.isLeaf(data);
    const button = el(
      "button",
      { type: "button", class: "text-button needs-idle", on: { click: () => this.#actions.goOn(data) } },
      "Continue",
    );
    return [el("p", { class: "ending" }, note, goOn ? button : null)];
  }

  #buttons() {
    const { data } = this;
    const idle = { class: "icon-button needs-idle" };
    const buttons = [copyButton(() => data.content)];
    if (data.role !== "tool") {
      buttons.push(iconButton("edit", "Edit", () => this.edit(), { ...idle, "data-action": "edit" }));
    }
    if (data.role === "assistant") {
      buttons.push(
        iconButton("again", "Answer again", () => this.#actions.again(data), {
          ...idle,
          "data-action": "again",
        }),
      );
    }
    const { ids, index } = this.#actions.siblings(data);
    if (ids.length > 1) {
      const to = (by) => () => this.#actions.switchTo(data, by);
      buttons.push(
        el(
          "span",
          { class: "branches", role: "group", "aria-label": "Branches" },
          iconButton("previous", "Previous branch", to(-1), {
            ...idle,
            "data-action": "previous",
            disabled: index === 0,
          }),
          el("span", { class: "branch-place" }, `${index + 1}/${ids.length}`),
          iconButton("next", "Next branch", to(1), {
            ...idle,
            "data-action": "next",
            disabled: index === ids.length - 1,
          }),
        ),
      );
    }
    return buttons;
  }

  #writeMargin() {
    const { data } = this;
    const name = el(
      "p",
      { class: "who" },
      data.role === "tool" ? `Result of ${data.name}` : NAMES[data.role],
    );
    const lines = figureLines(data).map(([text, title]) => el("span", { title }, text));
    this.#margin.replaceChildren(name, ...(lines.length ? [el("p", { class: "figures" }, ...lines)] : []));
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // cut off by max_tokens
  }
}
