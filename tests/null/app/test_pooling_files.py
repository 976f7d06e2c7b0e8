"""What sentence-transformers' files and GGUF metadata say of embeddings and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pegainfer.app.pooling_files import folder_pooling, gguf_pooling
from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.frontend.own_pooling import OwnPooling

QWEN3_EMBEDDING = {  # of Qwen3-Embedding-0.6B
    "word_embedding_dimension": 1024,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": True,
    "include_prompt": True,
}


def model(folder: Path, config: dict[str, Any], *kinds: str, path: str = "1_Pooling") -> Path:
    modules = [{"idx": i, "path": "" if i == 0 else f"{i}_{k}", "type": f"sentence_transformers.models.{k}"}
               for i, k in enumerate(kinds)]  # fmt: skip
    for module in modules:
        if str(module["type"]).endswith("Pooling"):
            module["path"] = path
    if kinds:
        (folder / "modules.json").write_text(json.dumps(modules))
    if ".." not in path:
        (folder / path).mkdir(parents=True)
        (folder / path / "config.json").write_text(json.dumps(config))
    return folder


def test_the_pooling_of_a_folder(tmp_path: Path) -> None:
    found = folder_pooling(model(tmp_path, QWEN3_EMBEDDING, "Transformer", "Pooling", "Normalize"), "m")
    assert found == OwnPooling(pooling="last", normalize=True)


def test_vectors_without_a_normalize_module_keep_their_length(tmp_path: Path) -> None:
    config = {"pooling_mode_mean_tokens": True}
    found = folder_pooling(model(tmp_path, config, "Transformer", "Pooling", path="2_P"), "m")
    assert found == OwnPooling(pooling="mean", normalize=False)


@pytest.mark.parametrize(
    ("config", "kinds", "what"),
    [
        ({"pooling_mode_cls_token": True}, ("Transformer", "Pooling"), "cls_token"),
        ({"pooling_mode": "max"}, (), "max"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, (), "mean_tokens and lasttoken"),
        (QWEN3_EMBEDDING, ("Transformer", "Pooling", "Dense"), "a Dense layer behind the pooling"),
    ],
)
def test_what_is_not_served_is_named(
    tmp_path: Path, config: dict[str, Any], kinds: tuple[str, ...], what: str
) -> None:
    found = folder_pooling(model(tmp_path, config, *kinds), "m")
    assert (found.pooling, found.unserved) == (None, what)
    with pytest.raises(UnsupportedError, match=what):
        found.choose("auto")
    assert found.choose("mean") == "mean"


def test_a_folder_that_says_nothing(tmp_path: Path) -> None:
    assert folder_pooling(tmp_path, "m") == OwnPooling()
    assert folder_pooling(tmp_path, "Qwen/Qwen3-Reranker-0.6B") == OwnPooling(reranker=True)
    assert OwnPooling().choose(None) == "mean"


def test_a_module_outside_the_model_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="outside"):
        folder_pooling(model(tmp_path, {}, "Transformer", "Pooling", path="../other"), "m")


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (None, OwnPooling()),
        (0, OwnPooling()),
        (1, OwnPooling(pooling="mean")),
        (2, OwnPooling(unserved="cls")),
        (3, OwnPooling(pooling="last")),
        (4, OwnPooling(reranker=True)),
    ],
)
def test_the_pooling_of_a_gguf_file(kind: int | None, wanted: OwnPooling) -> None:
    metadata: dict[str, Any] = {"general.architecture": "qwen3"}
    if kind is not None:
        metadata["qwen3.pooling_type"] = kind
    assert gguf_pooling(metadata, "m") == wanted


def test_a_gguf_reranker_is_told_by_its_name() -> None:
    assert gguf_pooling({"general.name": "Qwen3 Reranker 0.6B"}, "m").choose_score("auto") == "yes-no"
