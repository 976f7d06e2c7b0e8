"""A line's table of weights, and how the tensors of a file become the weights that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.ops.tensor import WEIGHTS
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.raw import RawWeight
from pegainfer.runtime.weights.tensorfile import TensorFile

Array = np.ndarray[Any, Any]


class LayeredConfig(Protocol):
    """What a table needs of a config, beside the fields that its shapes name."""

    @property
    def num_layers(self) -> int: ...

    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True)
class Entry:
    """One weight. `{}` in a name stands for the layer's number.

    Args:
        name: what the forward calls it.
        hf, gguf: what the files call it.
        shape: fields of the line's config.
        heads: the field that counts the heads whose rows a GGUF converter has permuted; "" for none.
    """

    name: str
    hf: str
    gguf: str
    shape: tuple[str, ...]
    heads: str = ""

    def sizes(self, config: LayeredConfig) -> tuple[int, ...]:
        return tuple(getattr(config, field) for field in self.shape)


def in_layer(name: str, hf: str, gguf: str, shape: tuple[str, ...], heads: str = "") -> Entry:
    """A weight of every layer, named as decoders of Hugging Face and llama.cpp name theirs."""
    return Entry(
        f"layers.{{}}.{name}", f"model.layers.{{}}.{hf}.weight", f"blk.{{}}.{gguf}.weight", shape, heads
    )


@dataclass(frozen=True)
class WeightTable:
    """Every weight of a line, declared.

    Args:
        line: its name, for errors.
        embed: the embedding's table, which is the head as well where the config ties them.
        others: weights outside of layers.
        layer: weights of each layer, in the order in which a forward takes them.
    """

    line: str
    embed: Entry
    others: tuple[Entry, ...]
    head: Entry
    layer: tuple[Entry, ...]

    def entries(self, config: LayeredConfig) -> list[tuple[Entry, int]]:
        """Every weight of such a model with its layer's number, in forward order."""
        layers = [(e, i) for i in range(config.num_layers) for e in self.layer]
        head = [] if config.tie_word_embeddings else [(self.head, 0)]
        return [(self.embed, 0), *((e, 0) for e in self.others), *layers, *head]

    def shapes(self, config: LayeredConfig) -> dict[str, tuple[int, ...]]:
        """Each weight's shape by its name."""
        return {e.name.format(i): e.sizes(config) for e, i in self.entries(config)}

    def head_name(self, config: LayeredConfig) -> str:
        """The weight that the logits come from."""
        return (self.embed if config.tie_word_embeddings else self.head).name


def read_weights(
    table: WeightTable,
    config: LayeredConfig,
    file: TensorFile,
    spelling: Literal["hf", "gguf"],
    *,
    ignored: Iterable[str] = (),
    row_order: Callable[[int, int], Array] | None = None,
) -> dict[str, RawWeight]:
    """Maps a file's tensors: matrices are views of the file, vectors are copied as float32.

    Args:
        spelling: whose names the file has.
        ignored: names of tensors that may be there and are not read.
        row_order: (rows, heads) -> where each row of a permuted matrix lies in the file, [rows] int64.

    Raises ModelFileError where tensors are missing or misshapen or a tied head differs from the embedding,
    UnsupportedError where there are unknown ones or a format has no kernels.
    """
    names = {getattr(e, spelling).format(i): (e, i) for e, i in table.entries(config)}
    spare = set(ignored)
    head = getattr(table.head, spelling)
    if config.tie_word_embeddings and head in file.tensors:
        _check_tied(file, getattr(table.embed, spelling), head)
        spare.add(head)
    _check_names(table.line, file, names, spare)
    return {e.name.format(i): _read(config, file, name, e, row_order) for name, (e, i) in names.items()}


def embedding_in_gguf(table: WeightTable, file: TensorFile) -> tuple[int, bool]:
    """What GGUF says by its tensors alone: the embedding's rows, and whether it is the head as well.

    Raises ModelFileError without an embedding.
    """
    embedding = file.tensors.get(table.embed.gguf)
    if embedding is None:
        raise ModelFileError("tensor is missing", expected=table.embed.gguf, where=file.path)
    return embedding.shape[0], table.head.gguf not in file.tensors


def without_data(table: WeightTable, config: LayeredConfig) -> dict[str, RawWeight]:
    """Every weight of such a model by name, matrices as bf16 and vectors as f32, but empty: to be made up."""
    empty = np.zeros(0, np.uint8)
    shapes = table.shapes(config)
    return {n: RawWeight("bf16" if len(s) > 1 else "f32", s, empty) for n, s in shapes.items()}


def read_vector(file: TensorFile, name: str, shape: tuple[int, ...]) -> Array:
    """A small tensor as float32, copied out of the file. Raises ModelFileError."""
    info = file.tensors[name]
    _check_shape(file, name, shape, shape)
    return dequantize(info.format, file.raw(name), shape)


def raw_f32(values: Array) -> RawWeight:
    """Float32 values that were made or copied here."""
    return RawWeight("f32", values.shape, np.ascontiguousarray(values).view(np.uint8).reshape(-1))


def _check_tied(file: TensorFile, embed: str, head: str) -> None:
    """Some writers store a tied head as well; then it must be the embedding."""
    if embed in file.tensors and not np.array_equal(file.raw(head), file.raw(embed)):
        raise ModelFileError(
            "the config ties lm_head to the embedding, but their tensors differ",
            expected=f"{head} equal to {embed}",
            where=file.path,
            remedy="set tie_word_embeddings to false in config.json if the head is its own",
        )


def _check_names(line: str, file: TensorFile, names: Mapping[str, object], ignored: set[str]) -> None:
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
            f"tensors that the {line} line has no use for",
            expected=f"{len(names)} tensors by name",
            got=extra[0] + (f" and {len(extra) - 1} more" if len(extra) > 1 else ""),
            where=file.path,
            remedy="the model has features that this line lacks, or its config names too few layers",
        )


def _check_shape(file: TensorFile, name: str, shape: tuple[int, ...], fields: tuple[object, ...]) -> None:
    info = file.tensors[name]
    if info.shape != shape:
        raise ModelFileError(
            f"tensor {name} contradicts the config",
            expected=f"{list(shape)} = [{', '.join(map(str, fields))}]",
            got=list(info.shape),
            where=file.path,
        )


def _read(
    config: LayeredConfig,
    file: TensorFile,
    name: str,
    entry: Entry,
    row_order: Callable[[int, int], Array] | None,
) -> RawWeight:
    shape = entry.sizes(config)
    _check_shape(file, name, shape, entry.shape)
    if len(shape) == 1:
        return raw_f32(read_vector(file, name, shape))
    form = file.tensors[name].format
    if form not in WEIGHTS:
        raise UnsupportedError(
            f"tensor {name}: no kernels for this format",
            expected=" ".join(WEIGHTS),
            got=form,
            where=file.path,
            remedy="use a file in one of the formats named",
        )
    order = None
    if row_order is not None and entry.heads:
        order = row_order(shape[0], getattr(config, entry.heads))
    release = partial(file.release, name)
    return RawWeight(form, shape, file.raw(name), order, release, file.origin(name))
