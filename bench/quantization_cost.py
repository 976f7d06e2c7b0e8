"""Speed, memory and perplexity of the default model's weights in several formats, on the CPU.

The default model's file is Q4_1, so that its own values meet Q4_1's levels again. Here the channels of the
residual stream and of the feed-forward layers are permuted first. That is a symmetry of the model: it
computes the same function, but other values share a block, and each format errs as it does on any weights.
The values are stored as a bf16 GGUF file, which is the plain model; the formats are made from it, without
calibration.

    python bench/quantization_cost.py --text tests/data/smollm2/text.txt

Prints a table in Markdown. Each format is measured in a process of its own, in turn, for some rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pegainfer.app.cache import cached_model
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.gguf import GGUFFile
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes
from tests.support.requantised import plain_metadata, requantised

Array = np.ndarray[Any, Any]
FILES = ("q5_1", "q5_0", "iq4_nl", "mxfp4")
INPUTS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")  # read the residual stream
NORMS = ("attn_norm", "ffn_norm", "output_norm")
SEED = 7


def permuted(source: Path, target: Path) -> Path:
    """Writes the model in bf16 with its channels in another order."""
    rng = np.random.default_rng(SEED)
    with GGUFFile(source) as file:
        hidden = rng.permutation(file.tensors["output_norm.weight"].shape[0])
        inner = rng.permutation(file.tensors["blk.0.ffn_gate.weight"].shape[0])
        table, contents, at = [], [], 0
        for name, info in file.tensors.items():
            values = dequantize(info.format, file.part(name).bytes(), info.shape)
            values = _reorder(name.removesuffix(".weight").rpartition(".")[2], values, hidden, inner)
            form, data = ("f32", values.astype("<f4")) if values.ndim == 1 else ("bf16", _bf16(values))
            table.append(GGUFTensor(name, GGML[form], info.shape, b"", at))
            contents.append(data.tobytes())
            at += -(-len(contents[-1]) // 32) * 32
        with target.open("wb") as out:
            out.write(gguf_bytes(plain_metadata(file.metadata), table, alignment=32))
            for data in contents:
                out.write(data + bytes(-len(data) % 32))
    return target


def _reorder(part: str, values: Array, hidden: Array, inner: Array) -> Array:
    if part in NORMS:
        return values[hidden]
    if part in INPUTS or part in ("token_embd", "output"):
        values = values[:, hidden]
    if part in ("ffn_gate", "ffn_up"):
        values = values[inner]
    if part == "ffn_down":
        values = values[:, inner]
    return values[hidden] if part in ("attn_output", "ffn_down") else values


def _bf16(values: Array) -> Array:
    bits = values.view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")


def measure(model: Path, options: list[str], text: str, rounds: int, folder: Path) -> dict[str, float]:
    """Perplexity, and medians of prefill and decode in tokens a second."""
    out = folder / "results.jsonl"
    out.unlink(missing_ok=True)
    base = [sys.executable, "-m", "pegainfer.cli.main", "bench"]
    rates = ["--rounds", str(rounds), "--no-by-op", "--prefill", "512", "--batch", "1"]
    for command in (["perplexity", "--text", text], ["engine", *rates]):
        line = [*base, command[0], str(model), *command[1:], *options, "--output", str(out)]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {"perplexity": rows[0]["perplexity"]}
    return found | {row["case"]: row["tok_s"] for row in rows[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=2, help="times that all formats are measured in turn")
    args = parser.parse_args()
    source = cached_model()
    if source is None:
        parser.error("the default model is not here: run `pegainfer pull`")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = permuted(source, folder / "bf16.gguf")
        runs: list[tuple[str, Path, list[str]]] = [
            ("bf16", plain, []),
            ("`--quantization int8`", plain, ["--quantization", "int8"]),
            ("`--quantization int4`", plain, ["--quantization", "int4"]),
            *((form.upper(), requantised(plain, folder / f"{form}.gguf", form), []) for form in FILES),
        ]
        found: dict[str, list[dict[str, float]]] = {label: [] for label, _, _ in runs}
        for _ in range(args.passes):
            for label, model, options in runs:
                found[label].append(measure(model, options, args.text, args.rounds, folder))
    first = found["bf16"][0]["perplexity"]
    print("| weights | prefill 512, tok/s | decode 128, tok/s | perplexity |\n|---|---|---|---|")
    for label, each in found.items():
        prefill, decode = (median(m[case] for m in each) for case in ("prefill", "decode"))
        value = each[0]["perplexity"]
        cost = "" if label == "bf16" else f" ({value / first - 1:+.1%})"
        print(f"| {label} | {prefill:.0f} | {decode:.0f} | {value:.2f}{cost} |")


if __name__ == "__main__":
    main()
