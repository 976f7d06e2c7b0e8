// The list of kept conversations. On narrow screens it slides over the page.

import { askText, confirmLoss } from "../lib/dialog.js";
import { byId, el, icon, iconButton } from "../lib/dom.js";

export class Sidebar {
  /** `actions`: {open(id), rename(id, title), remove(id), search()}. */
  constructor(actions) {
    this.#actions = actions;
    const opener = byId("open-sidebar");
    const closer = byId("close-sidebar");
    opener.append(icon("menu"));
    closer.append(icon("close"));
    opener.addEventListener("click", () => this.toggle(true));
    closer.addEventListener("click", () => this.toggle(false));
    byId("search").addEventListener("input", () => actions.search());
    byId("sidebar-shade").addEventListener("click", () => this.toggle(false));
    byId("sidebar").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#isOpen) {
        event.stopPropagation();
        this.toggle(false);
      }
    });
  }

  #actions;
  #isOpen = false; // on narrow screens; on wide ones the list is always there

  toggle(open) {
    if (open === this.#isOpen) return;
    this.#isOpen = open;
    document.body.classList.toggle("sidebar-open", open);
    byId("sidebar-shade").hidden = !open;
    document.querySelector("main").inert = open;
    byId("open-sidebar").setAttribute("aria-expanded", String(open));
    byId(open ? "close-sidebar" : "open-sidebar").focus();
  }

  /**
   * Lists those of the conversations in which all words of the search field stand. `current`: the id of the
   * open conversation. Keeps the focus where it is.
   */
  show(all, current) {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const conversations = all.filter((conversation) => holds(conversation, words));
    const focused = document.activeElement?.closest?.("[data-item]");
    const key = focused && [
      focused.dataset.item,
      [...focused.querySelectorAll("button")].indexOf(document.activeElement),
    ];
    byId("no-conversations").textContent =
      conversations.length > 0
        ? ""
        : words.length > 0
          ? "No conversation holds these words."
          : "Conversations are kept in this browser only.";
    byId("conversation-list").replaceChildren(...conversations.map((c) => this.#item(c, c.id === current)));
    if (key) {
      const item = document.querySelector(`[data-item="${CSS.escape(key[0])}"]`);
      (item?.querySelectorAll("button")[key[1]] ?? byId("new-chat")).focus();
    }
  }

  #item({ id, title }, current) {
    const name = title || "Conversation";
    const rename = async () => {
      const text = await askText("Rename the conversation", {
        label: "Title",
        value: name,
        action: "Rename",
      });
      if (text) this.#actions.rename(id, text);
    };
    const remove = async () => {
      const sure = await confirmLoss(
        "Delete the conversation?",
        `“${name}” is kept in this browser only and cannot be brought back.`,
        "Delete",
      );
      if (sure) this.#actions.remove(id);
    };
    return el(
      "li",
      { class: current ? "item current" : "item", data: { item: id } },
      el(
        "button",
        {
          type: "button",
          class: "item-open",
          "aria-current": current ? "true" : null,
          on: { click: () => this.#actions.open(id) },
        },
        name,
      ),
      iconButton("edit", `Rename ${name}`, rename),
      iconButton("trash", `Delete ${name}`, remove),
    );
  }
}

/** Whether each of the words stands in the title or in a message, in any branch. */
function holds({ title, nodes }, words) {
  const texts = [title, ...Object.values(nodes).map((node) => node.content ?? "")].map((text) =>
    text.toLowerCase(),
  );
  return words.every((word) => texts.some((text) => text.includes(word)));
}
