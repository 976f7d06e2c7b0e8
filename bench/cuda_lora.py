"""LoRA on one GPU: time of a decode step with adapters beside one without, and loads beside running decodes.

    python bench/cuda_lora.py [--batch 1 32 64] [--rank 16] [--layers 36] [--context 1024]

A Qwen3-4B-shaped model with seeded weights in bf16, adapters of one rank on all linear layers of its blocks.
Each line is the median over the steps of a run in which every request decodes: in an engine without adapters,
then in one with them, for rows without an adapter, with one adapter and with as many as 16 different ones.
The last lines load adapters from a warm page cache while requests are decoded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

from pegainfer.app.assemble import build_engine
from pegainfer.app.config import EngineConfig
from pegainfer.app.lora import wait
from pegainfer.contract.event import TokenEvent
from pegainfer.contract.request import GenerateRequest, SamplingParams, pack_tokens
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.inprocess import InProcessEngine
from pegainfer.runtime.bf16 import to_bf16

ADAPTERS = 16
SKIPPED = 16  # steps at the start of a run: prompts, and graphs that are made
HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 2560, 9728, 32, 8, 128
# Modules of a layer: [rows, columns].
MODULES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip


def write_model(folder: Path, layers: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936,
                "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
                "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
                "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960,
                "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
            }
        )
    )  # fmt: skip
    return folder


def write_adapter(folder: Path, seed: int, layers: int, rank: int) -> Path:
    """An adapter as PEFT saves it, in bf16. Its values repeat, which takes less time to write."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none",
              "target_modules": [name.partition(".")[2] for name in MODULES]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    values = to_bf16(rng.standard_normal(1 << 20, np.float32) * np.float32(0.02))
    header: dict[str, object] = {}
    parts: list[bytes] = []
    end = 0
    for layer in range(layers):
        for module, (rows, columns) in MODULES.items():
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                data = np.resize(values, shape).tobytes()
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight"
                offsets = [end, end + len(data)]
                header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
                parts.append(data)
                end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    weights = len(text).to_bytes(8, "little") + text + b"".join(parts)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def engine(model: Path, args: argparse.Namespace, *, lora: bool) -> InProcessEngine:
    config = EngineConfig(
        backend="cuda", load_format="dummy", max_model_len=args.context + args.tokens, enable_lora=lora,
        max_loras=ADAPTERS, max_lora_rank=args.rank,
    )  # fmt: skip
    scheduler = SchedulerConfig(max_slots=max(args.batch), prefix_cache=False)
    built = build_engine(model, "m", config, scheduler)
    return InProcessEngine(built.runner, built.info, scheduler)


class Run:
    """Requests that are decoded together, and when the first one's tokens came."""

    _runs = itertools.count()

    def __init__(self, engine: InProcessEngine, names: list[str | None], context: int, tokens: int) -> None:
        rng = np.random.default_rng(1)
        self.times: list[float] = []
        self._ends = threading.Semaphore(0)
        self._count = len(names)
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        run = next(self._runs)
        for i, name in enumerate(names):
            prompt = pack_tokens(rng.integers(0, 150_000, context).tolist())
            request = GenerateRequest(id=f"{run}.{i}", prompt=prompt, sampling=sampling, adapter=name)
            # The last to be admitted has tokens only while all are decoded.
            engine.submit(request, partial(self._sink, last=i == len(names) - 1))

    def _sink(self, event: TokenEvent, last: bool) -> None:
        if last and event.tokens:
            self.times.append(time.perf_counter())
        if event.finish is not None:
            if event.error:
                print(event.error)
            self._ends.release()

    def wait(self) -> list[float]:
        """Milliseconds between tokens, without the first ones."""
        for _ in range(self._count):
            self._ends.acquire()
        return (1e3 * np.diff(self.times[SKIPPED:])).tolist()


def decode(made: InProcessEngine, names: list[str | None], args: argparse.Namespace) -> float:
    """Milliseconds of a step. The first run makes the graphs ready."""
    Run(made, names, args.context, 2 * SKIPPED).wait()
    return statistics.median(Run(made, names, args.context, args.tokens).wait())


def loads(made: InProcessEngine, path: Path, batch: int, args: argparse.Namespace) -> None:
    """Loads an adapter again and again under new names while `batch` requests are decoded."""
    before = Run(made, [None] * batch, args.context, args.tokens)
    quiet = before.wait()
    run = Run(made, [None] * batch, args.context, args.tokens)
    while len(run.times) < 2 * SKIPPED:
        time.sleep(0.001)
    seconds = []
    for i in range(4):
        name = f"again{batch}-{i}"
        began = time.perf_counter()
        wait(partial(made.load_adapter, name, str(path)))
        first = Run(made, [name], 8, 1)
        first.wait()
        seconds.append(time.perf_counter() - began)
        wait(partial(made.unload_adapter, name))
    gaps = run.wait()
    print(
        f"batch {batch:3}: load and first token of an adapter {1e3 * statistics.median(seconds):.1f} ms "
        f"(median of 4); gaps without loads median {statistics.median(quiet):.2f} max {max(quiet):.2f} ms, "
        f"with loads median {statistics.median(gaps):.2f} max {max(gaps):.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = write_model(folder / "model", args.layers)
        paths = [write_adapter(folder / f"a{i}", i, args.layers, args.rank) for i in range(ADAPTERS)]
        plain = engine(model, args, lora=False)
        base = {batch: decode(plain, [None] * batch, args) for batch in args.batch}
        plain.close()
        served = engine(model, args, lora=True)
        for path in paths:
            began = time.perf_counter()
            wait(partial(served.load_adapter, path.name, str(path)))
            print(f"{path.name} read in {1e3 * (time.perf_counter() - began):.1f} ms")
        for batch, alone in base.items():
            print(f"batch {batch:3}: no adapters {alone:.3f} ms")
            mixes: dict[str, list[str | None]] = {
                "rows without one": [None] * batch,
                "one adapter": ["a0"] * batch,
                f"{min(batch, ADAPTERS)} adapters": [f"a{i % ADAPTERS}" for i in range(batch)],
            }
            for label, names in mixes.items():
                took = decode(served, names, args)
                print(f"batch {batch:3}: {label:18} {took:.3f} ms  {took / alone:.3f}x")
        for batch in args.batch:
            loads(served, paths[0], batch, args)
        served.close()


if __name__ == "__main__":
    main()
