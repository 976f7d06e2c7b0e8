"""Seeded random llama models, small enough for a test, written as safetensors or GGUF.

Golden values made from them stand in tests/data/llama; a change here changes them (`make golden`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.ops.quantize import quantize
from pegainfer.runtime.weights.dequant import dequantize
from tests.support.modelfiles import GGML, GGUFTensor, gguf_bytes, safetensors_file

Array = np.ndarray[Any, Any]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 2, 64, 4, 2, 16, 96, 160
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Tiny:
    """One model. `dtype` is that of a checkpoint's tensors; `config` replaces fields of the base config."""

    name: str
    seed: int
    dtype: str = "f32"
    shards: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "vocab_size": VOCAB,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 256,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[self.dtype],
        } | dict(self.config)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By Hugging Face's names, in the order in which values are drawn."""
        c = self.hf_config()
        q, kv = (c[k] * c.get("head_dim", HEAD_DIM) for k in ("num_attention_heads", "num_key_value_heads"))
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            shapes |= {
                p + "input_layernorm.weight": (hidden,),
                p + "self_attn.q_proj.weight": (q, hidden),
                p + "self_attn.k_proj.weight": (kv, hidden),
                p + "self_attn.v_proj.weight": (kv, hidden),
                p + "self_attn.o_proj.weight": (hidden, q),
                p + "post_attention_layernorm.weight": (hidden,),
                p + "mlp.gate_proj.weight": (inner, hidden),
                p + "mlp.up_proj.weight": (inner, hidden),
                p + "mlp.down_proj.weight": (hidden, inner),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not c["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (c["vocab_size"], hidden)
        return shapes

    def tensors(self) -> dict[str, Array]:
        """Float32 values by Hugging Face's names, exact in `dtype`."""
        # RandomState's stream is frozen by NumPy's policy; Generator's is not.
        rng = np.random.RandomState(self.seed)
        values = {name: self._draw(rng, shape) for name, shape in self.shapes().items()}
        return {name: rounded(v, self.dtype) for name, v in values.items()}

    def stored_as(self, name: str) -> str:
        """The dtype of a tensor in a checkpoint."""
        return self.dtype

    @staticmethod
    def _draw(rng: np.random.RandomState, shape: tuple[int, ...]) -> Array:
        """Norms near one; matrices that keep the residual stream's scale and make logits well apart."""
        if len(shape) == 1:
            return (1 + 0.2 * rng.standard_normal(shape)).astype(np.float32)
        return (rng.standard_normal(shape) * (1.5 / np.sqrt(shape[1]))).astype(np.float32)


MODELS = {
    m.name: m
    for m in (
        Tiny("tied_f32", seed=1),
        Tiny("untied_bf16_shards", seed=2, dtype="bf16", shards=3, config={"tie_word_embeddings": False}),
        Tiny("llama3_f16", seed=3, dtype="f16", config={"rope_scaling": LLAMA3}),
        Tiny(
            "linear_mha_f32",
            seed=4,
            config={
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "num_key_value_heads": HEADS,
                "head_dim": 32,
                "rope_theta": 500000.0,
            },
        ),
    )
}


def rounded(values: Array, dtype: str) -> Array:
    """Float32 values that `dtype` holds exactly."""
    if dtype == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return values.astype({"f32": np.float32, "f16": np.float16}[dtype]).astype(np.float32)


def raw_bytes(values: Array, dtype: str) -> bytes:
    """The values' storage in a plain dtype."""
    if dtype == "bf16":
        return (rounded(values, "bf16").view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype({"f32": "<f4", "f16": "<f2"}[dtype]).tobytes()


def write_checkpoint(model: Tiny, folder: Path, values: Mapping[str, Array] | None = None) -> Path:
    """config.json and safetensors (with an index where there are shards) in `folder`.

    Args:
        values: float32 tensors that the model's dtype holds exactly, in place of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.hf_config()))
    tensors = model.tensors() if values is None else values
    entries = {
        name: (model.stored_as(name).upper(), v.shape, raw_bytes(v, model.stored_as(name)))
        for name, v in tensors.items()
    }
    if model.shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_file(entries))
        return folder
    names = list(entries)
    weight_map = {}
    for shard in range(model.shards):
        file = f"model-{shard + 1:05}-of-{model.shards:05}.safetensors"
        part = names[shard :: model.shards]
        weight_map |= dict.fromkeys(part, file)
        (folder / file).write_bytes(safetensors_file({n: entries[n] for n in part}))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


EXPERT_NUMBER = re.compile(r"experts\.\d+\.")
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def gguf_name(name: str) -> str:
    """What llama.cpp's converter calls a tensor of a checkpoint; experts of a layer share a stack's name."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[EXPERT_NUMBER.sub('experts.', part)]}.weight"


def permuted(values: Array, heads: int) -> Array:
    """Rows of q or k as the converter writes them: the halves of each head interleaved."""
    rows, width = values.shape
    return values.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def gguf_metadata(model: Tiny) -> dict[str, Any]:
    c = model.hf_config()
    head_dim = c.get("head_dim", HEAD_DIM)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": c["num_hidden_layers"],
        "llama.context_length": c["max_position_embeddings"],
        "llama.embedding_length": c["hidden_size"],
        "llama.feed_forward_length": c["intermediate_size"],
        "llama.attention.head_count": c["num_attention_heads"],
        "llama.attention.head_count_kv": c["num_key_value_heads"],
        "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "llama.rope.freq_base": c["rope_theta"],
        "llama.rope.dimension_count": head_dim,
        "llama.vocab_size": c["vocab_size"],
    }
    scaling = c.get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": scaling["factor"]}
    return metadata


def llama3_divisors(model: Tiny) -> Array | None:
    """rope_freqs.weight as the converter computes it from llama3 scaling: [D/2] float32."""
    c = model.hf_config()
    scaling = c.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    head_dim = c.get("head_dim", HEAD_DIM)
    trained = scaling["original_max_position_embeddings"]
    low, high, factor = (scaling[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    divisors = []
    for freq in c["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / freq
        if wavelength < trained / high:
            divisors.append(1.0)
        elif wavelength > trained / low:
            divisors.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def by_role(embedding: str, attention: str, feed_forward: str) -> Callable[[str], str]:
    def form(name: str) -> str:
        if name.startswith(("token_embd", "output")):
            return embedding
        return attention if "attn" in name else feed_forward

    return form


# name -> (model, storage format of a matrix by its GGUF name)
GGUF_MODELS: dict[str, tuple[Tiny, Callable[[str], str]]] = {
    "gguf_q4_1": (Tiny("gguf_q4_1", seed=11), by_role("q8_0", "q4_1", "q4_1")),
    "gguf_q8_0": (
        Tiny("gguf_q8_0", seed=12, config={"tie_word_embeddings": False}),
        by_role("q8_0", "q8_0", "q8_0"),
    ),
    "gguf_q4_0_llama3": (
        Tiny("gguf_q4_0_llama3", seed=13, config={"rope_scaling": LLAMA3}),
        by_role("f16", "q4_0", "q8_0"),
    ),
    "gguf_bf16_f16": (Tiny("gguf_bf16_f16", seed=14), by_role("f32", "bf16", "f16")),
}


def file_values(model: Tiny, formats: Callable[[str], str]) -> dict[str, Array]:
    """Float32 values that a GGUF file of these formats holds, by Hugging Face's names."""
    found = model.tensors()
    for name in [n for n, v in found.items() if v.ndim > 1]:
        form = formats(gguf_name(name))
        found[name] = dequantize(form, quantize(form, found[name]), found[name].shape)
    return found


def token_ids(model: Tiny) -> list[int]:
    """A fixed text of 200 tokens for a model."""
    return np.random.RandomState(model.seed + 1000).randint(0, VOCAB, 200).tolist()


def gguf_tensors(model: Tiny, formats: Callable[[str], str]) -> list[GGUFTensor]:
    """The model's tensors as a converter would write them.

    Args:
        formats: storage format of a matrix by its GGUF name; norms are f32.
    """
    c = model.hf_config()
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}
    found = []
    for name, values in model.tensors().items():
        count = next((n for part, n in heads.items() if part in name), 0)
        stored = permuted(values, count) if count else values
        target = gguf_name(name)
        form = "f32" if values.ndim == 1 else formats(target)
        found.append(GGUFTensor(target, GGML[form], values.shape, quantize(form, stored).tobytes()))
    divisors = llama3_divisors(model)
    if divisors is not None:
        found.append(GGUFTensor("rope_freqs.weight", GGML["f32"], divisors.shape, divisors.tobytes()))
    return found


def write_gguf(model: Tiny, path: Path, formats: Callable[[str], str]) -> Path:
    path.write_bytes(gguf_bytes(gguf_metadata(model), gguf_tensors(model, formats)))
    return path
