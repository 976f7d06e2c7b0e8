"""What a checkpoint's config says about quantised weights: which matrices, and how they are stored.

Reads `quantization_config` of config.json as AWQ, GPTQ, FP8 and compressed-tensors checkpoints have it. What
has no decoder is refused by name, from the config alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pegainfer.contract.errors import ModelFileError
from pegainfer.ops.ranks import ONE_RANK, TensorRank
from pegainfer.ops.weights import LayeredConfig, WeightTable, plan_weights
from pegainfer.runtime.weights.fields import Fields
from pegainfer.runtime.weights.tensorfile import TensorFile
from pegainfer.runtime.weights.weight import Scheme, Weight

log = logging.getLogger(__name__)

KEY = "quantization_config"
# Parts that no weight needs: shapes that the config implies, scales of activations, which are computed in
# more digits here, those of the KV cache (ops/kv_scales.py), and the identity order of GPTQ files without act
# order.
_IGNORED = (
    "*.weight_shape", "*.input_scale", "*.input_zero_point", "*.input_global_scale", "*.input_scale_ub",
    "*.k_scale", "*.v_scale", "*.kv_scale", "*.k_proj.output_scale", "*.v_proj.output_scale",
)  # fmt: skip


class Rule(msgspec.Struct, frozen=True):
    """The scheme of the modules that it matches; scheme None: they are stored plainly."""

    matches: Callable[[str], bool]
    scheme: Scheme | None


class Quantization(msgspec.Struct, frozen=True):
    """How a checkpoint's matrices are stored.

    Args:
        method: as the config calls it, for logs.
        rules: the first that matches a module's name decides.
        ignored: patterns of tensors that are not read.
        zero_biases: the writer stores biases of zeros beside matrices that have none.
    """

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = msgspec.field(default=_IGNORED)
    zero_biases: bool = False

    def scheme_for(self, module: str) -> Scheme | None:
        """Of a module by its name in the checkpoint; None: its weight is plain."""
        return next((r.scheme for r in self.rules if r.matches(module)), None)

    def scheme_of(self, file: TensorFile) -> Callable[[str], Scheme | None]:
        """For `plan_weights`: the scheme of the tensor '<module>.weight'.

        Writers leave some modules alone that their config does not name, such as the head and routers, so a
        plain weight in the file is taken as it is.
        """

        def scheme(name: str) -> Scheme | None:
            module = name.removesuffix(".weight")
            found, plain = self.scheme_for(module), file.tensors.get(name)
            if found is None or plain is None or plain.format in found.parts[0].formats:
                return found
            return None

        return scheme

    def unread(self, file: TensorFile) -> list[str]:
        """Names and patterns of tensors that `plan_weights` is to ignore.

        Raises ModelFileError for a bias that is not zero where the line has none.
        """
        if not self.zero_biases:
            return list(self.ignored)
        biases = [n for n in file.tensors if n.endswith(".bias") and self.scheme_for(n[: -len(".bias")])]
        for name in biases:
            if np.any(file.part(name).bytes().view("<u2") & np.uint16(0x7FFF)):  # all but signs, also of f32
                raise ModelFileError(f"tensor {name} is a bias, which this line lacks", where=file.path)
        return [*self.ignored, *biases]


def read_quantization(f: Fields) -> Quantization | None:
    """Of a parsed config.json; None for a plain checkpoint. Raises ConfigError, UnsupportedError."""
    source = f.mapping(KEY)
    if source is None:
        return None
    q = f.inner(source, f"{KEY}: ")
    method = q.text("quant_method", "")
    if method == "awq":
        return _awq(q)
    if method == "gptq":
        return _gptq(q, source)
    if method in ("fp8", "fbgemm_fp8"):
        return _fp8(q, method)
    q.refuse("quant_method", method != "compressed-tensors", expected="awq, gptq, fp8, fbgemm_fp8 or "
             "compressed-tensors")  # fmt: skip
    return _compressed_tensors(q)


def plan_checkpoint(
    table: WeightTable, config: LayeredConfig, file: TensorFile, quantization: Quantization | None, *,
    ignored: Sequence[str] = (), at: TensorRank = ONE_RANK,
) -> dict[str, Weight]:  # fmt: skip
    """`plan_weights` of a checkpoint in Hugging Face's naming, plain or quantised. Raises as it does."""
    if quantization is None:
        return plan_weights(table, config, file, "hf", ignored=ignored, at=at)
    unread = [*ignored, *quantization.unread(file)]
    planned = plan_weights(
        table, config, file, "hf", ignored=unread, scheme_of=quantization.scheme_of(file), at=at
    )
    expanded = [n for n, w in planned.items() if w.scheme.form is not None and w.dtype == "f16"]
    if expanded:
        log.warning(
            "%d matrices are expanded to f16: no form holds their groups (act order, or rows of no whole"
            " groups); the first is %s", len(expanded), expanded[0],
        )  # fmt: skip
    return planned


def _linear(module: str) -> bool:
    """What a writer calls a linear layer, as far as names tell; the file decides about the rest."""
    return not module.endswith(("norm", "embed_tokens"))


def _group(q: Fields, key: str, default: int) -> int | None:
    """Columns of a group; None for a whole row, which files write as -1."""
    size = q.integer(key, default, least=-1)
    q.require(key, size != 0, "-1 or a positive integer")
    return None if size == -1 else size


def _awq(q: Fields) -> Quantization:
    from pegainfer.runtime.weights import checkpoints

    q.refuse("bits", q.integer("bits", 4) != 4, expected=4)
    q.refuse("version", q.text("version", "gemm").lower() != "gemm", expected="gemm")
    q.refuse("zero_point", not q.boolean("zero_point", True), expected="true")
    skipped = q.texts("modules_to_not_convert")
    scheme = checkpoints.awq(_group(q, "group_size", 128))
    rules = (Rule(lambda m: any(s in m for s in skipped), None), Rule(_linear, scheme))
    return Quantization("awq", rules, zero_biases=True)


def _gptq(q: Fields, source: Mapping[str, Any]) -> Quantization:
    from pegainfer.runtime.weights import checkpoints

    form = q.text("checkpoint_format", "gptq")
    offsets = {"gptq": 1, "gptq_v2": 0}
    q.refuse("is_marlin_format", q.boolean("is_marlin_format", False), expected="false")
    q.refuse("pack_dtype", q.text("pack_dtype", "int32") != "int32", expected="int32")
    q.refuse("checkpoint_format", form not in offsets, expected="gptq or gptq_v2")

    def scheme(values: Fields) -> Scheme:
        bits = values.integer("bits")
        values.refuse("bits", bits not in (4, 8), expected="4 or 8")
        order = values.boolean("desc_act", False)
        return checkpoints.gptq(
            bits, _group(values, "group_size", 128), act_order=order, offset=offsets[form]
        )

    rules = []
    for pattern, changes in (q.mapping("dynamic") or {}).items():
        expression = pattern.removeprefix("+:").removeprefix("-:")
        _check_pattern(q, "dynamic", expression)
        q.require("dynamic", isinstance(changes, Mapping), "an object of objects")
        found = (
            None if pattern.startswith("-:") else scheme(q.inner({**source, **changes}, f"{KEY}: dynamic: "))
        )
        rules.append(Rule(_matcher("re:" + expression), found))
    if not q.boolean("lm_head", False):
        rules.append(Rule(_matcher("lm_head"), None))
    rules.append(Rule(_linear, scheme(q)))
    ordered = any(r.scheme is not None and any(p.name == "order" for p in r.scheme.parts) for r in rules)
    ignored = _IGNORED if ordered else (*_IGNORED, "*.g_idx")
    return Quantization("gptq", tuple(rules), ignored, zero_biases=True)


def _fp8(q: Fields, method: str) -> Quantization:
    """Checkpoints of DeepSeek, Qwen and transformers. Activations are quantised as kernels do it, not as the
    file says."""
    from pegainfer.runtime.weights.fp8_checkpoints import fp8_scheme

    q.refuse("fmt", q.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"), expected="e4m3")
    scheme = q.text("activation_scheme", "dynamic")
    q.refuse("activation_scheme", scheme not in ("dynamic", "static"), expected="dynamic or static")
    tile = q.integers("weight_block_size")
    q.require("weight_block_size", len(tile) in (0, 2) and all(n > 0 for n in tile), "two positive integers")
    skipped = (*q.texts("modules_to_not_convert"), *q.texts("ignored_layers"))

    def is_skipped(module: str) -> bool:
        """Names of modules, or of what they are in, whole but for what stands before or after them."""
        return any(f".{s}." in f".{module}." for s in skipped)

    if tile:
        found = fp8_scheme(*tile, ".weight_scale_inv")
    else:
        found = fp8_scheme(1 if method == "fbgemm_fp8" else None, None)
    return Quantization(method, (Rule(is_skipped, None), Rule(_linear, found)))


def _compressed_tensors(q: Fields) -> Quantization:
    q.refuse("quantization_status", q.text("quantization_status", "compressed") != "compressed",
             expected="compressed")  # fmt: skip
    for key in ("sparsity_config", "transform_config"):
        found = q.mapping(key) or {}
        dense = key == "sparsity_config" and found.get("format") == "dense"
        q.refuse(key, bool(found) and not dense, expected="none", got=dict(found))
    form = q.text("format", "pack-quantized")
    ignored = q.texts("ignore")
    for entry in ignored:
        _check_pattern(q, "ignore", entry.removeprefix("re:") if entry.startswith("re:") else "")
    rules = [Rule(_matcher(*ignored), None)]
    for name, group in (q.mapping("config_groups") or {}).items():
        q.require("config_groups", isinstance(group, Mapping), "an object of objects")
        g = q.inner(group, f"{KEY}: {name}: ")
        targets = g.texts("targets")
        for target in targets:
            _check_pattern(g, "targets", target.removeprefix("re:") if target.startswith("re:") else "")
        by_name = _matcher(*(t for t in targets if t != "Linear"))
        weights = g.mapping("weights")
        g.require("weights", weights is not None, "an object")
        scheme = _ct_scheme(g.inner(weights or {}, f"{KEY}: {name}: weights: "), g.text("format", form))
        every = "Linear" in targets
        rules.append(Rule(_either(by_name, _linear) if every else by_name, scheme))
    q.require("config_groups", len(rules) > 1 or bool(q.mapping("kv_cache_scheme")), "at least one group")
    return Quantization("compressed-tensors", tuple(rules))


def _ct_scheme(w: Fields, form: str) -> Scheme:
    """The scheme of one group's weights in a format of compressed-tensors."""
    from pegainfer.runtime.weights import checkpoints

    bits, kind = w.integer("num_bits"), w.text("type", "int")
    strategy, symmetric = w.text("strategy", "tensor"), w.boolean("symmetric", True)
    if form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        w.refuse("type", (kind, bits) != ("float", 4), expected="float of 4 bits", got=f"{kind} of {bits}")
        return checkpoints.fp4(form.partition("-")[0])
    if form in ("float-quantized", "naive-quantized") and kind == "float":
        return _ct_fp8(w, bits, strategy)
    if form not in ("pack-quantized", "int-quantized"):
        w.refuse("format", True, expected="pack-quantized int-quantized float-quantized nvfp4-pack-quantized "
                 "mxfp4-pack-quantized", got=form)  # fmt: skip
    w.refuse("type", kind != "int", expected="int")
    strategies = ("group", "channel") if form == "pack-quantized" else ("group", "channel", "tensor")
    w.refuse("strategy", strategy not in strategies, expected=" or ".join(strategies))
    group = _group(w, "group_size", 128) if strategy == "group" else None
    order = w.text("actorder", "static").lower()  # null and 'weight' leave columns in order
    w.refuse(
        "actorder", order not in ("static", "weight", "group", "dynamic"), expected="null, weight or group"
    )
    ordered = order in ("group", "dynamic") and group is not None
    if form == "int-quantized":
        w.refuse("num_bits", bits != 8, expected=8)
        w.refuse("actorder", ordered, expected="null or weight")
        return checkpoints.plain_ints(group, symmetric=symmetric, per_tensor=strategy == "tensor")
    w.refuse("num_bits", bits not in (4, 8), expected="4 or 8")
    return checkpoints.packed_ints(bits, group, symmetric=symmetric, act_order=ordered)


def _ct_fp8(w: Fields, bits: int, strategy: str) -> Scheme:
    from pegainfer.runtime.weights.fp8_checkpoints import fp8_scheme

    w.refuse("num_bits", bits != 8, expected=8)
    w.refuse("symmetric", not w.boolean("symmetric", True), expected="true")
    if strategy == "block":
        tile = w.integers("block_structure")
        w.require("block_structure", len(tile) == 2 and all(n > 0 for n in tile), "two positive integers")
        return fp8_scheme(*tile)
    if strategy == "group":
        return fp8_scheme(1, _group(w, "group_size", 128))
    w.refuse("strategy", strategy not in ("tensor", "channel"), expected="tensor, channel, group or block")
    return fp8_scheme(1 if strategy == "channel" else None, None)


def _matcher(*names: str) -> Callable[[str], bool]:
    """Whether a module is one of these: whole names, or 're:' and an expression that its name begins with."""
    whole = {n for n in names if not n.startswith("re:")}
    patterns = [re.compile(n[3:]) for n in names if n.startswith("re:")]
    return lambda module: module in whole or any(p.match(module) for p in patterns)


def _either(first: Callable[[str], bool], second: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda module: first(module) or second(module)


def _check_pattern(q: Fields, key: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error:
        q.require(key, False, "regular expressions")
