"""How late the front's event loop wakes while long prompts are tokenised and large schemas compiled.

    python bench/loop_lag.py [--seconds 20] [--tokens 16000] [--clients 16] [--schemas 5]

On the null device, clients on the same cores. Every prompt and schema is new: nothing comes from a cache.
Percentiles are upper bounds of the metric's buckets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
from typing import Any

import httpx

SERVE = [sys.executable, "-m", "pegainfer.cli.main", "serve", "--device", "null", "--port", "0"]
LISTENING = "listening on "
METRIC = "event_loop_lag_seconds"


def schema(seed: int) -> dict[str, Any]:
    """Some hundred fields, nested, none like another's."""
    r = random.Random(seed)

    def node(depth: int) -> dict[str, Any]:
        if depth == 0:
            return {"enum": [f"{r.getrandbits(32):08x}" for _ in range(8)]}
        names = [f"{r.getrandbits(24):06x}" for _ in range(7)]
        return {
            "type": "object",
            "properties": {n: node(depth - 1) for n in names},
            "required": names,
            "additionalProperties": False,
        }

    return node(3)


async def ask(http: httpx.AsyncClient, end: float, make: Any, counts: dict[str, int], name: str) -> None:
    loop = asyncio.get_running_loop()
    while loop.time() < end:
        answer = await http.post("/v1/completions", content=make())
        if answer.status_code != 200:
            raise SystemExit(f"{name}: {answer.status_code} {answer.text[:300]}")
        counts[name] = counts.get(name, 0) + 1


def buckets(text: str) -> dict[float, int]:
    found = re.findall(rf"{METRIC}_bucket\{{le=\"([^\"]+)\"[^}}]*\}} (\d+)", text)
    return {float(bound): int(float(count)) for bound, count in found}


def percentile(counts: dict[float, int], share: float) -> float:
    total = counts[float("inf")]
    return next(bound for bound, count in sorted(counts.items()) if count >= share * total)


async def measure(url: str, options: argparse.Namespace) -> None:
    r = random.Random(1)

    def long_prompt() -> bytes:
        # A token a byte on the null device: new words each time, so that no text is known from before.
        words = (f"{r.getrandbits(40):010x}" for _ in range(options.tokens // 11))
        return json.dumps({"prompt": " ".join(words), "max_tokens": 4}).encode()

    def with_schema() -> bytes:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(r.getrandbits(60))}}
        return json.dumps({"prompt": "x", "max_tokens": 4, "response_format": form}).encode()

    counts: dict[str, int] = {}
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        before = buckets((await http.get("/metrics")).text)
        end = asyncio.get_running_loop().time() + options.seconds
        prompts = [ask(http, end, long_prompt, counts, "prompts") for _ in range(options.clients)]
        schemas = [ask(http, end, with_schema, counts, "schemas") for _ in range(options.schemas)]
        await asyncio.gather(*prompts, *schemas)
        after = buckets((await http.get("/metrics")).text)
    lag = {bound: count - before[bound] for bound, count in after.items()}
    print(f"{counts} in {options.seconds} s; {lag[float('inf')]} looks at the loop")
    for share in (0.5, 0.9, 0.99, 1.0):
        print(f"p{100 * share:g} lag <= {1e3 * percentile(lag, share):g} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--schemas", type=int, default=5)
    options = parser.parse_args()
    command = [*SERVE, "--max-model-len", str(options.tokens + 1024)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(LISTENING):
                asyncio.run(measure(line.strip().removeprefix(LISTENING), options))
                return
        raise SystemExit("the server ended before it listened")
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
