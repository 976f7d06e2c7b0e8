// An answer's figures as short texts: [text, what it means].

export function figureLines(node) {
  const f = node.figures ?? {};
  const lines = [];
  if (f.ttft !== undefined)
    lines.push([`${seconds(f.ttft)} to first token`, "From sending the request to the first token"]);
  if (f.rate !== undefined)
    lines.push([
      `${f.rate < 10 ? f.rate.toFixed(1) : count(Math.round(f.rate))} tokens/s`,
      "Tokens a second after the first one",
    ]);
  if (f.tokens !== undefined)
    lines.push([`${count(f.tokens)} ${f.tokens === 1 ? "token" : "tokens"}`, "Tokens of the answer"]);
  if (f.prompt !== undefined) {
    lines.push([`${count(f.prompt)} prompt tokens`, "Tokens of everything that was sent"]);
    lines.push([`${count(f.cached ?? 0)} cached`, "Prompt tokens that the prefix cache had"]);
  }
  return lines;
}

export function count(n) {
  return n.toLocaleString("en-US");
}

export function seconds(s) {
  if (s < 0.0095) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 0.995) return `${Math.round(s * 1000)} ms`;
  return s < 9.95 ? `${s.toFixed(1)} s` : `${Math.round(s)} s`;
}
