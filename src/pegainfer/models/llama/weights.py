"""The llama line's weights: one table of names and shapes, and how the two file formats spell them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.models.llama.config import LlamaConfig
from pegainfer.ops.rope import cos_sin_table, inverse_frequencies
from pegainfer.ops.tensor import WEIGHTS
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.gguf import GGUFFile
from pegainfer.runtime.weights.raw import RawWeight
from pegainfer.runtime.weights.tensorfile import TensorFile

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Entry:
    """One weight. `{}` in a name stands for the layer's number.

    Args:
        name: what the forward calls it.
        hf, gguf: what the files call it.
        shape: fields of LlamaConfig.
        heads: the field that counts the heads whose rows a GGUF converter has permuted; "" for none.
    """

    name: str
    hf: str
    gguf: str
    shape: tuple[str, ...]
    heads: str = ""

    def sizes(self, config: LlamaConfig) -> tuple[int, ...]:
        return tuple(getattr(config, field) for field in self.shape)


GLOBAL = (
    Entry("embed", "model.embed_tokens.weight", "token_embd.weight", ("vocab_size", "hidden_size")),
    Entry("norm", "model.norm.weight", "output_norm.weight", ("hidden_size",)),
)
LM_HEAD = Entry("lm_head", "lm_head.weight", "output.weight", ("vocab_size", "hidden_size"))
ROPE_FREQS = "rope_freqs.weight"  # GGUF: divisors of the frequencies, [D/2]; how it stores llama3 scaling


def _layer(name: str, hf: str, gguf: str, shape: tuple[str, ...], heads: str = "") -> Entry:
    return Entry(
        f"layers.{{}}.{name}", f"model.layers.{{}}.{hf}.weight", f"blk.{{}}.{gguf}.weight", shape, heads
    )


LAYER = (
    _layer("attn_norm", "input_layernorm", "attn_norm", ("hidden_size",)),
    _layer("wq", "self_attn.q_proj", "attn_q", ("q_size", "hidden_size"), heads="num_heads"),
    _layer("wk", "self_attn.k_proj", "attn_k", ("kv_size", "hidden_size"), heads="num_kv_heads"),
    _layer("wv", "self_attn.v_proj", "attn_v", ("kv_size", "hidden_size")),
    _layer("wo", "self_attn.o_proj", "attn_output", ("hidden_size", "q_size")),
    _layer("mlp_norm", "post_attention_layernorm", "ffn_norm", ("hidden_size",)),
    _layer("w_gate", "mlp.gate_proj", "ffn_gate", ("intermediate_size", "hidden_size")),
    _layer("w_up", "mlp.up_proj", "ffn_up", ("intermediate_size", "hidden_size")),
    _layer("w_down", "mlp.down_proj", "ffn_down", ("hidden_size", "intermediate_size")),
)


@dataclass(frozen=True)
class LlamaWeights:
    """A model's weights as its file holds them.

    Args:
        config: with the vocabulary and tying that the file shows.
        tensors: RawWeight by the forward's name; matrices are views of the mapped file, norms are f32.
        rope_divisors: [D/2] float32 or None; each frequency is divided by its own.
    """

    config: LlamaConfig
    tensors: Mapping[str, RawWeight]
    rope_divisors: Array | None = None

    @property
    def formats(self) -> dict[str, str]:
        return {name: w.format for name, w in self.tensors.items()}

    def cos_sin(self, num_positions: int) -> RawWeight:
        """The rotation's table: [num_positions, D] f32."""
        c = self.config
        freqs = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        if self.rope_divisors is not None:
            freqs = freqs / self.rope_divisors
        return _raw(cos_sin_table(num_positions, freqs))


def entries(config: LlamaConfig) -> list[tuple[Entry, int]]:
    """Every weight of such a model with its layer's number, in forward order."""
    layers = [(e, i) for i in range(config.num_layers) for e in LAYER]
    head = [] if config.tie_word_embeddings else [(LM_HEAD, 0)]
    return [(e, 0) for e in GLOBAL] + layers + head


def load_gguf(file: GGUFFile) -> LlamaWeights:
    """Reads config and weights of an open GGUF file. Raises ConfigError, ModelFileError, UnsupportedError."""
    embedding = file.tensors.get(GLOBAL[0].gguf)
    if embedding is None:
        raise ModelFileError("tensor is missing", expected=GLOBAL[0].gguf, where=file.path)
    tied = LM_HEAD.gguf not in file.tensors
    config = LlamaConfig.from_gguf(file.metadata, str(file.path), vocab_size=embedding.shape[0], tied=tied)
    names = {e.gguf.format(i): (e, i) for e, i in entries(config)}
    _check_names(file, names, ignored={ROPE_FREQS})
    divisors = None
    if ROPE_FREQS in file.tensors:
        divisors = _vector(file, ROPE_FREQS, (config.half_head_dim,))
        if not (np.isfinite(divisors).all() and (divisors > 0).all()):
            raise ModelFileError(f"tensor {ROPE_FREQS}: divisors must be above 0", where=file.path)
    tensors = {e.name.format(i): _read(config, file, n, e, permuted=True) for n, (e, i) in names.items()}
    return LlamaWeights(config, tensors, divisors)


def load_safetensors(config: LlamaConfig, file: TensorFile) -> LlamaWeights:
    """Maps the tensors of a checkpoint in Hugging Face's naming. Raises ModelFileError, UnsupportedError."""
    names = {e.hf.format(i): (e, i) for e, i in entries(config)}
    # Old Llama 2 files carry the rotation's frequencies, which follow from the config.
    ignored = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    if config.tie_word_embeddings and LM_HEAD.hf in file.tensors:
        ignored.add(LM_HEAD.hf)
        if not np.array_equal(file.raw(LM_HEAD.hf), file.raw(GLOBAL[0].hf)):
            raise ModelFileError(
                "the config ties lm_head to the embedding, but their tensors differ",
                expected=f"{LM_HEAD.hf} equal to {GLOBAL[0].hf}",
                where=file.path,
                remedy="set tie_word_embeddings to false in config.json if the head is its own",
            )
    _check_names(file, names, ignored)
    tensors = {e.name.format(i): _read(config, file, n, e, permuted=False) for n, (e, i) in names.items()}
    return LlamaWeights(config, tensors)


def _check_names(file: TensorFile, names: Mapping[str, object], ignored: set[str]) -> None:
    """Raises ModelFileError where tensors are missing, UnsupportedError where there are unknown ones."""
    if missing := [n for n in names if n not in file.tensors]:
        raise ModelFileError(
            "tensors are missing",
            expected=missing[0] + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            got=f"{len(file.tensors)} tensors",
            where=file.path,
            remedy="use a complete file, or correct the config's number of layers",
        )
    if extra := [n for n in file.tensors if n not in names and n not in ignored]:
        raise UnsupportedError(
            "tensors that the llama line has no use for",
            expected=f"{len(names)} tensors by name",
            got=extra[0] + (f" and {len(extra) - 1} more" if len(extra) > 1 else ""),
            where=file.path,
            remedy="the model has features that this line lacks, or its config names too few layers",
        )


def _read(config: LlamaConfig, file: TensorFile, name: str, entry: Entry, *, permuted: bool) -> RawWeight:
    shape = entry.sizes(config)
    if len(shape) == 1:
        return _raw(_vector(file, name, shape))
    info = file.tensors[name]
    if info.shape != shape:
        raise ModelFileError(
            f"tensor {name} contradicts the config",
            expected=f"{list(shape)} = [{', '.join(entry.shape)}]",
            got=list(info.shape),
            where=file.path,
        )
    form = info.format
    if form not in WEIGHTS:
        raise UnsupportedError(
            f"tensor {name}: no kernels for this format",
            expected=" ".join(WEIGHTS),
            got=form,
            where=file.path,
            remedy="use a file in one of the formats named",
        )
    order = head_row_order(shape[0], getattr(config, entry.heads)) if permuted and entry.heads else None
    return RawWeight(form, shape, file.raw(name), order, partial(file.release, name))


def head_row_order(rows: int, heads: int) -> Array:
    """Where row i of q or k lies in a GGUF file, [rows] int64.

    llama.cpp's converter interleaves the halves of each head (row 2j is j, row 2j + 1 is D/2 + j) for its
    rotation of neighbouring pairs; ours rotates halves, as Hugging Face does.
    """
    stored = np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)
    order = np.empty(rows, np.int64)
    order[stored] = np.arange(rows)
    return order


def _raw(values: Array) -> RawWeight:
    return RawWeight("f32", values.shape, np.ascontiguousarray(values).view(np.uint8).reshape(-1))


def _vector(file: TensorFile, name: str, shape: tuple[int, ...]) -> Array:
    """A small tensor as float32, copied out of the file."""
    info = file.tensors[name]
    if info.shape != shape:
        raise ModelFileError(
            f"tensor {name} contradicts the config",
            expected=list(shape),
            got=list(info.shape),
            where=file.path,
        )
    return dequantize(info.format, file.raw(name), shape)
