// Runs before the first paint, so that a chosen theme does not flash. A classic script for that reason.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("theme");
  } catch {
    // Storage may be switched off; the system's theme holds then.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
