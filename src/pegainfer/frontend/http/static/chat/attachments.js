// Text files that go with the next message, each as a block of code under its name.

import { byId, el, icon, iconButton } from "../lib/dom.js";

const LARGEST = 1 << 20; // bytes of a file; more than any context holds

export class Attachments {
  /** `unreadable(text)`: told why a file was not taken, or null. */
  constructor(unreadable) {
    this.#unreadable = unreadable;
    const chooser = byId("attach-files");
    byId("attach").append(icon("attach"));
    byId("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      const files = [...chooser.files];
      chooser.value = ""; // so that the same file can be chosen again
      await this.#take(files);
    });
    const composer = byId("composer");
    composer.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    composer.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.#take([...event.dataTransfer.files]);
    });
  }

  #unreadable;
  #files = []; // {name, text}

  get any() {
    return this.#files.length > 0;
  }

  /** `text` with the files as Markdown after it; afterwards none is attached. */
  addTo(text) {
    const parts = this.#files.map(({ name, text: content }) => {
      const longest = Math.max(2, ...Array.from(content.matchAll(/`+/g), ([run]) => run.length));
      const fence = "`".repeat(longest + 1);
      const language = /\.(\w+)$/.exec(name)?.[1] ?? "";
      return `${name}:\n\n${fence}${language}\n${content.replace(/\n?$/, "\n")}${fence}`;
    });
    this.#files = [];
    this.#show();
    return [text, ...parts].filter((part) => part.trim()).join("\n\n");
  }

  async #take(files) {
    const refused = [];
    for (const file of files) {
      try {
        this.#files.push({ name: file.name, text: await textOf(file) });
      } catch (error) {
        refused.push(`${file.name}: ${error.message}`);
      }
    }
    this.#unreadable(refused.length ? refused.join(" ") : null);
    this.#show();
  }

  #show() {
    const list = byId("attachments");
    list.hidden = !this.any;
    list.replaceChildren(
      ...this.#files.map((file) => {
        const remove = () => {
          this.#files = this.#files.filter((other) => other !== file);
          this.#show();
          byId("composer-text").focus();
        };
        return el("li", {}, el("span", {}, file.name), iconButton("close", `Remove ${file.name}`, remove));
      }),
    );
  }
}

/** Raises an Error for a file that is no text, or too long. */
async function textOf(file) {
  if (file.size > LARGEST)
    throw new Error(`a file of ${(file.size / 1e6).toFixed(1)} MB is too long (at most 1 MB).`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (text.includes("\0")) throw new TypeError();
    return text;
  } catch {
    throw new Error("not a text file in UTF-8.");
  }
}
