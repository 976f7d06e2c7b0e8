"""Predicted beside measured: rows of serving_table.py, offline.py and `bench engine` at the ledger's prices.

    python bench/simulator_accuracy.py [--commit 601d8d5]

Measured are the newest rows of Qwen3-4B on an H100 in bench/results. The ledger's prices come from
`bench ops` on another card of that kind, so no workload took part in them; they are those of the commit
named, whose kernels are the nearest to the ones that served. One figure in simulate/host.py, what a request
costs beside its steps, was set from the row `ttft warm 128`, which is left out of the errors' statistics.
Prints each row, then the median and the 90th percentile of the errors.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.app.cache import cached_model
from pegainfer.app.config import EngineConfig
from pegainfer.app.simulation import SimulatedEngine, simulated_engine
from pegainfer.bench.config import DatasetConfig, LoadConfig, ReportConfig, SamplingConfig
from pegainfer.cli.simulate_run import Workload, run
from pegainfer.engine.config import SchedulerConfig
from pegainfer.measure import ledger
from pegainfer.measure.cards import priced_card, priced_cpu
from pegainfer.measure.prices import StepWork

RESULTS = Path(__file__).parent / "results"
FITTED = ("ttft warm 128",)  # rows that a constant of the simulator was taken from
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
    "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000,
    "max_position_embeddings": 40960, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip
KEYS = {"output_throughput": "tokens/s", "median_ttft_ms": "TTFT", "median_tpot_ms": "TPOT"}
Compared = tuple[str, str, float, float]  # row, figure, measured, predicted


def engine(commit: str) -> SimulatedEngine:
    """Qwen3-4B on an H100 with prices of one commit."""
    rows = [r for r in ledger.read() if r.commit == commit]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(QWEN3_4B))
        config = EngineConfig(backend="cuda", load_format="dummy", max_model_len=20_000)
        return simulated_engine(path, config, SchedulerConfig(), priced_card("H100", rows), "greedy")


def serving(made: SimulatedEngine) -> Iterator[Compared]:
    """Rows through HTTP."""
    newest = {row["row"]: row for row in read("serving.jsonl") if "H100" in row["device"]}
    for name, row in newest.items():
        for key, predicted in predict(made, name, row).items():
            measured = row[key]
            if measured and not (name.startswith("ttft") and key != "median_ttft_ms"):
                yield name, KEYS[key], measured, predicted


def predict(made: SimulatedEngine, name: str, row: dict[str, Any]) -> dict[str, float]:
    """The row's figures as the simulator has them."""
    count = row["num_prompts"]
    rate = row["request_rate"]
    load = LoadConfig(
        num_prompts=count,
        request_rate=float(rate),
        burstiness=row["burstiness"],
        max_concurrency=row["max_concurrency"],
        seed=row["seed"],
    )
    dataset = DatasetConfig(
        random_input_len=row["total_input_tokens"] // count,
        random_output_len=row["total_output_tokens"] // count,
    )
    workload = Workload("Qwen3-4B", load, dataset, SamplingConfig(temperature=0.0), ReportConfig(), None)
    if "warm" in name:  # the same prompts twice, of which the second time counts
        twice = DatasetConfig(
            dataset_name="prefix_repetition",
            prefix_repetition_num_prefixes=count,
            prefix_repetition_prefix_len=dataset.random_input_len - 1,
            prefix_repetition_suffix_len=1,
            prefix_repetition_output_len=1,
            disable_shuffle=True,
        )
        done = run(made, replace(workload, dataset=twice, load=replace(load, num_prompts=2 * count)))
        warm = [r.ttft for r in done.run.records if r.index % 2]
        return {"median_ttft_ms": float(np.median(warm)) * 1e3}
    f = run(made, workload).run.figures
    return {
        "output_throughput": f.output_throughput,
        "median_ttft_ms": f.distributions["ttft"].median,
        "median_tpot_ms": f.distributions["tpot"].median,
    }


def offline(made: SimulatedEngine) -> Iterator[Compared]:
    """Plain decoding in the engine, ms a step: the mean over the answer's contexts."""
    newest = {(r["batch"], r["context"]): r for r in read("offline.jsonl") if r["case"] == "decode"}
    for (batch, context), row in newest.items():
        contexts = range(context + 1, context + row["tokens"], 8)
        works = [StepWork(batch, batch * n, (), batch) for n in contexts]
        predicted = statistics.mean(made.prices.seconds(work) for work in works)
        yield f"offline decode {batch}", "ms a step", row["ms_step"], predicted * 1e3


def cpu() -> Iterator[Compared]:
    """The default model in the engine, tokens a second; none where it was not fetched or never measured."""
    model = cached_model()
    if model is None:
        return
    config = EngineConfig(max_model_len=8192)
    made = simulated_engine(model, config, SchedulerConfig(), priced_cpu(ledger.read()), "greedy")
    made = replace(made, host=replace(made.host, request=0.0))  # no HTTP
    newest = {
        (r["case"], r["batch"], r["tokens"], r["context"]): r["tok_s"]
        for r in read("engine.jsonl")
        if "avx512, 2 threads, bf16" in r["device"]
    }
    for name, cases in (("engine.jsonl", newest), ("cpu-figures.md", cpu_figures())):
        for (case, batch, tokens, context), measured in cases.items():
            prompt, answer = (tokens, 1) if case == "prefill" else (context, tokens)
            dataset = DatasetConfig(random_input_len=prompt, random_output_len=answer)
            load, sampling = LoadConfig(num_prompts=batch), SamplingConfig(temperature=0.0)
            workload = Workload("default", load, dataset, sampling, ReportConfig(), None)
            found = run(made, workload).run.figures.distributions
            took = found["ttft"].median / tokens if case == "prefill" else found["tpot"].median / batch
            label = f"{name}: {case} {tokens}" + (f", {batch} at {context}" if case == "decode" else "")
            yield label, "tokens/s", measured, 1e3 / took


def cpu_figures() -> dict[tuple[str, int, int, int], float]:
    """Tokens a second of the Q4_1 file in docs/cpu-figures.md, by kind, sequences, tokens and context."""
    found = {}
    for line in (RESULTS.parents[1] / "docs" / "cpu-figures.md").read_text().splitlines():
        what, *rest = (cell.strip() for cell in line.strip("| ").split("|"))
        numbers = [int(n) for n in re.findall(r"\d+", what.removeprefix("Q4_1"))]
        if not what.startswith("Q4_1, ") or len(rest) < 2:
            continue
        speed = float(rest[1].replace(",", ""))
        if "sequences" in what:  # 16 tokens each, then 64 steps: compare_llamacpp.py's case `batch`
            found["decode", numbers[0], 64, 16] = speed
        elif "prefill" in what:
            found["prefill", 1, numbers[0], 0] = speed
        else:
            found["decode", 1, numbers[0], numbers[1]] = speed
    return found


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", default="601d8d5", help="of the prices")
    made = engine(parser.parse_args().commit)
    report([*serving(made), *offline(made)])
    report(list(cpu()))


def report(compared: list[Compared]) -> None:
    """A table, and the errors' statistics."""
    if not compared:
        return
    print("| row | figure | measured | predicted | error |\n|---|---|---|---|---|")
    errors = []
    for name, figure, measured, predicted in compared:
        error = predicted / measured - 1
        held_out = name not in FITTED
        if held_out:
            errors.append(abs(error))
        note = "" if held_out else " (fitted)"
        print(f"| {name} | {figure} | {measured:.4g} | {predicted:.4g} | {error:+.1%}{note} |")
    p90 = float(np.percentile(errors, 90))
    print(
        f"\n{len(errors)} figures: median error {statistics.median(errors):.1%}, 90th percentile {p90:.1%}\n"
    )


if __name__ == "__main__":
    main()
