// The field in which messages are written.

import { byId } from "../lib/dom.js";
import { Attachments } from "./attachments.js";

const DRAFT = "draft"; // in sessionStorage: a reload does not lose what was typed

export class Composer {
  /** `actions`: {send(text), stop(), editLast(), unreadable(text or null)}: why a file is not attached. */
  constructor(actions) {
    this.#actions = actions;
    this.#attachments = new Attachments(actions.unreadable);
    this.#area.value ||= sessionStorage.getItem(DRAFT) ?? ""; // one may have typed before this ran
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#area.addEventListener("keydown", (event) => this.#key(event));
    this.#area.addEventListener("input", () => this.#typed());
    byId("stop").addEventListener("click", () => {
      this.focus();
      actions.stop();
    });
    this.#typed();
  }

  #actions;
  #attachments;
  #area = byId("composer-text");
  #busy = false;

  focus() {
    this.#area.focus();
  }

  /** Puts a text there to be sent or changed. */
  fill(text) {
    this.#area.value = text;
    this.#typed();
    this.focus();
  }

  /** Whether an answer is being written: then one can stop it, and type, but not send. */
  set busy(busy) {
    this.#busy = busy;
    byId("send").hidden = busy;
    byId("stop").hidden = !busy;
    document.body.toggleAttribute("data-busy", busy);
  }

  #submit() {
    const text = this.#area.value;
    if (this.#busy || !(text.trim() || this.#attachments.any)) return;
    this.fill("");
    this.#actions.send(this.#attachments.addTo(text));
  }

  #key(event) {
    // While a word is composed (Chinese, Japanese, …) Enter accepts it.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#submit();
    } else if (event.key === "ArrowUp" && !this.#area.value && !this.#busy) {
      event.preventDefault();
      this.#actions.editLast();
    }
  }

  #typed() {
    const area = this.#area;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight, innerHeight * 0.4)}px`;
    if (area.value) sessionStorage.setItem(DRAFT, area.value);
    else sessionStorage.removeItem(DRAFT);
  }
}
