// Building DOM nodes. Nothing here parses markup: strings become text nodes and attributes, never HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * An element. Properties: `class`, `on` ({event: listener}), `data` ({name: value}); everything else is an
 * attribute (true: present, false and null: absent). Children: nodes, strings, null.
 */
export function el(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** The same for SVG. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (name === "data") {
      for (const [key, text] of Object.entries(value)) node.dataset[key] = text;
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function byId(id) {
  const node = document.getElementById(id);
  if (node === null) throw new Error(`expected an element with id ${id}, found none`);
  return node;
}

const ICONS = {
  menu: "M3 6h14M3 10h14M3 14h14",
  close: "M5 5l10 10M15 5L5 15",
  settings: "M3 6h8m4 0h2M3 14h2m4 0h8M13 4v4M7 12v4",
  download: "M10 3v9m-4-4 4 4 4-4M4 16h12",
  copy: "M7 7V4h9v9h-3M4 7h9v9H4z",
  attach: "M15.5 9.5l-5.8 5.8a3.4 3.4 0 0 1-4.8-4.8l6.3-6.3a2.3 2.3 0 0 1 3.2 3.2l-6.2 6.2a1.1 1.1 0 0 1-1.6-1.6l5.4-5.4",
  done: "M4 10.5l4 4 8-9",
  edit: "M4 16l.8-3.6L13 4.2l2.8 2.8-8.2 8.2zM11.5 5.7l2.8 2.8",
  again: "M15.5 8A6 6 0 1 0 16 11M16 4v4h-4",
  trash: "M4 6h12M8 6V4h4v2m-6 0 .7 10h6.6L14 6",
  previous: "M12 5l-5 5 5 5",
  next: "M8 5l5 5-5 5",
  onward: "M4 10h11m-4-4 4 4-4 4",
  sun:
    "M10 6.8a3.2 3.2 0 1 0 0 6.4 3.2 3.2 0 0 0 0-6.4M10 2v1.6M10 16.4V18M2 10h1.6M16.4 10H18" +
    "M4.3 4.3l1.2 1.2M14.5 14.5l1.2 1.2M15.7 4.3l-1.2 1.2M5.5 14.5l-1.2 1.2",
  moon: "M15.8 12.2A6.6 6.6 0 0 1 7.8 4.2a6.6 6.6 0 1 0 8 8z",
};

export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  return svg("svg", { viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true" }, path);
}

/** A button with an icon and a name for those who do not see it. */
export function iconButton(name, label, listener, properties = {}) {
  const attributes = {
    type: "button",
    class: "icon-button",
    "aria-label": label,
    title: label,
    ...properties,
  };
  return el("button", { ...attributes, on: { click: listener } }, icon(name));
}

/** Copies text; resolves to whether it worked. The clipboard API exists on https and localhost only. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const focused = document.activeElement;
    const area = el("textarea", { class: "hidden", readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    const worked = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return worked;
  }
}

/** A button that copies what `text()` returns and says so. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    const worked = await copyText(text());
    button.replaceChildren(icon(worked ? "done" : "close"));
    button.setAttribute("aria-label", worked ? "Copied" : "The browser did not let this page copy");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1600);
  });
  return button;
}

/** Saves text as a file of the user's. */
export function download(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** An id for what is kept in this browser. `crypto.randomUUID` exists on https and localhost only. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(bytes, (byte) => byte.toString(36).padStart(2, "0")).join("");
}
