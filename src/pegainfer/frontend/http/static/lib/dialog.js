// Questions in a native <dialog>: it keeps the focus inside, closes on Escape and gives the focus back.

import { el, icon } from "./dom.js";

/**
 * Opens a dialog and resolves to its return value, or to null where it was dismissed.
 * `build(close)` returns the content; `close(value)` ends the dialog.
 */
export function openDialog(title, build, { className = "" } = {}) {
  let resolve;
  const promise = new Promise((settle) => (resolve = settle));
  let result = null;
  const close = (value = null) => {
    result = value;
    dialog.close();
  };
  const head = el(
    "header",
    { class: "dialog-head" },
    el("h2", {}, title),
    el(
      "button",
      { type: "button", class: "icon-button", "aria-label": "Close", on: { click: () => close() } },
      icon("close"),
    ),
  );
  const dialog = el("dialog", { class: `dialog ${className}`, "aria-label": title }, head, build(close));
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) close(); // the backdrop
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    resolve(result);
  });
  document.body.append(dialog);
  dialog.showModal();
  dialog.querySelector("[data-focus]")?.focus();
  return promise;
}

/** Asks before something is lost. */
export function confirmLoss(title, text, action) {
  return openDialog(
    title,
    (close) =>
      el(
        "div",
        { class: "dialog-body" },
        el("p", {}, text),
        el(
          "div",
          { class: "dialog-actions" },
          el(
            "button",
            { type: "button", class: "button", data: { focus: "" }, on: { click: () => close() } },
            "Keep",
          ),
          el("button", { type: "button", class: "button danger", on: { click: () => close(true) } }, action),
        ),
      ),
    { className: "small" },
  );
}

/** Asks for one line of text; resolves to it, or to null. */
export function askText(title, { label, value = "", type = "text", action, note = "" }) {
  return openDialog(
    title,
    (close) => {
      const input = el("input", {
        id: "asked",
        type,
        class: "input",
        autocomplete: "off",
        spellcheck: "false",
        data: { focus: "" },
      });
      input.value = value;
      const submit = (event) => {
        event.preventDefault();
        const text = input.value.trim();
        if (text) close(text);
        else input.focus();
      };
      return el(
        "form",
        { class: "dialog-body", on: { submit } },
        note ? el("p", { class: "quiet" }, note) : null,
        el("label", { for: "asked" }, label),
        input,
        el(
          "div",
          { class: "dialog-actions" },
          el("button", { type: "submit", class: "button primary" }, action),
        ),
      );
    },
    { className: "small" },
  );
}
