"""The options of LLM(...): the names of the command line, of other engines, and how texts are read."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.llm_options import read_options, split
from pegainfer.contract.errors import ConfigError
from tests.support.qwentext import small_json


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"device": "reference"}, "backend", "reference"),
        ({"activation_dtype": "f32"}, "activation", "f32"),
        ({"dtype": "bfloat16"}, "activation", "bf16"),
        ({"kv_cache_dtype": "f16"}, "kv_dtype", "f16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_dtype", "fp8"),
        ({"max_model_len": "4k"}, "max_model_len", 4000),
        ({"kv_cache_memory_bytes": "1GiB"}, "kv_cache_memory", 1 << 30),
        ({"enforce_eager": True}, "cuda_graph", False),
        ({"max_num_seqs": 3}, "max_slots", 3),
        ({"enable_prefix_caching": False}, "prefix_cache", False),
        ({"max_num_batched_tokens": 99}, "max_prefill_tokens", 99),
        ({"tensor_parallel_size": 1, "trust_remote_code": True, "seed": 5}, "seed", 5),
        ({"runner": "pooling", "task": "embed", "convert": "embed", "seed": 5}, "seed", 5),
        ({"enable_sleep_mode": True, "disable_log_stats": False, "seed": 5}, "seed", 5),
        ({"hf_overrides": {}, "pooler_config": None, "speculative_config": None, "seed": 5}, "seed", 5),
    ],
)
def test_names(options: dict[str, Any], field: str, value: Any) -> None:
    engine, scheduler = split(options)
    assert getattr(engine if hasattr(engine, field) else scheduler, field) == value


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"activation": "f32"}, "unknown option.*; expected activation_dtype; got activation"),
        ({"kv_dtype": "f32"}, "expected kv_cache_dtype; got kv_dtype"),
        ({"backend": "cuda"}, "expected device; got backend"),
        ({"max_model_lenght": 5}, "expected activation_dtype aging_seconds .* got max_model_lenght"),
        ({"runner": "draft"}, "^runner draft is not served here; remedy: every model generates, embeds"),
        ({"hf_overrides": {"a": 1}}, "^hf_overrides .* is not served here; remedy: config.json is obeyed"),
        (
            {"quantization": "awq"},
            "^bad quantization; expected int4 or int8 or fp8; got 'awq'; remedy: leave it out",
        ),
        (
            {"max_num_seqs": 1, "max_running_requests": 2},
            "set twice; got max_num_seqs and max_running_requests",
        ),
        ({"dtype": "float8"}, "bad activation_dtype; expected .*; got 'float8'"),
        ({"max_model_len": "many"}, "not a whole number"),
    ],
)
def test_other_names_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        split(options)


def test_auto_is_the_cpu_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = split({"device": "auto"})
    assert engine.backend == "cpu"
    assert "running on the CPU: " in caplog.text


def test_a_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"holds no whole model; .*got no tokenizer\.json"):
        read_options(tmp_path, {}, {})
    with pytest.raises(ConfigError, match=r"no such tokenizer; expected a folder with tokenizer\.json"):
        read_options(tmp_path, {"tokenizer": other}, {})
    (other / "tokenizer.json").write_text("{}")
    assert read_options(tmp_path, {"tokenizer": other}, {}).text_options.tokenizer == other


def test_options_of_the_text_side(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer.json").write_text(small_json())
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 5}')
    plain = read_options(tmp_path, {}, {}).text()
    assert (plain.template, plain.generation) == (None, {"temperature": 0.6, "top_k": 5})
    options = {
        "chat_template": "{{ enable_thinking }}",
        "default_chat_template_kwargs": {"enable_thinking": 7},
        "override_generation_config": {"temperature": 0.2},
    }
    side = read_options(tmp_path, options, {}).text()
    assert side.template is not None and side.template.render([], now=datetime.datetime(2026, 1, 1)) == "7"
    assert side.generation == {"temperature": 0.2, "top_k": 5}
    options |= {"generation_config": "none", "chat_template_file": options.pop("chat_template")}
    assert read_options(tmp_path, options, {}).text().generation == {"temperature": 0.2}
    with pytest.raises(ConfigError, match="bad generation_config; expected auto or none; got 'some'"):
        read_options(tmp_path, {"generation_config": "some"}, {})
