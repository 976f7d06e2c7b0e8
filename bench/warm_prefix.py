"""The first token of a chat whose earlier turns are cached, by the length of its context, and where it goes.

    python bench/warm_prefix.py [MODEL] [--tokens 500 1000 2000 4000 7000] [--turns 8]

For each length one conversation: the first answer is cold, then every turn adds an answer and a short
question. Two kinds of turns alternate: `next` goes on with the conversation, `same` sends the last one again.
Printed for each length and kind, as medians of the turns:

    prompt    tokens that the model read
    new       of them, those that no cache had: the turn itself and what filled no block before it
    cold      ms to the first text of the first answer
    warm      ms to the first text of a turn
    step      of them, in the step that computed the new tokens
    text      of them, in the template and the tokeniser
    encoded   characters that were tokenised, of those that the prompt has
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import time
from dataclasses import dataclass
from typing import Any

import httpx
from http_path import CLI, serving

WORDS = ("model", "cache", "block", "token", "request", "answer", "server", "prefix", "long", "short")
SHOWN = ("prompt", "new", "first", "step", "text", "chars", "encoded")
SAMPLE = re.compile(r"(\w+)\{([^}]*)\} (\S+)")


@dataclass(frozen=True)
class Turn:
    """One answer. Times in seconds."""

    prompt: int
    cached: int
    first: float  # to the first text
    step: float
    text: float
    chars: int
    encoded: int

    @property
    def new(self) -> int:
        return self.prompt - self.cached


class Conversation:
    """A chat that grows. `ask` sends it as it stands."""

    def __init__(self, http: httpx.Client, seed: int) -> None:
        self._http = http
        self._r = random.Random(seed)
        self.messages = [{"role": "system", "content": f"You help with case {seed}."}]

    def say(self, role: str, words: int) -> None:
        self.messages.append({"role": role, "content": " ".join(self._r.choices(WORDS, k=words))})

    def ask(self) -> Turn:
        before = self._counters()
        body = {"messages": self.messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        begin = time.perf_counter()
        first = 0.0
        usage: dict[str, Any] = {}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"{answer.status_code}: {answer.read()[:300]!r}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter() - begin
                usage = json.loads(line[6:]).get("usage") or usage
        gained = {name: value - before.get(name, 0.0) for name, value in self._counters().items()}
        chars = round(gained["tokenizer_cache_queries_total"])
        return Turn(
            prompt=usage["prompt_tokens"],
            cached=usage["prompt_tokens_details"]["cached_tokens"],
            first=first,
            step=gained['step_seconds_sum{kind="prefill"}'],
            text=sum(gained.get(f'host_seconds_total{{stage="{s}"}}', 0.0) for s in ("template", "tokenize")),
            chars=chars,
            encoded=chars - round(gained["tokenizer_cache_hits_total"]),
        )

    def _counters(self) -> dict[str, float]:
        """Of /metrics, without the model's name and the prefix."""
        found = {}
        for name, labels, value in SAMPLE.findall(self._http.get("/metrics").text):
            kept = [part for part in labels.split(",") if part.startswith(("kind=", "stage="))]
            found[name + (f"{{{kept[0]}}}" if kept else "")] = float(value)
        return found


def measure(http: httpx.Client, tokens: int, turns: int) -> tuple[Turn, dict[str, list[Turn]]]:
    """The cold answer of a conversation of about so many tokens, and its turns by kind."""
    chat = Conversation(http, tokens)
    words = 0
    while words < tokens - 60:
        chat.say("user", 60)
        chat.say("assistant", 30)
        words += 100  # what the template adds is some five tokens a message
    chat.say("user", 8)
    cold = chat.ask()
    warm: dict[str, list[Turn]] = {"next": [], "same": []}
    for _ in range(turns):
        chat.say("assistant", 8)
        chat.say("user", 8)
        warm["next"].append(chat.ask())
        warm["same"].append(chat.ask())
    return cold, warm


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="a GGUF file or a known name; by default the default model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 1000, 2000, 4000, 7000])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--serve", action="append", default=[], help="a flag of `serve`; may be repeated")
    args = parser.parse_args()
    command = [*CLI, "serve", *([args.model] if args.model else []), "--port", "0", *args.serve]
    print(f"load {os.getloadavg()[0]:.1f}; medians of {args.turns} turns, ms")
    print(" prompt turn    new     cold     warm     step   text       encoded")
    with (
        serving(command) as (port, _),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as http,
    ):
        for tokens in args.tokens:
            cold, warm = measure(http, tokens, args.turns)
            for kind, found in warm.items():
                middle = {k: statistics.median(getattr(t, k) for t in found) for k in SHOWN}
                ms = " ".join(f"{1e3 * middle[k]:8.1f}" for k in ("first", "step"))
                print(
                    f"{middle['prompt']:7.0f} {kind:5} {middle['new']:5.0f} {1e3 * cold.first:8.1f} {ms} "
                    f"{1e3 * middle['text']:6.1f} {middle['encoded']:5.0f}/{middle['chars']:6.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
