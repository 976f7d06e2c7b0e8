"""The names of options: one table for command line, environment, config file and `LLM(...)`.

An option is named by words joined with underscores, as `max_model_len`. The command line writes it as
`--max-model-len`, the config file as `max-model-len`, the environment as `PEGAINFER_MAX_MODEL_LEN`. Defaults
and help texts stand in the config dataclasses; this module holds what their field names do not say: public
names, the names of other engines for the same meaning, and how text becomes a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pegainfer.contract.errors import ConfigError

# Fields whose option has another name, the one that users of other engines know.
NAMES = {
    "activation": "activation_dtype",
    "api": "backend",
    "backend": "device",
    "kv_dtype": "kv_cache_dtype",
    "max_slots": "max_num_seqs",
    "model_path": "model",
}
# Names that vLLM, SGLang or llama-server have for an option of the same meaning.
ALIASES: dict[str, tuple[str, ...]] = {
    "activation_dtype": ("dtype",),
    "admin_key": ("admin_api_key",),
    "chat_template": ("chat_template_file",),
    "data_parallel_size": ("dp_size", "dp"),
    "kv_cache_memory": ("kv_cache_memory_bytes",),
    "max_header_bytes": ("h11_max_incomplete_event_size",),
    "max_model_len": ("context_length",),
    "max_num_seqs": ("max_running_requests", "parallel"),
    "max_prefill_tokens": ("max_num_batched_tokens",),
    "model": ("model_path", "hf_repo"),
    "prefix_cache": ("enable_prefix_caching",),
    "request_chat_template": ("trust_request_chat_template",),
    "seed": ("random_seed",),
    "served_model_name": ("alias",),
    "ssl_certfile": ("ssl_cert_file",),
    "ssl_keyfile": ("ssl_key_file",),
    "tensor_parallel_size": ("tp_size", "tp"),
    "tokenizer": ("tokenizer_path",),
    "watchdog_seconds": ("watchdog_timeout",),
}
# Names whose meaning is the opposite: `enforce_eager` is `no-cuda-graph`.
OPPOSITES: dict[str, tuple[str, ...]] = {
    "cuda_graph": ("enforce_eager", "disable_cuda_graph"),
    "prefix_cache": ("disable_radix_cache",),
}
# One-letter names, of the command line alone.
LETTERS: dict[str, tuple[str, ...]] = {"model": ("-m",), "quantization": ("-q",), "threads": ("-t",)}
# Options that take several values after one name on the command line: `--api-key a b`.
SEVERAL = frozenset({"served_model_name", "api_key", "admin_key", "allowed_origin", "allowed_host"})
# The dataclasses whose options the environment may set: what is set there holds for every command.
IN_ENVIRONMENT = frozenset(
    {"ModelFlags", "EngineConfig", "SchedulerConfig", "HttpConfig", "FleetFlags", "BatchFlags"}
)
ENVIRONMENT_PREFIX = "PEGAINFER_"
# Set by the front itself, which adds them to the keys of the command line.
KEYS = frozenset({"api_key", "admin_key"})

_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_THOUSANDS = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DTYPES = {
    "float32": "f32", "float": "f32", "bfloat16": "bf16", "float16": "f16", "half": "f16", "fp8_e4m3": "fp8",
}  # fmt: skip


def name_of(field: str) -> str:
    """The option that sets a field."""
    return NAMES.get(field, field)


def flag_of(option: str) -> str:
    """'--max-model-len' of 'max_model_len'."""
    return "--" + option.replace("_", "-")


def variable_of(option: str) -> str:
    """'PEGAINFER_MAX_MODEL_LEN' of 'max_model_len'."""
    return ENVIRONMENT_PREFIX + option.upper()


def parse_bytes(text: str) -> int:
    """'512MiB', '2G' or '1048576' as bytes; units are powers of 1,024. Raises ConfigError."""
    body = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = body[-1:] if body[-1:] in _BYTES and body[-1:].isalpha() else ""
    try:
        value = float(body.removesuffix(unit)) * _BYTES[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(
            "not a size", expected="a number with an optional K, M, G or T, as 512MiB", got=text
        )
    return int(value)


def parse_count(text: str) -> int:
    """'4096', '4k' (4,000), '4K' (4,096) or '2.5k' as a whole number, which is how vLLM reads them.

    Raises ConfigError.
    """
    body = text.strip()
    unit = _THOUSANDS.get(body[-1:], 1)
    number = body[:-1] if unit != 1 else body
    try:
        # As in vLLM, only decimal units take a fraction: 2.5K would be no whole number of anything.
        value = float(number) * unit if body[-1:].islower() else int(number) * unit
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise ConfigError(
            "not a whole number", expected="as 4096, 4k (4,000) or 4K (4,096)", got=text
        ) from None
    return int(value)


def parse_duration(text: str) -> float:
    """'300', '5m', '1h' or '1.5d' as seconds; below 0 stands for ever. Raises ConfigError."""
    body = text.strip().lower()
    unit = _SECONDS.get(body[-1:], 0)
    try:
        return float(body[:-1] if unit else body) * (unit or 1)
    except ValueError:
        raise ConfigError(
            "not a duration", expected="seconds, or a number with s, m, h or d, as 5m", got=text
        ) from None


def parse_dtype(text: str) -> str:
    """'bfloat16' as 'bf16', and its like; other words stay as they are."""
    return _DTYPES.get(text, text)


# By the `parse` of a field's metadata: how text becomes its value.
PARSERS: dict[str, Callable[[str], Any]] = {
    "bytes": parse_bytes,
    "count": parse_count,
    "duration": parse_duration,
    "dtype": parse_dtype,
}
