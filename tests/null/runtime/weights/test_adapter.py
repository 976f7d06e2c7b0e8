"""Adapter folders: factors and scale, and what of a file cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.models.qwen3.config import Qwen3Config
from pegainfer.models.qwen3.weights import TABLE
from pegainfer.ops.adapters import adapted_weights, base_modules
from pegainfer.runtime.weights.adapter import BaseModule, read_adapter
from tests.support.modelfiles import safetensors_file
from tests.support.tinylora import ADAPTERS, BASES, PREFIX, write_adapter

BASE = BASES["qwen3_untied"]
MODULES = base_modules(adapted_weights(TABLE, Qwen3Config.from_hf(BASE.hf_config(), "config.json")))
PLAIN = ADAPTERS["plain"]
Q = "model.layers.0.self_attn.q_proj"


def write(folder: Path, tensors: Mapping[str, Any], **config: Any) -> Path:
    """The plain adapter's config over other tensors."""
    write_adapter(PLAIN, BASE, folder, **config)
    entries = {n: ("F32", v.shape, v.astype("<f4").tobytes()) for n, v in tensors.items()}
    (folder / "adapter_model.safetensors").write_bytes(safetensors_file(entries))
    return folder


def test_every_adapter_has_the_factors_that_its_config_names(tmp_path: Path) -> None:
    for name, adapter in ADAPTERS.items():
        read = read_adapter(write_adapter(adapter, BASE, tmp_path / name), MODULES, 16)
        wanted = {m: r for m in MODULES if (r := adapter.ranks(m)) is not None}
        assert {m: f.down.shape[0] for m, f in read.factors.items()} == wanted
        assert read.rank == max(wanted.values())


def test_the_scale_is_in_the_second_factor(tmp_path: Path) -> None:
    tensors = ADAPTERS["rank_stabilised_patterns"].tensors(BASE)
    read = read_adapter(
        write_adapter(ADAPTERS["rank_stabilised_patterns"], BASE, tmp_path), MODULES, 16
    ).factors["model.layers.1.self_attn.v_proj"]
    stored = f"{PREFIX}model.layers.1.self_attn.v_proj"
    # alpha 16, rank 4, rank-stabilised: 16 / 2; bf16 keeps 8 bits
    np.testing.assert_allclose(read.up, 8 * tensors[f"{stored}.lora_B.weight"], rtol=2**-8)
    np.testing.assert_allclose(read.down, tensors[f"{stored}.lora_A.weight"], rtol=2**-8)


def test_digests_tell_contents_apart(tmp_path: Path) -> None:
    one, same, scaled, other = (
        read_adapter(path, MODULES, 16).digest
        for path in (
            write_adapter(PLAIN, BASE, tmp_path / "one"),
            write_adapter(PLAIN, BASE, tmp_path / "same"),
            write_adapter(PLAIN, BASE, tmp_path / "scaled", lora_alpha=16),
            write(tmp_path / "other", {n: v + 1 for n, v in PLAIN.tensors(BASE).items()}),
        )
    )
    assert one == same and len({one, scaled, other}) == 3


def test_a_checkpoint_with_a_vision_tower_names_its_text_model(tmp_path: Path) -> None:
    deep = {
        n.replace("model.model.layers", "model.model.language_model.layers"): v
        for n, v in PLAIN.tensors(BASE).items()
    }
    read = read_adapter(write(tmp_path, deep), MODULES, 16)
    assert Q in read.factors and len(read.factors) == len(PLAIN.tensors(BASE)) // 2


def refused(folder: Path, kind: type[Exception], match: str, most: int = 16) -> None:
    with pytest.raises(kind, match=match):
        read_adapter(folder, MODULES, most)


def test_tensors_beside_the_factors_are_refused_by_name(tmp_path: Path) -> None:
    tensors = PLAIN.tensors(BASE)
    for extra, reason in (
        (f"{PREFIX}lm_head.weight", "replaces a weight of the base"),
        (f"{PREFIX}model.embed_tokens.base_layer.weight", "replaces a weight of the base"),
        (f"{PREFIX}{Q}.lora_magnitude_vector", "does not name the module"),
        (f"{PREFIX}lm_head.lora_A.weight", "does not name the module"),
        (f"{PREFIX}model.layers.9.mlp.router.lora_A.weight", "no such linear module"),
    ):
        folder = write(tmp_path / extra, tensors | {extra: np.zeros((4, 64))})
        refused(folder, UnsupportedError, f"tensor {extra}.*{reason}")


def test_tensors_that_are_missing_or_misshapen(tmp_path: Path) -> None:
    tensors, name = PLAIN.tensors(BASE), f"{PREFIX}{Q}.lora_B.weight"
    rest = {n: v for n, v in tensors.items() if n != name}
    refused(write(tmp_path / "a", rest), ModelFileError, f"no tensor {name}")
    refused(write(tmp_path / "b", rest | {name: tensors[name].T}), ModelFileError, "contradicts")
    bad = tensors[name].copy()
    bad[3, 1] = np.nan
    refused(write(tmp_path / "c", rest | {name: bad}), ModelFileError, "not finite")
    refused(write(tmp_path / "d", tensors, r=5), ModelFileError, "contradicts")


def test_ranks_beyond_the_engines_are_refused(tmp_path: Path) -> None:
    refused(write_adapter(PLAIN, BASE, tmp_path), UnsupportedError, "expected at most 3; got 4", most=3)


def test_folders_that_hold_no_adapter(tmp_path: Path) -> None:
    refused(tmp_path / "none", ModelFileError, "cannot read file")
    folder = write_adapter(PLAIN, BASE, tmp_path / "pickled")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    refused(folder, ModelFileError, "remedy: save it with PEFT's safe_serialization=True")
    refused(write(tmp_path / "nothing", {}, target_modules=["c_attn"]), ModelFileError, "adapts no module")


def test_an_embedding_has_its_factors_the_other_way_round(tmp_path: Path) -> None:
    folder = write_adapter(ADAPTERS["embedding_and_head"], BASE, tmp_path)
    read = read_adapter(folder, MODULES, 16).factors
    vocab, width = MODULES["model.embed_tokens"].rows, MODULES["model.embed_tokens"].columns
    assert MODULES["model.embed_tokens"] == BaseModule(160, 64, embedding=True)
    assert (read["model.embed_tokens"].down.shape, read["model.embed_tokens"].up.shape) == (
        (4, vocab), (width, 4),
    )  # fmt: skip
    assert (read["lm_head"].down.shape, read["lm_head"].up.shape) == ((4, width), (vocab, 4))
