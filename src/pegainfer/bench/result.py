"""The result as JSON, under the keys that users' scripts know, and the files it is written to."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from pegainfer.bench.report import percentile_name, shown_metrics
from pegainfer.bench.run import Run, file_stem
from pegainfer.contract.errors import ConfigError


def result(run: Run, provenance: dict[str, Any]) -> dict[str, Any]:
    """All figures; the arrays of requests only with --save-detailed.

    Args:
        provenance: what the command knows of machine and commit.
    """
    plan, f = run.plan, run.figures
    load = plan.load
    out: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": plan.server.api,
        "endpoint_type": plan.server.api,
        "label": plan.report.label or plan.server.api,
        "model_id": run.model,
        "tokenizer_id": getattr(plan.text, "name", None),
        "num_prompts": len(run.records),
        **plan.report.metadata_items(),
        "dataset_name": plan.dataset.dataset_name,
        "seed": load.seed,
        "request_rate": load.request_rate if not math.isinf(load.request_rate) else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
    }
    if load.ramp_up_strategy is not None:
        out["ramp_up_strategy"] = load.ramp_up_strategy
        out["ramp_up_start_rps"] = load.ramp_up_start_rps
        out["ramp_up_end_rps"] = load.ramp_up_end_rps
    out |= {
        "duration": f.duration,
        "completed": f.completed,
        "failed": f.failed,
        "total_input_tokens": f.total_input,
        "total_output_tokens": f.total_output,
        "request_throughput": f.request_throughput,
        "request_goodput": f.request_goodput,
        "output_throughput": f.output_throughput,
        "total_token_throughput": f.total_token_throughput,
        "max_output_tokens_per_s": f.peak_output,
        "max_concurrent_requests": f.peak_concurrent,
        "failures": f.failures,
    }
    for name in shown_metrics(plan.report, stream=plan.sampling.stream_response):
        values = f.distributions[name]
        out[f"mean_{name}_ms"] = values.mean
        out[f"median_{name}_ms"] = values.median
        out[f"std_{name}_ms"] = values.std
        out |= {f"p{percentile_name(p)}_{name}_ms": value for p, value in values.percentiles}
    return out | _own_items(run) | provenance | (_arrays(run) if plan.report.save_detailed else {})


def _own_items(run: Run) -> dict[str, Any]:
    """What other load clients do not report: /health's latency, the server's and the client's own cost."""
    out: dict[str, Any] = {}
    if run.probe is not None:
        out |= {
            "health_completed": len(run.probe.seconds),
            "health_failed": run.probe.failed,
            "median_health_ms": run.probe.percentile(50),
            "p99_health_ms": run.probe.percentile(99),
            "max_health_ms": run.probe.percentile(100),
        }
    if run.server is not None:
        out |= {
            "server_steps": run.server.steps,
            "server_step_seconds": run.server.step_seconds,
            "server_kinds": run.server.kinds,
            "server_host_seconds": run.server.host_seconds,
            "server_cached_share": run.server.cached_share,
        }
    cost = run.cost
    if cost is None:
        return out
    return out | {
        "client_processes": cost.processes,
        "client_cpu_seconds": cost.cpu_seconds,
        "client_cpu_us_per_event": cost.cpu_per_event * 1e6,
        "client_busiest_core_share": cost.busiest,
        "client_p99_lag_ms": cost.lag_p99 * 1000,
        "client_bottleneck": cost.bottleneck,
    }


def _arrays(run: Run) -> dict[str, Any]:
    """One entry a request, in the order of the dataset."""
    records = run.records
    return {
        "input_lens": run.input_lens,
        "output_lens": run.figures.output_lens,
        "ttfts": [r.ttft for r in records],
        "itls": [r.itls for r in records],
        "tpots": run.figures.tpots,
        "latencies": [r.latency for r in records],
        "start_times": [r.start for r in records],
        "queue_times": [r.queued for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


def base_path(run: Run) -> Path:
    """Where the result goes: .json, .html and .png beside each other. Makes the folder.

    Raises ConfigError.
    """
    report = run.plan.report
    folder = Path(report.result_dir or ".")
    path = folder / (report.result_filename or file_stem(run) + ".json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("the results have no folder", got=error.strerror, where=path.parent) from error
    return path


def save(path: Path, out: dict[str, Any], *, append: bool) -> None:
    """Writes one JSON line, after those that stand there with `append`. Raises ConfigError."""
    try:
        with path.open("a" if append else "w") as file:
            file.write(json.dumps(out, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError("the result cannot be saved", got=error.strerror, where=path) from error
