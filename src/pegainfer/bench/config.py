"""What the user may choose; the flags of `pegainfer bench serve` are made from these fields."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from pegainfer.contract.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
ENDPOINTS = {
    "vllm": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


def _check(right: bool, flag: str, expected: str, got: object) -> None:
    if not right:
        raise ConfigError("a flag of the bench", expected=expected, got=got, where=flag)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Whom to ask."""

    api: Literal["vllm", "openai", "openai-chat"] = field(
        default="openai", metadata={"help": "API of the server: completions (vllm, openai) or chat."}
    )
    base_url: str | None = field(default=None, metadata={"help": "http[s]://host[:port], in place of both."})
    host: str = field(default="127.0.0.1", metadata={"help": "The server's host."})
    port: int = field(default=8000, metadata={"help": "The server's port."})
    endpoint: str | None = field(default=None, metadata={"help": "Path of the API; else the backend's own."})
    model: str | None = field(
        default=None, metadata={"help": "Name of the model; else the first of /v1/models."}
    )
    served_model_name: str | None = field(
        default=None, metadata={"help": "The name to send, where it differs from --model."}
    )
    header: tuple[str, ...] = field(default=(), metadata={"help": "Header as KEY=VALUE; may be repeated."})
    insecure: bool = field(default=False, metadata={"help": "Accept any TLS certificate."})
    ready_check_timeout_sec: float = field(
        default=0.0, metadata={"help": "Seconds to wait for the server to come up."}
    )
    request_timeout: float = field(default=3600.0, metadata={"help": "Seconds after which a request failed."})

    def __post_init__(self) -> None:
        _check(self.request_timeout > 0, "--request-timeout", "> 0", self.request_timeout)


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """How much, and when."""

    num_prompts: int = field(default=1000, metadata={"help": "Requests to send."})
    request_rate: float = field(
        default=math.inf,
        metadata={"help": "Requests a second; inf: all at once, or as --max-concurrency lets."},
    )
    burstiness: float = field(
        default=1.0,
        metadata={
            "help": "Shape of the gamma-distributed gaps: 1 is Poisson, below it bursts, above it even."
        },
    )
    max_concurrency: int | None = field(default=None, metadata={"help": "Most requests at one time."})
    num_warmups: int = field(default=0, metadata={"help": "Requests before the measurement."})
    ramp_up_strategy: Literal["linear", "exponential"] | None = field(
        default=None, metadata={"help": "Let the rate go from --ramp-up-start-rps to --ramp-up-end-rps."}
    )
    ramp_up_start_rps: float | None = field(default=None, metadata={"help": "Rate of the first request."})
    ramp_up_end_rps: float | None = field(default=None, metadata={"help": "Rate of the last request."})
    self_timed: bool | None = field(
        default=None, metadata={"help": "Send when the trace says; on by default for timed_trace."}
    )
    client_processes: int = field(
        default=0, metadata={"help": "Processes to send from [default: by cores and concurrency]."}
    )
    probe_health: bool = field(
        default=False, metadata={"help": "Ask /health twenty times a second meanwhile and time it."}
    )
    seed: int = field(default=0, metadata={"help": "Of prompts, lengths and arrivals."})

    def __post_init__(self) -> None:
        _check(self.num_prompts >= 1, "--num-prompts", "≥ 1", self.num_prompts)
        _check(self.request_rate > 0, "--request-rate", "> 0, or inf", self.request_rate)
        _check(self.burstiness > 0, "--burstiness", "> 0", self.burstiness)
        _check(
            self.max_concurrency is None or self.max_concurrency >= 1,
            "--max-concurrency",
            "≥ 1",
            self.max_concurrency,
        )
        _check(self.num_warmups >= 0, "--num-warmups", "≥ 0", self.num_warmups)
        _check(self.client_processes >= 0, "--client-processes", "≥ 0", self.client_processes)
        _check(self.seed >= 0, "--seed", "≥ 0", self.seed)
        ramp = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            _check(ramp == (None, None), "--ramp-up-start-rps", "--ramp-up-strategy beside it", ramp)
            return
        _check(
            all(r is not None and 0 < r < math.inf for r in ramp),
            "--ramp-up-strategy",
            "--ramp-up-start-rps and --ramp-up-end-rps > 0",
            ramp,
        )
        _check(math.isinf(self.request_rate), "--request-rate", "none beside a ramp-up", self.request_rate)


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """What to send. Lengths are in tokens."""

    dataset_name: Literal["random", "sharegpt", "prefix_repetition", "timed_trace", "custom"] = field(
        default="random", metadata={"help": "random, sharegpt, prefix_repetition, timed_trace or custom."}
    )
    dataset_path: str | None = field(default=None, metadata={"help": "File of the dataset."})
    input_len: int | None = field(default=None, metadata={"help": "The same as --random-input-len."})
    output_len: int | None = field(default=None, metadata={"help": "Output length, whatever the dataset."})
    random_input_len: int = field(default=1024, metadata={"help": "Prompt length."})
    random_output_len: int = field(default=128, metadata={"help": "Output length."})
    random_range_ratio: str = field(
        default="0",
        metadata={"help": 'Lengths vary by this share either way; also as {"input": 0.3, "output": 0.5}.'},
    )
    random_prefix_len: int = field(default=0, metadata={"help": "Tokens before them that all prompts share."})
    prefix_repetition_prefix_len: int = field(default=256, metadata={"help": "Length of a shared prefix."})
    prefix_repetition_suffix_len: int = field(default=256, metadata={"help": "Length of what follows it."})
    prefix_repetition_num_prefixes: int = field(default=10, metadata={"help": "Prefixes."})
    prefix_repetition_output_len: int = field(default=128, metadata={"help": "Output length."})
    sharegpt_output_len: int | None = field(
        default=None, metadata={"help": "Output length, in place of that of the recorded answer."}
    )
    custom_output_len: int = field(
        default=256, metadata={"help": "Output length; -1: the line's own output_tokens."}
    )
    timed_trace_chunk_hash_size: int = field(
        default=16, metadata={"help": "Tokens that one hash id stands for; 512 in the mooncake traces."}
    )
    timed_trace_sec_multiplier: float = field(
        default=1.0, metadata={"help": "Seconds in one unit of the trace's clock; 0.001 for milliseconds."}
    )
    timed_trace_label_timestamp: str = field(default="timestamp", metadata={"help": "Field of the arrival."})
    timed_trace_label_input_length: str = field(
        default="input_length", metadata={"help": "Field of the prompt's length."}
    )
    timed_trace_label_output_length: str = field(
        default="output_length", metadata={"help": "Field of the output's length."}
    )
    timed_trace_label_hash_ids: str = field(default="hash_ids", metadata={"help": "Field of the hash ids."})
    no_oversample: bool = field(
        default=False, metadata={"help": "Send fewer requests rather than repeat those of a short file."}
    )
    disable_shuffle: bool = field(default=False, metadata={"help": "Keep the file's order."})
    vocab_size: int | None = field(
        default=None,
        metadata={"help": "Random ids lie below this [default: the tokenizer's size, else 256]."},
    )

    def __post_init__(self) -> None:
        for name in ("random_input_len", "random_output_len", "prefix_repetition_suffix_len",
                     "prefix_repetition_num_prefixes", "prefix_repetition_output_len",
                     "timed_trace_chunk_hash_size"):  # fmt: skip
            _check(getattr(self, name) >= 1, "--" + name.replace("_", "-"), "≥ 1", getattr(self, name))
        for name in ("input_len", "output_len", "sharegpt_output_len"):
            value = getattr(self, name)
            _check(value is None or value >= 1, "--" + name.replace("_", "-"), "≥ 1", value)
        for name in ("random_prefix_len", "prefix_repetition_prefix_len"):
            _check(getattr(self, name) >= 0, "--" + name.replace("_", "-"), "≥ 0", getattr(self, name))
        _check(self.custom_output_len >= 1 or self.custom_output_len == -1, "--custom-output-len",
               "≥ 1, or -1", self.custom_output_len)  # fmt: skip
        _check(self.vocab_size is None or self.vocab_size >= 64, "--vocab-size", "≥ 64", self.vocab_size)
        needs_file = self.dataset_name in ("sharegpt", "timed_trace", "custom")
        _check(not needs_file or self.dataset_path is not None, "--dataset-path",
               f"a file for {self.dataset_name}", None)  # fmt: skip
        self.range_ratios()

    def range_ratios(self) -> tuple[float, float]:
        """Of the input's and the output's length. Raises ConfigError."""
        try:
            value = json.loads(self.random_range_ratio)
            pair = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
            ratios = float(pair[0]), float(pair[1])
        except (ValueError, TypeError, KeyError):
            ratios = (-1.0, -1.0)
        _check(
            all(0 <= r < 1 for r in ratios), "--random-range-ratio", "0 ≤ ratio < 1", self.random_range_ratio
        )
        return ratios


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Goes into each request where it was given."""

    ignore_eos: bool = field(default=False, metadata={"help": "Let every answer reach its full length."})
    temperature: float | None = field(default=None, metadata={"help": "Temperature."})
    top_p: float | None = field(default=None, metadata={"help": "Top-p."})
    top_k: int | None = field(default=None, metadata={"help": "Top-k."})
    min_p: float | None = field(default=None, metadata={"help": "Min-p."})
    frequency_penalty: float | None = field(default=None, metadata={"help": "Frequency penalty."})
    presence_penalty: float | None = field(default=None, metadata={"help": "Presence penalty."})
    repetition_penalty: float | None = field(default=None, metadata={"help": "Repetition penalty."})
    logprobs: int | None = field(default=None, metadata={"help": "Log probabilities of so many tokens."})
    extra_body: str | None = field(default=None, metadata={"help": "JSON object to add to each request."})
    stream_response: bool = field(
        default=True, metadata={"help": "Stream the answers; off: one JSON body, only its latency is timed."}
    )

    def __post_init__(self) -> None:
        self.fields(chat=False)

    def fields(self, *, chat: bool) -> dict[str, Any]:
        """The JSON fields that every request carries. Raises ConfigError."""
        names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
                 "repetition_penalty")  # fmt: skip
        out = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.ignore_eos:
            out["ignore_eos"] = True
        if self.logprobs is not None:
            out |= {"logprobs": True, "top_logprobs": self.logprobs} if chat else {"logprobs": self.logprobs}
        if self.stream_response:
            out |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.extra_body is not None:
            try:
                extra = json.loads(self.extra_body)
            except ValueError:
                extra = None
            _check(isinstance(extra, dict), "--extra-body", "a JSON object", self.extra_body)
            out |= extra
        return out


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What is said and saved."""

    label: str | None = field(default=None, metadata={"help": "Name of the run [default: the backend]."})
    percentile_metrics: str = field(
        default="ttft,tpot,itl", metadata={"help": f"Metrics to report, of {', '.join(METRICS)}."}
    )
    metric_percentiles: str = field(default="99", metadata={"help": "Percentiles, as 50,90,99."})
    goodput: tuple[str, ...] = field(
        default=(), metadata={"help": "Bound as METRIC:MS, as ttft:200; a good request meets all of them."}
    )
    metadata: tuple[str, ...] = field(default=(), metadata={"help": "KEY=VALUE to save; may be repeated."})
    save_result: bool = field(default=False, metadata={"help": "Save the figures as JSON."})
    save_detailed: bool = field(default=False, metadata={"help": "Save each request's figures, too."})
    append_result: bool = field(default=False, metadata={"help": "Append to the file as a line."})
    result_dir: str | None = field(default=None, metadata={"help": "Folder of the results."})
    result_filename: str | None = field(default=None, metadata={"help": "Name of the results' file."})
    plot_timeline: bool = field(
        default=False, metadata={"help": "Save a page with distributions, timeline and throughput."}
    )
    plot_png: bool = field(default=False, metadata={"help": "Save them as PNG (needs matplotlib)."})
    disable_tqdm: bool = field(default=False, metadata={"help": "No progress bar."})

    def __post_init__(self) -> None:
        unknown = [m for m in self.metrics() if m not in METRICS]
        _check(not unknown, "--percentile-metrics", f"some of {', '.join(METRICS)}", ", ".join(unknown))
        self.percentiles()
        self.slos()
        self.metadata_items()

    def metrics(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.percentile_metrics.split(",") if name.strip())

    def percentiles(self) -> tuple[float, ...]:
        """Raises ConfigError."""
        try:
            values = tuple(float(part) for part in self.metric_percentiles.split(","))
        except ValueError:
            values = (-1.0,)
        _check(all(0 <= p <= 100 for p in values), "--metric-percentiles", "numbers from 0 to 100",
               self.metric_percentiles)  # fmt: skip
        return values

    def slos(self) -> dict[str, float]:
        """Most milliseconds by metric. Raises ConfigError."""
        out: dict[str, float] = {}
        for item in self.goodput:
            name, _, value = item.partition(":")
            try:
                out[name] = float(value)
            except ValueError:
                out[name] = -1.0
            right = name in GOODPUT_METRICS and 0 <= out[name] < math.inf
            _check(right, "--goodput", f"METRIC:MS with one of {', '.join(GOODPUT_METRICS)}", item)
        return out

    def metadata_items(self) -> dict[str, str]:
        """Raises ConfigError."""
        out = dict(item.partition("=")[::2] for item in self.metadata)
        _check(all("=" in item for item in self.metadata), "--metadata", "KEY=VALUE", self.metadata)
        return out
