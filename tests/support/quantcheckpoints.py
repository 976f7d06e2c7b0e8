"""Seeded tiny models as quantised checkpoints, beside plain float32 ones of what their levels mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.modelfiles import safetensors_file
from tests.support.packers import KINDS, Packed
from tests.support.tinymodel import Tiny, raw_bytes, write_checkpoint

Array = np.ndarray[Any, Any]


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight",))


def write_quantised(
    model: Tiny,
    folder: Path,
    kind: str,
    *,
    chosen: Callable[[str], bool] = is_linear,
    config: dict[str, Any] | None = None,
    pack: Callable[[Array], Packed] | None = None,
) -> tuple[Path, Path]:
    """The checkpoint and its plain twin, folders.

    Args:
        chosen: names of the tensors that are quantised.
        config: the quantization_config, in place of the kind's own.
        pack: packs a matrix, in place of the kind's own.
    """
    stored: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    plain: dict[str, Array] = {}
    for name, values in model.tensors().items():
        if not chosen(name):
            stored[name] = "F32", values.shape, raw_bytes(values, "f32")
            plain[name] = values
            continue
        packed = (pack or KINDS[kind].pack)(values)
        plain[name] = packed.values
        for suffix, (dtype, array) in packed.tensors.items():
            stored[name.removesuffix(".weight") + suffix] = dtype, array.shape, array.tobytes()
    twin = write_checkpoint(model, folder / "plain", plain)
    quantised = folder / kind
    quantised.mkdir(parents=True)
    says = {"quantization_config": KINDS[kind].config if config is None else config}
    (quantised / "config.json").write_text(json.dumps(model.hf_config() | says))
    (quantised / "model.safetensors").write_bytes(safetensors_file(stored))
    return quantised, twin
