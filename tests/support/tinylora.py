"""Seeded LoRA adapters of the tiny models, in the form in which PEFT saves them.

Golden values made from them stand in tests/data/lora; a change here changes them (`make golden`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import tinymodel, tinyqwen3
from tests.support.modelfiles import safetensors_file
from tests.support.tinymodel import Tiny, raw_bytes

PREFIX = "base_model.model."
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BASES: dict[str, Tiny] = {
    "llama_tied": tinymodel.MODELS["tied_f32"],
    "llama_untied": tinymodel.MODELS["untied_bf16_shards"],
    "qwen3_tied": tinyqwen3.MODELS["tied_bf16"],
    "qwen3_untied": tinyqwen3.MODELS["untied_f32_shards"],
}


@dataclass(frozen=True)
class TinyAdapter:
    """One adapter: what its config says beside the defaults, and the rank of each module it adapts.

    Args:
        ranks: from a module's name to its rank; None where it has no factors. Stated apart from the config,
            whose reading it checks.
    """

    name: str
    seed: int
    config: Mapping[str, Any]
    ranks: Callable[[str], int | None]
    dtype: str = "f32"

    def peft_config(self) -> dict[str, Any]:
        return {**DEFAULTS, **self.config}

    def tensors(self, base: Tiny) -> dict[str, np.ndarray[Any, Any]]:
        """Factors by PEFT's names, float32."""
        rng = np.random.RandomState(self.seed)
        found: dict[str, np.ndarray[Any, Any]] = {}
        shapes = base.shapes()
        if base.hf_config()["tie_word_embeddings"]:
            shapes["lm_head.weight"] = next(s for n, s in shapes.items() if n.endswith("embed_tokens.weight"))
        for name, shape in shapes.items():
            module = name.removesuffix(".weight")
            rank = self.ranks(module) if len(shape) == 2 else None
            if rank is None:
                continue
            rows, columns = shape
            if module.endswith("embed_tokens"):
                sizes = {"lora_embedding_A": (rank, rows), "lora_embedding_B": (columns, rank)}
            else:
                sizes = {"lora_A.weight": (rank, columns), "lora_B.weight": (rows, rank)}
            for part, size in sizes.items():
                values = rng.standard_normal(size) * (0.3 / np.sqrt(size[1]))
                found[f"{PREFIX}{module}.{part}"] = values.astype(np.float32)
        return found


DEFAULTS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "inference_mode": True,
    "base_model_name_or_path": "base",
}


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _patterns(module: str) -> int | None:
    if module.endswith("layers.1.self_attn.q_proj"):
        return 8
    return {"q_proj": 4, "v_proj": 4, "down_proj": 2}.get(_last(module))


ADAPTERS = {
    a.name: a
    for a in (
        TinyAdapter(
            "plain", 51, {"target_modules": PROJECTIONS}, lambda m: 4 if _last(m) in PROJECTIONS else None
        ),
        TinyAdapter(
            "rank_stabilised_patterns",
            52,
            {
                "target_modules": ["q_proj", "v_proj", "down_proj"],
                "use_rslora": True,
                "rank_pattern": {"layers.1.self_attn.q_proj": 8, "down_proj": 2},
                "alpha_pattern": {"v_proj": 16},
            },
            _patterns,
            dtype="bf16",
        ),
        TinyAdapter(
            "embedding_and_head",
            53,
            {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
            lambda m: 4 if _last(m) in ("embed_tokens", "lm_head", "q_proj") else None,
        ),
        TinyAdapter(
            "one_layer_by_expression",
            54,
            {"target_modules": r".*\.layers\.1\..*(q_proj|o_proj)", "lora_alpha": 4},
            lambda m: 4 if "layers.1." in m and _last(m) in ("q_proj", "o_proj") else None,
        ),
        TinyAdapter(
            "layer_0_without_k",
            55,
            {"target_modules": PROJECTIONS, "layers_to_transform": [0], "exclude_modules": ["k_proj"]},
            lambda m: 4 if "layers.0." in m and _last(m) in PROJECTIONS and _last(m) != "k_proj" else None,
            dtype="f16",
        ),
    )
}


def write_adapter(adapter: TinyAdapter, base: Tiny, folder: Path, **config: Any) -> Path:
    """`config`: other values of the adapter's config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter.peft_config() | config))
    entries = {
        name: (adapter.dtype.upper(), v.shape, raw_bytes(v, adapter.dtype))
        for name, v in adapter.tensors(base).items()
    }
    (folder / "adapter_model.safetensors").write_bytes(safetensors_file(entries))
    return folder
