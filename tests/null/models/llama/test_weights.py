"""Names, shapes and row order of weights from both kinds of file; each fault is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError, PegaError, UnsupportedError
from pegainfer.models.llama.config import LlamaConfig
from pegainfer.models.llama.weights import LlamaWeights, load_gguf, load_safetensors
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.safetensors import open_safetensors
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes, safetensors_file
from tests.support.tinymodel import (
    MODELS,
    Tiny,
    gguf_metadata,
    gguf_tensors,
    llama3_divisors,
    raw_bytes,
    write_checkpoint,
    write_gguf,
)
from tests.support.weightnames import our_name


def from_checkpoint(folder: Path) -> LlamaWeights:
    config = LlamaConfig.from_hf(json.loads((folder / "config.json").read_text()), "config.json")
    return load_safetensors(config, open_safetensors(folder))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_checkpoint_gives_its_values(model: Tiny, tmp_path: Path) -> None:
    weights = from_checkpoint(write_checkpoint(model, tmp_path))
    wanted = {our_name(name): values for name, values in model.tensors().items()}
    assert set(weights.tensors) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(weights.tensors[name].values(), values, err_msg=name)
        assert weights.formats[name] == ("f32" if values.ndim == 1 else model.dtype)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_gguf_gives_the_values_in_hugging_face_row_order(model: Tiny, dtype: str, tmp_path: Path) -> None:
    """Undoing the converter's permutation of q and k; formats are the tensors' own."""
    same = Tiny(model.name, model.seed, dtype, config=model.config)
    formats: Callable[[str], str] = lambda name: dtype if "ffn" not in name else "f32"  # noqa: E731
    weights = load_gguf(GGUFFile(write_gguf(same, tmp_path / "m.gguf", formats)))
    for name, values in same.tensors().items():
        np.testing.assert_array_equal(weights.tensors[our_name(name)].values(), values, err_msg=name)
    assert weights.formats["layers.0.wq"] == dtype
    assert weights.formats["layers.0.w_up"] == "f32"


def test_the_rotation_is_the_same_from_both_files(tmp_path: Path) -> None:
    model = MODELS["llama3_f16"]
    checkpoint = from_checkpoint(write_checkpoint(model, tmp_path / "hf")).cos_sin(256)
    gguf = load_gguf(GGUFFile(write_gguf(model, tmp_path / "m.gguf", lambda _: "f16"))).cos_sin(256)
    # The file's divisors are float32: an angle of up to 255 radians may differ by 255 · 2^-24 and rounding.
    np.testing.assert_allclose(gguf.values(), checkpoint.values(), atol=6e-5)
    assert np.abs(checkpoint.values()[255] - unscaled(model)[255]).max() > 0.1


def unscaled(model: Tiny) -> np.ndarray[Any, Any]:
    config = LlamaConfig.from_hf(model.hf_config() | {"rope_scaling": None}, "")
    return LlamaWeights(config, {}).cos_sin(256).values()


def test_llama3_scaling_changes_frequencies_as_published() -> None:
    """Short wavelengths stay, long ones stretch by the factor, between them is a blend."""
    divisors = llama3_divisors(MODELS["llama3_f16"])
    assert divisors is not None
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0
    assert 1.0 < divisors[1] < 8.0
    assert (np.diff(divisors) >= 0).all()


def checkpoint_fault(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
    """The error of a checkpoint after `change` (config, tensor entries)."""
    model = MODELS["tied_f32"]
    config = model.hf_config()
    entries = {n: ("F32", v.shape, raw_bytes(v, "f32")) for n, v in model.tensors().items()}
    change(config, entries)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_file(entries))
    with pytest.raises(PegaError) as error:
        from_checkpoint(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    message = checkpoint_fault(tmp_path, lambda c, t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "tensors are missing; expected model.layers.1.mlp.up_proj.weight; got 19 tensors" in message


def test_a_config_with_more_layers_than_the_weights(tmp_path: Path) -> None:
    message = checkpoint_fault(tmp_path, lambda c, t: c.update(num_hidden_layers=3))
    assert "expected model.layers.2.input_layernorm.weight and 8 more" in message


def test_a_config_with_fewer_layers_than_the_weights(tmp_path: Path) -> None:
    message = checkpoint_fault(tmp_path, lambda c, t: c.update(num_hidden_layers=1))
    assert "does not use; expected 11 tensors by name; got model.layers.1." in message


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    entry = ("F32", (64,), bytes(256))
    message = checkpoint_fault(
        tmp_path, lambda c, t: t.update({"model.layers.0.self_attn.q_proj.bias": entry})
    )
    assert "got model.layers.0.self_attn.q_proj.bias" in message


def test_frequencies_of_old_files_are_ignored(tmp_path: Path) -> None:
    model = MODELS["tied_f32"]
    entries = {n: ("F32", v.shape, raw_bytes(v, "f32")) for n, v in model.tensors().items()}
    entries["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (8,), bytes(32))
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config()))
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(entries))
    assert len(from_checkpoint(tmp_path).tensors) == 20


@pytest.mark.parametrize(
    ("field", "value", "tensor", "shapes"),
    [
        (
            "vocab_size",
            161,
            "model.embed_tokens.weight",
            "[161, 64] = [vocab_size, hidden_size]; got [160, 64]",
        ),
        ("intermediate_size", 128, "model.layers.0.mlp.gate_proj.weight", "[128, 64]"),
        ("num_key_value_heads", 4, "model.layers.0.self_attn.k_proj.weight", "[64, 64]"),
        ("hidden_size", 128, "model.embed_tokens.weight", "[160, 128]"),
    ],
)
def test_a_config_that_contradicts_the_weights(
    field: str, value: int, tensor: str, shapes: str, tmp_path: Path
) -> None:
    message = checkpoint_fault(tmp_path, lambda c, t: c.update({field: value}))
    assert f"tensor {tensor} contradicts the config; expected {shapes}" in message


def test_a_tied_head_that_differs(tmp_path: Path) -> None:
    model = MODELS["tied_f32"]
    table = model.tensors()["model.embed_tokens.weight"]

    def with_head(values: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
        entry = ("F32", values.shape, raw_bytes(values, "f32"))
        return lambda c, t: t.update({"lm_head.weight": entry})

    assert "the config ties lm_head to the embedding, but" in checkpoint_fault(tmp_path, with_head(-table))


def test_a_tied_head_that_is_equal_is_ignored(tmp_path: Path) -> None:
    model = MODELS["tied_f32"]
    entries = {n: ("F32", v.shape, raw_bytes(v, "f32")) for n, v in model.tensors().items()}
    entries["lm_head.weight"] = entries["model.embed_tokens.weight"]
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config()))
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(entries))
    assert "lm_head" not in from_checkpoint(tmp_path).tensors


def test_a_head_that_was_left_out_as_a_duplicate(tmp_path: Path) -> None:
    """Writers of safetensors leave equal tensors out; an untied config does not say so."""

    def change(config: dict[str, Any], entries: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = False
        entries.pop("lm_head.weight", None)

    message = checkpoint_fault(tmp_path, change)
    assert "expected lm_head.weight; got" in message
    assert "set tie_word_embeddings in config.json to true if the head is the embedding" in message


def test_a_format_without_kernels_is_named(tmp_path: Path) -> None:
    def change(config: dict[str, Any], entries: dict[str, Any]) -> None:
        entries["model.layers.0.mlp.up_proj.weight"] = ("F64", (96, 64), bytes(96 * 64 * 8))

    message = checkpoint_fault(tmp_path, change)
    assert "tensor model.layers.0.mlp.up_proj.weight: no kernels for this format; expected f32 f16" in message


def gguf_fault(path: Path, change: Callable[[dict[str, Any], dict[str, GGUFTensor]], None]) -> str:
    model = MODELS["llama3_f16"]
    metadata = gguf_metadata(model)
    tensors = {t.name: t for t in gguf_tensors(model, lambda _: "f16")}
    change(metadata, tensors)
    path.write_bytes(gguf_bytes(metadata, list(tensors.values())))
    with GGUFFile(path) as file, pytest.raises((ModelFileError, UnsupportedError)) as error:
        load_gguf(file)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_gguf_without_an_embedding(tmp_path: Path) -> None:
    message = gguf_fault(tmp_path / "m.gguf", lambda m, t: t.pop("token_embd.weight"))
    assert "tensor is missing; expected 'token_embd.weight'" in message


def test_gguf_that_contradicts_its_metadata(tmp_path: Path) -> None:
    message = gguf_fault(tmp_path / "m.gguf", lambda m, t: m.update({"llama.feed_forward_length": 128}))
    assert "blk.0.ffn_gate.weight contradicts the config; expected [128, 64]" in message


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_gguf_with_impossible_divisors(value: float, tmp_path: Path) -> None:
    bad = GGUFTensor("rope_freqs.weight", GGML["f32"], (8,), np.full(8, value, np.float32).tobytes())
    message = gguf_fault(tmp_path / "m.gguf", lambda m, t: t.update({"rope_freqs.weight": bad}))
    assert "rope_freqs.weight: divisors must be above 0" in message
