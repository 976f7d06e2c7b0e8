"""Names, shapes and values of Qwen3's weights from both kinds of file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.weights import Qwen3Weights, load_gguf, load_safetensors
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.safetensors import open_safetensors
from tests.support.modelfiles import gguf_bytes, safetensors_file
from tests.support.tinymodel import raw_bytes, write_checkpoint
from tests.support.tinyqwen3 import MODELS, TinyQwen3, gguf_metadata, gguf_tensors, write_gguf
from tests.support.weightnames import our_name


def from_checkpoint(folder: Path) -> Qwen3Weights:
    config = Qwen3Config.from_hf(json.loads((folder / "config.json").read_text()), "config.json")
    return load_safetensors(config, open_safetensors(folder))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_checkpoint_gives_its_values(model: TinyQwen3, tmp_path: Path) -> None:
    weights = from_checkpoint(write_checkpoint(model, tmp_path))
    wanted = {our_name(name): values for name, values in model.tensors().items()}
    assert set(weights.tensors) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(weights.tensors[name].values(), values, err_msg=name)
        assert weights.tensors[name].dtype == ("f32" if values.ndim == 1 else model.dtype)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_gguf_gives_the_same_values_in_the_same_rows(model: TinyQwen3, tmp_path: Path) -> None:
    with GGUFFile(write_gguf(model, tmp_path / "m.gguf", lambda _: model.dtype)) as file:
        weights = load_gguf(file)
        assert weights.config.tie_word_embeddings is model.hf_config()["tie_word_embeddings"]
        for name, values in model.tensors().items():
            np.testing.assert_array_equal(weights.tensors[our_name(name)].values(), values, err_msg=name)


def test_yarn_stretches_the_table_and_scales_it(tmp_path: Path) -> None:
    model = MODELS["yarn_given_f32"]
    table = from_checkpoint(write_checkpoint(model, tmp_path)).cos_sin(256).values()
    half = table.shape[1] // 2
    # cos² + sin² of each angle is the square of the attention factor that the config gives.
    np.testing.assert_allclose(table[:, :half] ** 2 + table[:, half:] ** 2, 1.3**2, rtol=1e-6)
    # The fastest pair keeps its frequency of one radian a token, the slowest has a quarter of its own.
    np.testing.assert_allclose(table[1, 0], 1.3 * np.cos(1.0), rtol=1e-6)
    slow = 10000.0 ** (-(2 * half - 2) / (2 * half))
    np.testing.assert_allclose(table[200, -1], 1.3 * np.sin(200 * slow / 4), rtol=1e-5)


def test_a_checkpoint_without_head_norms(tmp_path: Path) -> None:
    model = MODELS["tied_bf16"]
    entries = {n: ("BF16", v.shape, raw_bytes(v, "bf16")) for n, v in model.tensors().items()}
    del entries["model.layers.1.self_attn.k_norm.weight"]
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config()))
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(entries))
    with pytest.raises(
        ModelFileError, match=r"missing; expected model.layers.1.self_attn.k_norm.weight; got"
    ):
        from_checkpoint(tmp_path)


def test_head_norms_of_another_size(tmp_path: Path) -> None:
    model = MODELS["untied_f32_shards"]
    folder = write_checkpoint(model, tmp_path)
    config = model.hf_config() | {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"q_norm.weight contradicts the config; expected \[32\]"):
        from_checkpoint(folder)


def test_tensors_of_another_line(tmp_path: Path) -> None:
    """A bias, as Qwen2 has, is no part of this line."""
    model = MODELS["tied_bf16"]
    tensors = gguf_tensors(model, lambda _: "f16")
    extra = tensors[1]._replace(name="blk.0.attn_q.bias")
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(gguf_metadata(model), [*tensors, extra]))
    with (
        GGUFFile(tmp_path / "m.gguf") as file,
        pytest.raises(UnsupportedError, match=r"the qwen3 line does not use; .*got blk.0.attn_q.bias"),
    ):
        load_gguf(file)
