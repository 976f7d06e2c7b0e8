"""A line's table of weights, and the plan of how a file's tensors become the weights that the table names.

Long because a table's shapes, shards and sources are one description.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from pegainfer.contract.errors import ModelFileError, UnsupportedError
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.ops.weight_checks import check_names, check_tied
from pegainfer.ops.weight_values import moved_values, read_values, shares_of, take_rows
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.part import Part
from pegainfer.runtime.weights.tensorfile import TensorFile, missing_tensor
from pegainfer.runtime.weights.weight import SCHEMES, Scheme, Weight, float32, plain

Array = np.ndarray[Any, Any]
Spelling = Literal["hf", "gguf"]
Rows = Callable[[Any], Sequence[range]]  # of a config: rows of a stored matrix
Sections = Callable[[Any], Sequence[int]]  # of a config: sizes of the parts of an axis
Convert = Callable[[Any, Array], Array]  # of a config and stored values: the weight's values
SchemeOf = Callable[[str], Scheme | None]  # of a tensor's name; None: the format that the file says


class LayeredConfig(Protocol):
    """What a table needs of a config, beside the fields that its shapes name."""

    @property
    def num_layers(self) -> int: ...

    @property
    def tie_word_embeddings(self) -> bool: ...


class InFile(msgspec.Struct, frozen=True):
    """How one kind of file stores a weight.

    Args:
        name: of the tensor. `{}` stands for the layer's number. With `{expert}` the weight is a stack, and
            each of its matrices a tensor of its own.
        shape: fields of the config, where the tensor's shape is not the weight's: several weights may share
            a tensor.
        rows: which rows of each stored matrix are the weight's, in its order; None: all.
        convert: makes the weight's values of the stored ones. Such a weight is read when it is planned and
            kept as float32, so this is for small tensors.
        otherwise: how files without this tensor store the weight; None: in no other way.
        moves: puts the stored values into other places, and changes none. Such a weight is read when it is
            planned; it keeps a format that has no blocks, others become float32.
        stacked: whether the matrix is a stack of as many equal ones, row after row, as the weight has.
    """

    name: str
    shape: tuple[str, ...] = ()
    rows: Rows | None = None
    convert: Convert | None = None
    otherwise: InFile | None = None
    moves: Convert | None = None
    stacked: bool = False

    def names(self, layer: int, experts: int) -> list[str]:
        """The tensors' names: one, or one of each expert."""
        count = experts if "{expert}" in self.name else 1
        return [self.name.format(layer, expert=e) for e in range(count)]

    def way_of(self, file: TensorFile, layer: int) -> InFile:
        """The way in which this file stores the weight; this one where it has no tensor of any."""
        if self.otherwise is None or self.names(layer, 1)[0] in file.tensors:
            return self
        other = self.otherwise.way_of(file, layer)
        return other if other.names(layer, 1)[0] in file.tensors else self


class Entry(msgspec.Struct, frozen=True):
    """One weight.

    Args:
        name: what the forward calls it; `{}` stands for the layer's number.
        shape: fields of the line's config: [K], [N, K], or [E, N, K] for a stack of experts.
        hf, gguf: how checkpoints and GGUF files store it.
        shard: the axis along which ranks divide it; None: each has all of it.
        most_shards: field of the config with the greatest number of shards; of more ranks, neighbours have
            the same one. None: as many as there are ranks.
        sections: parts of that axis, such as queries and keys, of each of which a rank has its share; None:
            the axis is one part.
        when: whether a layer has it; None: every layer.
        experts: a stack of routed experts, of which ranks may have some each.
    """

    name: str
    shape: tuple[str, ...]
    hf: InFile
    gguf: InFile
    shard: int | None = None
    when: Callable[[Any, int], bool] | None = None
    most_shards: str | None = None
    sections: Sections | None = None
    experts: bool = False

    def sizes(self, config: LayeredConfig) -> tuple[int, ...]:
        return tuple(getattr(config, field) for field in self.shape)

    def shard_of(self, weight: Weight, config: LayeredConfig, at: TensorRank) -> Weight:
        """What a rank has of this weight. Raises OpError where it does not divide."""
        if self.shard is None or at.ranks == 1:
            return weight
        if self.experts and at.whole_experts:
            return weight.shard_of(0, at.rank, at.ranks)
        shards = min(at.ranks, getattr(config, self.most_shards)) if self.most_shards else at.ranks
        rank = at.rank * shards // at.ranks
        if self.sections is None:
            return weight.shard_of(self.shard, rank, shards)
        return shares_of(weight, self.shard, self.sections(config), rank, shards)


def entry(name: str, hf: str, gguf: str, shape: tuple[str, ...], shard: int | None = None) -> Entry:
    """A weight that files store as it is."""
    return Entry(name, shape, InFile(hf), InFile(gguf), shard)


def in_layer(
    name: str,
    hf: str,
    gguf: str,
    shape: tuple[str, ...],
    *,
    gguf_rows: Rows | None = None,
    shard: int | None = None,
    most_shards: str | None = None,
    when: Callable[[Any, int], bool] | None = None,
) -> Entry:
    """A weight of a layer, named as decoders of Hugging Face and llama.cpp name theirs."""
    checkpoint, ggml = f"model.layers.{{}}.{hf}.weight", f"blk.{{}}.{gguf}.weight"
    stored = InFile(checkpoint), InFile(ggml, (), gguf_rows)
    return Entry(f"layers.{{}}.{name}", shape, *stored, shard, when, most_shards)


class WeightTable(msgspec.Struct, frozen=True):
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
        numbers = range(config.num_layers)
        layers = [(e, i) for i in numbers for e in self.layer if e.when is None or e.when(config, i)]
        head = [] if config.tie_word_embeddings else [(self.head, 0)]
        return [(self.embed, 0), *((e, 0) for e in self.others), *layers, *head]

    def of_layer(self, config: LayeredConfig, layer: int) -> dict[str, str]:
        """The names of a layer's weights by what follows the layer's number in them."""
        found = [e for e in self.layer if e.when is None or e.when(config, layer)]
        return {e.name.partition("{}.")[2]: e.name.format(layer) for e in found}

    def shapes(self, config: LayeredConfig) -> dict[str, tuple[int, ...]]:
        """Each weight's shape by its name."""
        return {e.name.format(i): e.sizes(config) for e, i in self.entries(config)}

    def head_name(self, config: LayeredConfig) -> str:
        """The weight that the logits come from."""
        return (self.embed if config.tie_word_embeddings else self.head).name


def plan_weights(
    table: WeightTable,
    config: LayeredConfig,
    file: TensorFile,
    spelling: Spelling,
    *,
    ignored: Sequence[str] = (),
    scheme_of: SchemeOf = lambda name: None,
    at: TensorRank = ONE_RANK,
) -> dict[str, Weight]:
    """Every weight of the table by name: which byte ranges of which file hold which of its parts.

    Reads nothing but headers, with two exceptions: a tied head that is stored as well is compared with the
    embedding, and values that are converted (`InFile.convert`) are read.

    Args:
        spelling: whose names the file has.
        ignored: patterns of tensors that may be there and are not read.
        scheme_of: the scheme of a tensor that the checkpoint's config calls quantised. Its parts are found
            by their suffixes, in place of '.weight'.
        at: whose shards of the entries that say how they are divided.

    Raises ModelFileError where tensors are missing or misshapen or a tied head differs from the embedding,
    UnsupportedError where there are unknown ones or a scheme has no decoder, OpError where a weight does not
    divide into shards.
    """
    plans = [_Plan(file, config, e, i, getattr(e, spelling), scheme_of) for e, i in table.entries(config)]
    wanted = dict.fromkeys(name for p in plans for part in p.parts.values() for name in part)
    head = getattr(table.head, spelling).name
    if config.tie_word_embeddings and head in file.tensors:
        check_tied(file, getattr(table.embed, spelling).name, head)
        ignored = (*ignored, head)
    check_names(table.line, file, wanted, ignored, head)
    return {p.entry.name.format(p.layer): p.entry.shard_of(p.weight(), config, at) for p in plans}


class _Plan:
    """How one entry's tensors become its weight. `parts`: names of the tensors of each stored part."""

    def __init__(
        self,
        file: TensorFile,
        config: LayeredConfig,
        entry: Entry,
        layer: int,
        stored: InFile,
        scheme_of: SchemeOf,
    ) -> None:
        stored = stored.way_of(file, layer)
        self.file, self.config, self.entry, self.layer, self.stored = file, config, entry, layer, stored
        self.fields = stored.shape or entry.shape
        self.shape = tuple(getattr(config, field) for field in self.fields)
        names = stored.names(layer, self.shape[0])
        self.scheme = scheme_of(names[0]) if len(self.shape) > 1 else None
        if self.scheme is None:
            self.parts = {"values": names}
            return
        modules = [name.removesuffix(".weight") for name in names]
        self.parts = {p.name: [m + p.suffix for m in modules] for p in self.scheme.parts}

    def weight(self) -> Weight:
        """Raises ModelFileError, UnsupportedError."""
        scheme = self.scheme or self._plain()
        parts = {}
        for p in scheme.parts:
            names = self.parts[p.name]
            separate = "{expert}" in self.stored.name
            shape = p.shape(self.shape[1:] if separate else self.shape)
            found = [self._part(name, shape) for name in names]
            parts[p.name] = Part.stacked(found) if separate else found[0]
        weight = Weight(scheme, self.shape, parts)
        source = next(iter(self.parts.values()))[0], self.file.path
        weight = take_rows(weight, self.stored.rows and self.stored.rows(self.config), *source)
        if self.stored.convert is not None:
            weight = float32(self.stored.convert(self.config, read_values(weight)))
        if self.stored.moves is not None:
            weight = moved_values(weight, partial(self.stored.moves, self.config), *source)
        if self.stored.stacked:
            weight = weight.stacked(self.entry.sizes(self.config)[0])
        assert weight.shape == self.entry.sizes(self.config), f"{self.entry.name}: rows do not make its shape"
        return weight

    def _plain(self) -> Scheme:
        """The format that the file states, which must have a decoder unless it is expanded here."""
        name = self.parts["values"][0]
        form = self.file.tensors[name].format
        if form not in SCHEMES:
            raise UnsupportedError(
                f"tensor {name}: no kernels for this format", expected=" ".join(SCHEMES), got=form,
                where=self.file.path, remedy="use a file in one of the formats named",
            )  # fmt: skip
        return plain(form)

    def _part(self, name: str, shape: tuple[int, ...]) -> Part:
        """A tensor under the shape that is wanted; axes of one entry do not matter."""
        info = self.file.tensors[name]
        if [n for n in info.shape if n != 1] != [n for n in shape if n != 1]:
            raise ModelFileError(
                f"tensor {name} contradicts the config",
                expected=f"{list(shape)} = [{', '.join(self.fields)}]",
                got=list(info.shape),
                where=self.file.path,
            )
        return self.file.part(name).reshape(shape)


def without_data(table: WeightTable, config: LayeredConfig) -> dict[str, Weight]:
    """Every weight of such a model by name, in bf16 and with no parts: the values are to be made up."""
    return {name: Weight(plain("bf16"), shape, {}) for name, shape in table.shapes(config).items()}


def embedding_in_gguf(table: WeightTable, file: TensorFile) -> tuple[int, bool]:
    """What GGUF says by its tensors alone: the embedding's rows, and whether it is the head as well.

    Raises ModelFileError without an embedding.
    """
    name = table.embed.gguf.name
    embedding = file.tensors.get(name)
    if embedding is None:
        raise missing_tensor(name, len(file.tensors), file.path)
    return embedding.shape[0], table.head.gguf.name not in file.tensors


def read_vector(file: TensorFile, name: str, size: int) -> Array:
    """A small tensor, [size] float32, copied out of the file. Raises ModelFileError."""
    info = file.tensors[name]
    if info.shape != (size,):
        raise ModelFileError(
            f"tensor {name} contradicts the config", expected=[size], got=list(info.shape), where=file.path
        )
    return dequantize(info.format, file.part(name).bytes(), info.shape)
