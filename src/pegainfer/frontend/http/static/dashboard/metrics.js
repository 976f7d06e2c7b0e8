// Prometheus text to numbers: parsing, and over several scrapes rates and the histograms' quantiles.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const ANCHOR = "num_requests_running"; // every prefix stands before this name

/** Name without the server's prefix → [{labels, value}]. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL))
      labels[name] = value.replace(/\\(.)/g, "$1");
    const samples = found.get(match[1]) ?? [];
    samples.push({ labels, value: match[3] === "+Inf" ? Infinity : Number(match[3]) });
    found.set(match[1], samples);
  }
  const anchor = [...found.keys()].find((name) => name.endsWith(ANCHOR));
  const prefix = anchor?.slice(0, -ANCHOR.length) ?? "";
  return new Map(
    [...found].map(([name, samples]) => [
      name.startsWith(prefix) ? name.slice(prefix.length) : name,
      samples,
    ]),
  );
}

/** Scrapes of the last minutes. Times are in seconds; null: no such name is exported, or too few scrapes. */
export class History {
  constructor(seconds) {
    this.#seconds = seconds;
  }

  #seconds;
  #scrapes = []; // {time, metrics}, oldest first

  /** Takes a scrape. True: counters went back, so the server is a new one; what came before is forgotten. */
  push(time, metrics) {
    const last = this.#scrapes.at(-1);
    const restarted = last && COUNTED.some((name) => sum(metrics, name) < sum(last.metrics, name));
    if (restarted) this.#scrapes = [];
    this.#scrapes.push({ time, metrics });
    while (this.#scrapes[0].time < time - this.#seconds) this.#scrapes.shift();
    return Boolean(restarted);
  }

  /** The latest value of a gauge or counter, summed over its labels. */
  value(name) {
    return sum(this.#scrapes.at(-1)?.metrics, name);
  }

  /** The latest values by one label. */
  byLabel(name, label) {
    return (this.#scrapes.at(-1)?.metrics.get(name) ?? []).map(({ labels, value }) => [
      labels[label] ?? "",
      value,
    ]);
  }

  /** What a counter gained in the last seconds. */
  gain(name, seconds) {
    const [from, to] = this.#span(seconds);
    const after = sum(to?.metrics, name);
    // A counter with labels is there from its first count on.
    return after === null ? null : after - (sum(from.metrics, name) ?? 0);
  }

  /** A counter's gain a second. */
  rate(name, seconds) {
    const [from, to] = this.#span(seconds);
    const gain = this.gain(name, seconds);
    return gain === null ? null : gain / (to.time - from.time);
  }

  /** How much of one counter's gain another one had; null where nothing was gained. */
  share(part, whole, seconds) {
    const total = this.gain(whole, seconds);
    return total ? this.gain(part, seconds) / total : null;
  }

  /** A histogram's quantile over the last seconds, or over everything (null). */
  quantile(name, q, seconds) {
    if (seconds === null) return quantileOf(buckets(this.#scrapes.at(-1)?.metrics, name), null, q);
    const [from, to] = this.#span(seconds);
    return from ? quantileOf(buckets(to.metrics, name), buckets(from.metrics, name), q) : null;
  }

  #span(seconds) {
    const to = this.#scrapes.at(-1);
    const from = this.#scrapes.find((scrape) => scrape.time >= to.time - seconds - 0.5);
    return from && from !== to ? [from, to] : [undefined, undefined];
  }
}

const COUNTED = ["prompt_tokens_total", "generation_tokens_total"];

function sum(metrics, name) {
  const samples = metrics?.get(name);
  return samples ? samples.reduce((total, { value }) => total + value, 0) : null;
}

/** Upper bound → count, summed over other labels. */
function buckets(metrics, name) {
  const found = new Map();
  for (const { labels, value } of metrics?.get(`${name}_bucket`) ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    found.set(bound, (found.get(bound) ?? 0) + value);
  }
  return found;
}

/** As Prometheus does it: straight within a bucket; beyond the last bound, that bound. */
export function quantileOf(after, before, q) {
  const bounds = [...after.keys()].sort((a, b) => a - b);
  const counts = bounds.map((bound) => after.get(bound) - (before?.get(bound) ?? 0));
  const total = counts.at(-1);
  if (!total) return null;
  const rank = q * total;
  const i = counts.findIndex((count) => count >= rank);
  if (bounds[i] === Infinity) return bounds[i - 1] ?? null;
  const [low, under] = i > 0 ? [bounds[i - 1], counts[i - 1]] : [0, 0];
  return low + ((bounds[i] - low) * (rank - under)) / (counts[i] - under || 1);
}
