// A small line chart. One can read values off it by pointer or by arrow keys.

import { el, svg } from "../lib/dom.js";

const WIDTH = 600; // units of the drawing; it is stretched to its box
const HEIGHT = 150;

export class Chart {
  /**
   * @param title what is drawn
   * @param series [{label, value}] with `value(history)` a number or null
   * @param format a number as text
   * @param points how many points the width holds
   * @param every seconds between two points
   * @param top the scale's fixed upper end; without one it follows the values
   */
  constructor({ title, series, format, points, every, top = null }) {
    Object.assign(this, { title, series, format, top });
    this.#points = points;
    this.#every = every;
    this.#lines = series.map((_, i) => svg("path", { class: `line series-${i + 1}` }));
    this.#cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, x1: 0, x2: 0, visibility: "hidden" });
    const grid = [0, 0.5, 1].map((part) =>
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part }),
    );
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    const drawing = svg("svg", box, ...grid, ...this.#lines, this.#cursor);
    this.#scale = el("span", { class: "scale" });
    this.#when = el("span", { class: "when" });
    this.#values = series.map(() => el("span", { class: "value" }));
    this.#ticks = [1, 0.5, 0].map((back) => ({ back, node: el("span") }));
    const legend = series.map(({ label }, i) =>
      el("span", { class: `key series-${i + 1}` }, el("span", {}, label), this.#values[i]),
    );
    this.#plot = el(
      "div",
      {
        class: "plot",
        tabindex: "0",
        role: "slider",
        "aria-label": `${title}, time`,
        "aria-valuemin": 1 - points,
        "aria-valuemax": 0,
      },
      this.#scale,
      drawing,
    );
    this.node = el(
      "figure",
      { class: "chart" },
      el("figcaption", {}, el("h3", {}, title), this.#when),
      this.#plot,
      el("div", { class: "axis", "aria-hidden": "true" }, ...this.#ticks.map(({ node }) => node)),
      el("div", { class: "legend" }, ...legend),
    );
    this.#listen();
    this.#draw();
  }

  #points;
  #every;
  #ticks; // [{back, node}]: the clock's time at so great a part of the width before the latest point
  #rows = []; // [{time, values}], oldest first
  #lines;
  #cursor;
  #scale;
  #when;
  #values;
  #plot;
  #at = null; // how many points before the latest one is read off; null: the latest

  /** Takes the history's present values. `history` null: a gap. */
  push(time, history) {
    this.#rows.push({ time, values: this.series.map(({ value }) => (history ? value(history) : null)) });
    if (this.#rows.length > this.#points) this.#rows.shift();
    this.#draw();
  }

  clear() {
    this.#rows = [];
    this.#draw();
  }

  /** [now, lowest, highest] of each series. */
  ranges() {
    return this.series.map((_, i) => {
      const values = this.#rows.map((row) => row.values[i]).filter((value) => value !== null);
      return values.length
        ? [this.#rows.at(-1).values[i], Math.min(...values), Math.max(...values)]
        : [null, null, null];
    });
  }

  #listen() {
    const plot = this.#plot;
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      this.#read(Math.round((1 - (event.clientX - box.left) / box.width) * (this.#points - 1)));
    });
    plot.addEventListener("pointerleave", () => this.#read(null));
    plot.addEventListener("blur", () => this.#read(null));
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: 1, ArrowDown: 1, ArrowRight: -1, ArrowUp: -1, PageUp: -15, PageDown: 15 }[
        event.key
      ];
      const ends = { Home: this.#rows.length - 1, End: 0 }[event.key];
      if (step === undefined && ends === undefined) return;
      event.preventDefault();
      this.#read(ends ?? (this.#at ?? 0) + step);
    });
  }

  #read(at) {
    this.#at = at === null ? null : Math.max(0, Math.min(this.#rows.length - 1, at));
    this.#draw();
  }

  #draw() {
    const rows = this.#rows;
    const highest = Math.max(0, ...rows.flatMap((row) => row.values).filter((value) => value !== null));
    const top = this.top ?? niceAbove(highest);
    this.#scale.textContent = this.format(top);
    const x = (back) => WIDTH * (1 - back / (this.#points - 1));
    const y = (value) => HEIGHT * (1 - Math.min(1, value / top));
    this.#lines.forEach((line, i) => {
      let path = "";
      let drawing = false;
      rows.forEach((row, k) => {
        const value = row.values[i];
        if (value !== null)
          path += `${drawing ? "L" : "M"}${x(rows.length - 1 - k).toFixed(1)} ${y(value).toFixed(1)}`;
        drawing = value !== null;
      });
      line.setAttribute("d", path);
    });
    const latest = rows.at(-1)?.time;
    for (const { back, node } of this.#ticks) {
      const seconds = latest - back * (this.#points - 1) * this.#every;
      node.textContent = latest === undefined ? "" : clockTime(seconds);
    }
    this.#label(x);
  }

  #label(x) {
    const rows = this.#rows;
    const row = rows[rows.length - 1 - (this.#at ?? 0)];
    this.#values.forEach((node, i) => (node.textContent = this.format(row?.values[i] ?? null)));
    const clock = row ? clockTime(row.time) : "";
    this.#when.textContent = this.#at === null ? "" : clock;
    this.#cursor.setAttribute("visibility", this.#at === null ? "hidden" : "visible");
    this.#cursor.setAttribute("x1", x(this.#at ?? 0));
    this.#cursor.setAttribute("x2", x(this.#at ?? 0));
    const said = this.series
      .map(({ label }, i) => `${label} ${this.format(row?.values[i] ?? null)}`)
      .join(", ");
    this.#plot.setAttribute("aria-valuenow", String(-(this.#at ?? 0)));
    this.#plot.setAttribute("aria-valuetext", `${clock || "No data yet"}: ${said}`);
  }
}

function clockTime(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString();
}

/** The next of 1, 2 and 5 times a power of ten. */
export function niceAbove(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((factor) => factor * power >= value * 0.9999) * power;
}
