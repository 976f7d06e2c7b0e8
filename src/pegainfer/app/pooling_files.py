"""Reads what a model's files say of embeddings and scores: sentence-transformers' files, GGUF metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegainfer.contract.errors import ModelFileError
from pegainfer.frontend.own_pooling import OwnPooling, Pooling
from pegainfer.frontend.tokenizer_files import read_json, read_json_list

# The modes of sentence-transformers' Pooling module: in old files a switch each, in new ones one text.
_MODES: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "mean": "mean",
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
}
_DEFAULT_PATH = "1_Pooling"
_GGUF_MODES = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # {architecture}.pooling_type
_RERANKER = re.compile(r"rerank", re.IGNORECASE)  # such models have no other mark in their files


def folder_pooling(folder: Path, name: str) -> OwnPooling:
    """What modules.json and the Pooling module's config say.

    Args:
        name: of the model; rerankers are recognised by it.

    Raises ModelFileError.
    """
    reranker = _RERANKER.search(name) is not None
    modules = read_json_list(folder / "modules.json")
    kinds = [str(m.get("type", "")).rsplit(".", 1)[-1] for m in modules if isinstance(m, Mapping)]
    path = _DEFAULT_PATH
    if "Pooling" in kinds:
        path = str(modules[kinds.index("Pooling")].get("path") or _DEFAULT_PATH)
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ModelFileError("a module lies outside the model", got=path, where=folder / "modules.json")
    config = read_json(folder / path / "config.json")
    if not config:
        return OwnPooling(reranker=reranker)
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    mode, unserved = _mode(config)
    return OwnPooling(
        pooling=None if others else mode,
        normalize="Normalize" in kinds if modules else True,
        unserved=f"a {others[0]} layer behind the pooling" if others else unserved,
        reranker=reranker,
    )


def _mode(config: Mapping[str, Any]) -> tuple[Pooling | None, str]:
    """The pooling of a Pooling module's config, or None and what is not served."""
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
    else:
        modes = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]], ""
    return None, " and ".join(mode.removeprefix("pooling_mode_") for mode in modes) or "no pooling mode"


def gguf_pooling(metadata: Mapping[str, Any], name: str) -> OwnPooling:
    """What a GGUF file's metadata say; `name` as for `folder_pooling`."""
    architecture = metadata.get("general.architecture", "")
    number = metadata.get(f"{architecture}.pooling_type")
    mode = "none" if number is None else _GGUF_MODES.get(int(number), str(number))
    reranker = mode == "rank" or any(
        _RERANKER.search(str(text)) for text in (name, metadata.get("general.name", ""))
    )
    return OwnPooling(
        pooling="mean" if mode == "mean" else "last" if mode == "last" else None,
        unserved="" if mode in ("none", "rank", "mean", "last") else mode,
        reranker=reranker,
    )
