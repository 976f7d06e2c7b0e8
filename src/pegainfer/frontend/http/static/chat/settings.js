// A conversation's settings: what they are, how they become a request, and the dialog that changes them.

import { changeKey, models } from "../lib/api.js";
import { openDialog, confirmLoss } from "../lib/dialog.js";
import { el } from "../lib/dom.js";

const KEPT = "settings"; // in localStorage: what new conversations start with

/** Numbers that a request may carry. Left empty, the server's own default holds. */
const NUMBERS = [
  {
    name: "temperature",
    label: "Temperature",
    low: 0,
    high: 2,
    step: 0.05,
    slider: true,
    note: "0 always takes the likeliest token",
  },
  {
    name: "top_p",
    label: "Top p",
    low: 0.01,
    high: 1,
    step: 0.01,
    slider: true,
    note: "the likeliest tokens up to this share",
  },
  {
    name: "top_k",
    label: "Top k",
    low: 0,
    high: 2147483647,
    step: 1,
    note: "so many tokens at most; 0 is no limit",
  },
  {
    name: "min_p",
    label: "Min p",
    low: 0,
    high: 1,
    step: 0.01,
    slider: true,
    note: "relative to the likeliest token",
  },
  { name: "max_tokens", label: "Max tokens", low: 1, high: 2147483647, step: 1, note: "of an answer" },
  {
    name: "seed",
    label: "Seed",
    low: Number.MIN_SAFE_INTEGER,
    high: Number.MAX_SAFE_INTEGER,
    step: 1,
    note: "the same seed gives the same answer",
  },
];

export function startSettings() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) ?? {};
  } catch {
    return {};
  }
}

function keepAsStart(settings) {
  try {
    const { system, tools, ...sampling } = settings; // those two belong to one conversation
    localStorage.setItem(KEPT, JSON.stringify(sampling));
  } catch {
    // Without storage new conversations start with the server's defaults.
  }
}

/** The fields of a chat request that the settings decide. Throws Error with what is wrong. */
export function requestFields(settings) {
  const fields = {};
  for (const { name } of NUMBERS) {
    if (typeof settings[name] === "number") fields[name] = settings[name];
  }
  const stop = stopStrings(settings.stop ?? "");
  if (stop.length) fields.stop = stop;
  if (settings.thinking) fields.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  const tools = readTools(settings.tools ?? "");
  if (tools.length) fields.tools = tools;
  return fields;
}

/** One stop string a line; \n and \t stand for what they usually do. */
export function stopStrings(text) {
  const meanings = { n: "\n", t: "\t", "\\": "\\" };
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nt\\])/g, (_, letter) => meanings[letter]));
}

/** The tools from their JSON. Throws Error. */
export function readTools(text) {
  if (!text.trim()) return [];
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: expected JSON, got a syntax error: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("Tools: expected a JSON array of tools.");
  // The bare function is what people copy from a schema.
  return tools.map((tool) =>
    tool?.type === undefined && tool?.name ? { type: "function", function: tool } : tool,
  );
}

/** Lets the user change settings; resolves to the new ones, or to null. */
export function editSettings(settings) {
  return openDialog("Settings", (close) => settingsForm(settings, close), { className: "side" });
}

function settingsForm(settings, close) {
  const fields = new Map(); // name → function that reads its value
  const area = (name, label, note, rows, className = "") => {
    const node = el("textarea", {
      id: `set-${name}`,
      rows,
      class: `input ${className}`,
      spellcheck: className ? "false" : null,
      "aria-describedby": `note-${name}`,
    });
    node.value = settings[name] ?? "";
    fields.set(name, () => node.value);
    return row(name, label, note, node);
  };
  const system = area("system", "System prompt", "Sent before the first message.", 4);
  system.querySelector("textarea").dataset.focus = "";
  const thinking = el("select", { id: "set-thinking", class: "input", "aria-describedby": "note-thinking" });
  for (const [value, text] of [
    ["", "As the model does"],
    ["on", "On"],
    ["off", "Off"],
  ]) {
    thinking.append(el("option", { value, selected: (settings.thinking ?? "") === value }, text));
  }
  fields.set("thinking", () => thinking.value);
  const numbers = NUMBERS.map((number) => numberRow(number, settings[number.name], fields));
  showDefaults(numbers);
  const error = el("p", { class: "form-error", role: "alert", hidden: true });

  const form = el(
    "form",
    { class: "dialog-body settings", novalidate: true },
    system,
    el("h3", {}, "Sampling"),
    el("p", { class: "quiet" }, "Left empty, the server’s default holds."),
    el("div", { class: "number-rows" }, ...numbers),
    area("stop", "Stop", "One text a line; \\n is a line’s end.", 2, "mono"),
    el("h3", {}, "Thinking and tools"),
    row("thinking", "Thinking", "For models whose template knows the choice.", thinking),
    area(
      "tools",
      "Tools",
      "A JSON array, as the API takes it. Calls are shown; you give their results.",
      4,
      "mono",
    ),
    error,
    el(
      "div",
      { class: "dialog-actions" },
      el("button", { type: "button", class: "text-button", on: { click: () => changeKey() } }, "API key"),
      el("button", { type: "button", class: "button", on: { click: reset } }, "Use defaults"),
      el("button", { type: "submit", class: "button primary" }, "Done"),
    ),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    try {
      const read = readForm(fields);
      requestFields(read);
      keepAsStart(read);
      close(read);
    } catch (problem) {
      error.textContent = problem.message;
      error.hidden = false;
    }
  });
  return form;

  async function reset() {
    const sure = await confirmLoss(
      "Use defaults?",
      "Empties every field here, the system prompt and the tools too.",
      "Use defaults",
    );
    if (!sure) return;
    keepAsStart({});
    close({});
  }
}

function readForm(fields) {
  const settings = {};
  for (const [name, read] of fields) {
    const value = read();
    if (value !== "" && value !== null) settings[name] = value;
  }
  return settings;
}

/** Empty fields show the values that the server uses in their place. */
async function showDefaults(rows) {
  let inForce;
  try {
    [{ default_sampling_params: inForce }] = await models();
  } catch {
    return; // the fields say "default" then
  }
  NUMBERS.forEach(({ name }, i) => {
    if (typeof inForce?.[name] !== "number") return;
    rows[i].querySelector("input[type=number]").placeholder = `default ${inForce[name]}`;
  });
}

function row(name, label, note, input) {
  return el(
    "div",
    { class: "field" },
    el("label", { for: input.id }, label),
    input,
    el("p", { id: `note-${name}`, class: "quiet" }, note),
  );
}

function numberRow({ name, label, low, high, step, slider, note }, value, fields) {
  const input = el("input", {
    id: `set-${name}`,
    type: "number",
    class: "input number",
    min: low,
    max: high,
    step: step < 1 ? "any" : step,
    inputmode: step < 1 ? "decimal" : "numeric",
    placeholder: "default",
    "aria-describedby": `note-${name}`,
  });
  if (typeof value === "number") input.value = value;
  fields.set(name, () => {
    if (input.value === "" && !input.validity.badInput) return null;
    const number = Number(input.value);
    const whole = step < 1 || Number.isSafeInteger(number);
    if (input.value === "" || !whole || number < low || number > high) {
      input.focus();
      const kind = step < 1 ? "a number" : "a whole number";
      throw new Error(`${label}: expected ${kind} from ${low} to ${high}.`);
    }
    return number;
  });
  let range = null;
  if (slider) {
    range = el("input", {
      type: "range",
      min: low,
      max: high,
      step,
      "aria-label": `${label}, slider`,
      class: "range",
    });
    range.value = input.value || (name === "min_p" ? 0 : 1); // what servers usually take
    const mark = () => range.classList.toggle("unset", input.value === "");
    range.addEventListener("input", () => {
      input.value = range.value;
      mark();
    });
    input.addEventListener("input", () => {
      if (input.value !== "") range.value = input.value;
      mark();
    });
    mark();
  }
  return el(
    "div",
    { class: "number-row" },
    el("label", { for: input.id }, label),
    input,
    range,
    el("p", { id: `note-${name}`, class: "quiet" }, note),
  );
}
