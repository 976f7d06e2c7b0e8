"""From files and options to a runner's bounds; each fault is one error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from pegainfer.app.assemble import build_engine
from pegainfer.app.bounds import BLOCK_SIZE, DEFAULT_PREFILL_TOKENS, DEFAULT_SLOTS, runner_info
from pegainfer.app.config import EngineConfig
from pegainfer.app.load import open_model
from pegainfer.contract.errors import ConfigError, ModelFileError, PegaError, UnsupportedError
from pegainfer.contract.step import PageGroup, RunnerInfo
from pegainfer.engine.config import SchedulerConfig
from pegainfer.engine.scheduler import Scheduler
from pegainfer.models.llama import engine as llama
from pegainfer.models.llama.weights import LlamaWeights
from pegainfer.runner.model import LineModel
from tests.support.modelfiles import gguf_bytes
from tests.support.tinymodel import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    MODELS,
    VOCAB,
    gguf_metadata,
    gguf_tensors,
    write_checkpoint,
    write_gguf,
)

MODEL = MODELS["tied_f32"]  # trained for 256 tokens
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * BLOCK_SIZE * 4  # in f32


def bounds(folder: Path, *, scheduler: SchedulerConfig | None = None, **options: Any) -> RunnerInfo:
    with open_model(write_checkpoint(MODEL, folder)) as (model, _):
        return runner_info(model, EngineConfig(**options), scheduler or SchedulerConfig())


def test_both_kinds_of_file_open_under_one_name(tmp_path: Path) -> None:
    for path in (
        write_checkpoint(MODEL, tmp_path / "hf"),
        write_gguf(MODEL, tmp_path / "m.gguf", lambda _: "f16"),
    ):
        with open_model(path) as (model, architecture):
            assert architecture == "LlamaForCausalLM"
            assert (model.vocab_size, model.max_position_embeddings) == (VOCAB, 256)


def test_a_gguf_in_parts(tmp_path: Path) -> None:
    tensors = gguf_tensors(MODEL, lambda _: "f16")
    for i, held in enumerate((tensors[:3], tensors[3:])):
        metadata = gguf_metadata(MODEL) if i == 0 else {}
        content = gguf_bytes(metadata | {"split.no": i, "split.count": 2}, held)
        (tmp_path / f"m-0000{i + 1}-of-00002.gguf").write_bytes(content)
    with open_model(write_gguf(MODEL, tmp_path / "m.gguf", lambda _: "f16")) as (whole, _):
        wanted = {name: w.values() for name, w in whole.tensors(64).items()}
    with open_model(tmp_path / "m-00002-of-00002.gguf") as (model, architecture):
        assert architecture == "LlamaForCausalLM"
        found = model.tensors(64)
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            np.testing.assert_array_equal(found[name].values(), values, err_msg=name)


def test_default_bounds(tmp_path: Path) -> None:
    info = bounds(tmp_path)
    assert info.max_model_len == 256
    assert info.max_slots == DEFAULT_SLOTS
    # Decodes do not take the place of prompt tokens.
    assert info.max_tokens == min(DEFAULT_PREFILL_TOKENS, 256) + DEFAULT_SLOTS
    assert info.vocab_size == VOCAB
    (group,) = info.kv.groups
    assert isinstance(group, PageGroup)
    assert (group.block_size, group.bytes_per_block) == (BLOCK_SIZE, BLOCK_BYTES)
    assert info.num_blocks[0] >= 256 // BLOCK_SIZE


def test_bounds_that_were_asked_for(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(max_slots=3, max_prefill_tokens=32)
    info = bounds(tmp_path, scheduler=scheduler, max_model_len=100, kv_cache_memory=20 * BLOCK_BYTES + 5)
    assert (info.max_model_len, info.max_slots, info.max_tokens, info.num_blocks) == (100, 3, 35, (20,))


def test_keys_and_values_in_half_the_memory(tmp_path: Path) -> None:
    assert bounds(tmp_path, kv_cache_memory=40 * BLOCK_BYTES, kv_dtype="auto").num_blocks == (40,)
    assert bounds(tmp_path, kv_cache_memory=40 * BLOCK_BYTES, kv_dtype="f16").num_blocks == (80,)
    assert bounds(tmp_path, kv_cache_memory=40 * BLOCK_BYTES, kv_dtype="fp8").num_blocks == (160,)


def test_too_little_memory_lowers_the_default_length_but_not_a_wish(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = bounds(tmp_path, kv_cache_memory=5 * BLOCK_BYTES)
    assert (info.max_model_len, info.num_blocks) == (5 * BLOCK_SIZE, (5,))
    assert "max_model_len lowered to 80" in caplog.text
    with pytest.raises(ConfigError, match=r"cannot hold one sequence.*raise kv_cache_memory, or lower"):
        bounds(tmp_path, kv_cache_memory=5 * BLOCK_BYTES, max_model_len=81)
    # In full: rounded to whole MiB both numbers could be the same.
    with pytest.raises(ConfigError, match=r"sequence.*≥ (\d+\.\d\d) MiB for 256 tokens; got \d+\.\d\d MiB"):
        bounds(tmp_path, kv_cache_memory=BLOCK_BYTES - 1)


def test_a_length_beyond_the_models_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exceeds what the model was trained for; expected ≤ 256; got 257"):
        bounds(tmp_path, max_model_len=257)


def test_the_engine_says_what_it_is(tmp_path: Path) -> None:
    config = EngineConfig(backend="reference", kv_cache_memory=1 << 20)
    engine = build_engine(write_checkpoint(MODEL, tmp_path), "tiny", config, SchedulerConfig(max_logprobs=4))
    engine.runner.close()
    info = engine.info
    assert (info.model, info.architecture, info.device) == ("tiny", "LlamaForCausalLM", "reference (NumPy)")
    assert (info.vocab_size, info.max_model_len, info.block_size) == (VOCAB, 256, BLOCK_SIZE)
    assert (info.num_blocks, info.max_logprobs) == ((1 << 20) // BLOCK_BYTES, 4)
    assert set(info.startup_seconds) == {"read", "pack"}


def test_a_line_may_bring_its_own_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Policy(Scheduler):
        pass

    plain = llama.model

    def model(weights: LlamaWeights, ranks: int) -> LineModel:
        return replace(plain(weights, ranks), make_policy=Policy)

    config, scheduler = EngineConfig(backend="reference", kv_cache_memory=1 << 20), SchedulerConfig()
    folder = write_checkpoint(MODEL, tmp_path)
    for make, policy in ((plain, Scheduler), (model, Policy)):
        monkeypatch.setattr(llama, "model", make)
        engine = build_engine(folder, "tiny", config, scheduler)
        assert type(engine.policy(scheduler)) is policy
        engine.runner.close()


def fault(path: Path) -> PegaError:
    with pytest.raises(PegaError) as error, open_model(path):
        pass
    assert "\n" not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("architectures", "shown"),
    [
        (["GPT2LMHeadModel"], "got 'GPT2LMHeadModel'"),
        ([], "got []"),
        (None, "got None"),
        (["LlamaForCausalLM", "Other"], "got ['LlamaForCausalLM', 'Other']"),
        ({"a": 1}, "got {'a': 1}"),
    ],
)
def test_an_unknown_architecture(architectures: Any, shown: str, tmp_path: Path) -> None:
    write_checkpoint(MODEL, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(MODEL.hf_config() | {"architectures": architectures}))
    error = fault(tmp_path)
    assert isinstance(error, UnsupportedError)
    assert "no model line for this architecture; expected LlamaForCausalLM llama" in str(error)
    assert shown in str(error)


def test_an_unknown_architecture_in_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for value in ({"general.architecture": "gpt2"}, {}):
        path.write_bytes(gguf_bytes(value))
        assert isinstance(fault(path), UnsupportedError)


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1, "a": 2}', '{"a": NaN}', "\x00", "{" * 5000])
def test_a_config_that_is_no_object(content: str, tmp_path: Path) -> None:
    write_checkpoint(MODEL, tmp_path)
    (tmp_path / "config.json").write_text(content)
    assert isinstance(fault(tmp_path), ModelFileError)


def test_missing_files(tmp_path: Path) -> None:
    assert "config.json" in str(fault(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(MODEL.hf_config()))
    assert "no .safetensors file" in str(fault(tmp_path))
    assert isinstance(fault(tmp_path / "gone.gguf"), ModelFileError)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(MODELS["untied_bf16_shards"], tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "shard is missing; expected model-00002-of-00003.safetensors" in str(fault(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, "bad max_model_len; expected a whole number from 2; got 0"),
        ({"threads": True}, "bad threads"),
        ({"kv_cache_memory": 1.5}, "bad kv_cache_memory"),
        ({"activation": "int4"}, "bad activation_dtype; expected auto or int8 or bf16 or f32; got 'int4'"),
        ({"kv_dtype": "fp4"}, "bad kv_cache_dtype"),
        ({"kv_dtype": "bf16"}, "only a GPU keeps"),
        ({"backend": "tpu"}, "bad device"),
        ({"tensor_parallel_size": 0}, "bad tensor_parallel_size; expected a whole number from 1; got 0"),
        ({"data_parallel_size": 2}, "only the null device has data-parallel ranks so far; expected 1; got 2"),
        (
            {"backend": "reference", "tensor_parallel_size": 2},
            "backend reference has one rank; expected 1",
        ),
        ({"gpu_memory_utilization": 1.5}, "bad gpu_memory_utilization"),
        (
            {"load_format": "dummy", "tensor_parallel_size": 2},
            "dummy weights are made up for ranks on GPUs alone",
        ),
        ({"backend": "cuda", "kv_dtype": "f16"}, "expected auto, bf16 or fp8; got f16"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options).check_backend()
    assert message in str(error.value)


def test_a_bad_option_of_kv_events_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="bad kv_events_config"):
        build_engine(tmp_path / "missing", "m", EngineConfig(kv_events_config="{"), SchedulerConfig())
