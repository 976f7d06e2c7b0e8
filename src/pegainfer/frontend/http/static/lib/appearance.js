// Light and dark: the system's choice until the user makes one.

import { icon } from "./dom.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : dark.matches;
}

/** Makes a button switch between the two; `changed` is called after each change. */
export function themeButton(button, changed = () => {}) {
  const show = () => {
    const label = isDark() ? "Light theme" : "Dark theme";
    button.replaceChildren(icon(isDark() ? "sun" : "moon"));
    button.setAttribute("aria-label", label);
    button.title = label;
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("theme", theme);
    } catch {
      // Without storage the choice holds for this visit.
    }
    show();
    changed();
  });
  dark.addEventListener("change", () => {
    show();
    changed();
  });
  show();
}
