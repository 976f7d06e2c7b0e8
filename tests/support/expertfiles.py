"""Small mixture-of-experts checkpoints in each form that files have, and tables of weights that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.ops.quantize import quantize
from pegainfer.ops.weights import Entry, InFile, WeightTable, entry, in_layer
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes, safetensors_file

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of a model whose layers are dense where `dense` names them."""

    vocab_size: int = 40
    hidden_size: int = 64
    q_size: int = 32
    intermediate_size: int = 96
    num_experts: int = 4
    expert_size: int = 32
    num_layers: int = 3
    dense: tuple[int, ...] = (1,)
    tie_word_embeddings: bool = False

    @property
    def gate_up_size(self) -> int:
        return 2 * self.expert_size


def is_dense(config: Config, layer: int) -> bool:
    return layer in config.dense


def has_experts(config: Config, layer: int) -> bool:
    return layer not in config.dense


def _experts(name: str, hf: InFile, gguf: str, shape: tuple[str, ...]) -> Entry:
    """A stack of experts, which ranks divide by experts."""
    ggml = InFile(f"blk.{{}}.{gguf}.weight")
    return Entry(f"layers.{{}}.{name}", ("num_experts", *shape), hf, ggml, shard=0, when=has_experts)


def _table(gate: InFile, up: InFile, down: InFile) -> WeightTable:
    wide, narrow = ("expert_size", "hidden_size"), ("hidden_size", "expert_size")
    dense, hidden = ("intermediate_size", "hidden_size"), ("hidden_size", "intermediate_size")
    vocabulary = ("vocab_size", "hidden_size")
    return WeightTable(
        line="moe",
        embed=entry("embed", "model.embed_tokens.weight", "token_embd.weight", vocabulary),
        others=(entry("norm", "model.norm.weight", "output_norm.weight", ("hidden_size",)),),
        head=entry("lm_head", "lm_head.weight", "output.weight", vocabulary, shard=0),
        layer=(
            in_layer("wq", "self_attn.q_proj", "attn_q", ("q_size", "hidden_size"), shard=0),
            in_layer("wo", "self_attn.o_proj", "attn_output", ("hidden_size", "q_size"), shard=1),
            in_layer("router", "mlp.gate", "ffn_gate_inp", ("num_experts", "hidden_size"), when=has_experts),
            _experts("e_gate", gate, "ffn_gate_exps", wide),
            _experts("e_up", up, "ffn_up_exps", wide),
            _experts("e_down", down, "ffn_down_exps", narrow),
            in_layer("w_gate", "mlp.gate_proj", "ffn_gate", dense, shard=0, when=is_dense),
            in_layer("w_up", "mlp.up_proj", "ffn_up", dense, shard=0, when=is_dense),
            in_layer("w_down", "mlp.down_proj", "ffn_down", hidden, shard=1, when=is_dense),
        ),
    )


_LAYER = "model.layers.{}.mlp.experts."
_FUSED, _BOTH = _LAYER + "gate_up_proj", ("num_experts", "gate_up_size", "hidden_size")
# Each expert's matrices by themselves, as Qwen3-MoE's checkpoints have them.
SINGLE = _table(*(InFile(f"{_LAYER}{{expert}}.{name}_proj.weight") for name in ("gate", "up", "down")))
# One array of all experts, gate rows before up rows, as Qwen3.5-MoE's have them.
FUSED = _table(
    InFile(_FUSED, _BOTH, lambda c: [range(c.expert_size)]),
    InFile(_FUSED, _BOTH, lambda c: [range(c.expert_size, c.gate_up_size)]),
    InFile(_LAYER + "down_proj"),
)
# The same with gate and up rows in turn.
INTERLEAVED = _table(
    InFile(_FUSED, _BOTH, lambda c: [range(0, c.gate_up_size, 2)]),
    InFile(_FUSED, _BOTH, lambda c: [range(1, c.gate_up_size, 2)]),
    InFile(_LAYER + "down_proj"),
)


def values(config: Config) -> dict[str, Array]:
    """The weights by the forward's names: float32 values that bf16 holds exactly."""
    rng = np.random.default_rng(0)
    shapes = SINGLE.shapes(config)
    return {name: rng.integers(-256, 256, shape).astype(np.float32) for name, shape in shapes.items()}


def checkpoint_tensors(table: WeightTable, config: Config) -> dict[str, Array]:
    """The same by a checkpoint's names, in the form that the table reads."""
    found: dict[str, Array] = {}
    made = values(config)
    for e, layer in table.entries(config):
        array = made[e.name.format(layer)]
        names = e.hf.names(layer, config.num_experts)
        if len(names) > 1:
            found |= dict(zip(names, array, strict=True))
        elif e.hf.rows is None:
            found[names[0]] = array
        else:
            shape = (config.num_experts, config.gate_up_size, config.hidden_size)
            rows = [i for r in e.hf.rows(config) for i in r]
            found.setdefault(names[0], np.zeros(shape, np.float32))[:, rows] = array
    return found


def write_checkpoint(table: WeightTable, config: Config, path: Path, **more: Array) -> Path:
    tensors: Mapping[str, Array] = {**checkpoint_tensors(table, config), **more}
    entries = {n: ("BF16", a.shape, quantize("bf16", a).tobytes()) for n, a in tensors.items()}
    path.write_bytes(safetensors_file(entries))
    return path


def write_gguf(config: Config, path: Path, format_name: str) -> Path:
    made, tensors = values(config), []
    for e, layer in SINGLE.entries(config):
        array = made[e.name.format(layer)]
        kind = format_name if array.ndim > 1 and "router" not in e.name else "f32"
        raw = quantize(kind, array).tobytes()
        tensors.append(GGUFTensor(e.gguf.name.format(layer), GGML[kind], array.shape, raw))
    path.write_bytes(gguf_bytes({"general.architecture": "moe"}, tensors))
    return path
