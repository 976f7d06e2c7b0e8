"""The lines that users of such benches know, and those about the client itself."""

from __future__ import annotations

from pegainfer.bench.config import LoadConfig, ReportConfig
from pegainfer.bench.cost import ClientCost
from pegainfer.bench.health import HealthProbe
from pegainfer.bench.metrics import Figures
from pegainfer.bench.server_cost import ServerCost

WIDTH = 50
NAMES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
STREAM_METRICS = ("ttft", "tpot", "itl")
MAX_REASONS = 10


def percentile_name(p: float) -> str:
    """'99', '99.9'."""
    return str(int(p)) if p == int(p) else str(p)


def shown_metrics(report: ReportConfig, *, stream: bool) -> list[str]:
    """In the order of NAMES. What needs a stream gives way to the whole latency where there is none."""
    wanted = set(report.metrics())
    if not stream:
        wanted = wanted - set(STREAM_METRICS) | {"e2el"}
    return [name for name in NAMES if name in wanted]


def _line(name: str, value: int | float) -> str:
    return f"{name:<40} {value:<10}" if isinstance(value, int) else f"{name:<40} {value:<10.2f}"


def lines(
    figures: Figures,
    load: LoadConfig,
    report: ReportConfig,
    cost: ClientCost | None,
    probe: HealthProbe | None,
    server: ServerCost | None,
    *,
    stream: bool,
) -> list[str]:
    """The summary as it is printed, line by line; None stands for what was not measured."""
    out = [" Serving Benchmark Result ".center(WIDTH, "=")]
    out.append(_line("Successful requests:", figures.completed))
    out.append(_line("Failed requests:", figures.failed))
    if load.max_concurrency is not None:
        out.append(_line("Maximum request concurrency:", load.max_concurrency))
    if load.request_rate != float("inf"):
        out.append(_line("Request rate configured (RPS):", load.request_rate))
    out.append(_line("Benchmark duration (s):", figures.duration))
    out.append(_line("Total input tokens:", figures.total_input))
    out.append(_line("Total generated tokens:", figures.total_output))
    out.append(_line("Request throughput (req/s):", figures.request_throughput))
    if figures.request_goodput is not None:
        out.append(_line("Request goodput (req/s):", figures.request_goodput))
    out.append(_line("Output token throughput (tok/s):", figures.output_throughput))
    out.append(_line("Peak output token throughput (tok/s):", figures.peak_output))
    out.append(_line("Peak concurrent requests:", float(figures.peak_concurrent)))
    out.append(_line("Total token throughput (tok/s):", figures.total_token_throughput))
    for metric in shown_metrics(report, stream=stream):
        name, title = NAMES[metric]
        values = figures.distributions[metric]
        out.append(title.center(WIDTH, "-"))
        out.append(_line(f"Mean {name} (ms):", values.mean))
        out.append(_line(f"Median {name} (ms):", values.median))
        out += [_line(f"P{percentile_name(p)} {name} (ms):", value) for p, value in values.percentiles]
    if probe is not None:
        out += _probe_lines(probe)
    if server is not None:
        out += _server_lines(server, figures)
    if cost is not None:
        out += _client_lines(cost)
    out.append("=" * WIDTH)
    return out


def _probe_lines(probe: HealthProbe) -> list[str]:
    return [
        "Health Probe".center(WIDTH, "-"),
        _line("Probes answered:", len(probe.seconds)),
        _line("Probes failed:", probe.failed),
        _line("Median /health (ms):", probe.percentile(50)),
        _line("P99 /health (ms):", probe.percentile(99)),
        _line("Max /health (ms):", probe.percentile(100)),
    ]


def _server_lines(server: ServerCost, figures: Figures) -> list[str]:
    """The front's stages belong to requests and tokens, the others to steps."""
    per = {"template": figures.completed, "tokenize": figures.completed, "detokenize": figures.total_output}
    units = {"template": "request", "tokenize": "request", "detokenize": "token"}
    out = [
        "Server".center(WIDTH, "-"),
        _line("Steps:", server.steps),
        _line("Mean step (ms):", server.step_seconds / max(1, server.steps) * 1000),
    ]
    if len(server.kinds) > 1:
        for kind, (count, seconds) in server.kinds.items():
            out.append(_line(f"Steps, {kind}:", count))
            out.append(_line(f"Mean step, {kind} (ms):", seconds / count * 1000))
    if figures.duration:
        out.append(_line("Device in steps (%):", server.step_seconds / figures.duration * 100))
    if server.cached_share is not None:
        out.append(_line("Prompt tokens from cache (%):", server.cached_share * 100))
    for stage, seconds in server.host_seconds.items():
        count = max(1, per.get(stage, server.steps))
        out.append(_line(f"Host {stage} (us/{units.get(stage, 'step')}):", seconds / count * 1e6))
    return out


def _client_lines(cost: ClientCost) -> list[str]:
    return [
        "Client".center(WIDTH, "-"),
        _line("Client processes:", cost.processes),
        _line("Client CPU time (s):", cost.cpu_seconds),
        _line("Client CPU per event (us):", cost.cpu_per_event * 1e6),
        _line("Busiest client process (% of a core):", cost.busiest * 100),
        _line("P99 client event loop lag (ms):", cost.lag_p99 * 1000),
    ]


def notes(figures: Figures, cost: ClientCost | None, mismatched: int) -> list[str]:
    """What the reader must know to trust the figures, one line each."""
    out = [f"failed: {count} × {reason}" for reason, count in list(figures.failures.items())[:MAX_REASONS]]
    if len(figures.failures) > MAX_REASONS:
        rest = sum(list(figures.failures.values())[MAX_REASONS:])
        out.append(f"failed: {rest} × other reasons")
    if mismatched:
        out.append(
            f"note: for {mismatched} requests the server counted other prompt lengths than the dataset's "
            "(a chat template adds tokens); the server's counts are reported"
        )
    if figures.uncounted:
        out.append(
            f"note: the server sent no usage for {figures.uncounted} requests; each event counts as one token"
        )
    return out + (cost.verdicts() if cost is not None else [])
