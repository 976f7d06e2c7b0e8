"""Scales of an 8-bit KV cache, as a checkpoint has them: what it stores is a key or value over its scale.

Writers name the scales of a layer differently: compressed-tensors `self_attn.k_scale` (its older versions
`k_proj.output_scale`), ModelOpt `k_proj.k_scale`; one `kv_scale` serves both keys and values.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from pegainfer.ops.program import OpCall, Program
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.tensorfile import TensorFile

log = logging.getLogger(__name__)

Scales = Mapping[int, tuple[float, float]]  # of keys and of values, by the checkpoint's number of a layer

_NAME = re.compile(
    r"(?:.*\.)?layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:attn\.|[kv]_proj\.)?(?P<which>k|v|kv)_scale|(?P<output>[kv])_proj\.output_scale)"
)
_FLOAT8: dict[str, Any] = {"type": "float", "num_bits": 8}


def read_kv_scales(config: Mapping[str, Any], file: TensorFile) -> dict[int, tuple[float, float]]:
    """The scales of an open checkpoint. A scale that is not there, or not above 0, is 1.

    Args:
        config: the parsed config.json. Where it declares another format of the cache than 8-bit floats, the
            scales belong to that format and are ignored.
    """
    quantization = config.get("quantization_config")
    scheme = quantization.get("kv_cache_scheme") if isinstance(quantization, Mapping) else None
    if isinstance(scheme, Mapping) and any(scheme.get(k, v) != v for k, v in _FLOAT8.items()):
        return {}
    found: dict[int, dict[str, float]] = {}
    for name, info in file.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        if math.prod(info.shape) != 1:
            log.warning("%s: scales per head are not supported; the layer's scale is 1", name)
            continue
        value = float(dequantize(info.format, file.part(name).bytes(), info.shape).reshape(-1)[0])
        for which in match["which"] or match["output"]:
            if math.isfinite(value) and value > 0:
                found.setdefault(int(match["layer"]), {})[which] = value
    return {layer: (each.get("k", 1.0), each.get("v", 1.0)) for layer, each in found.items()}


def with_kv_scales(program: Program, scales: Scales) -> Program:
    """The program with a forward's caches scaled.

    A cache may have other numbers for its layers than the checkpoint, for not all layers may have keys; the
    projection of keys is called layers.NUMBER.NAME.
    """
    of_cache: dict[int, tuple[float, float]] = {}
    for call in program.calls:
        if "wk" in call.tensors and "k_scale" in call.spec.attrs:
            number = int(call.tensors["wk"].name.split(".")[1])
            of_cache[call.attrs["layer"]] = scales.get(number, (1.0, 1.0))
    return Program(program.name, tuple(_scaled(call, of_cache) for call in program.calls))


def _scaled(call: OpCall, of_cache: Scales) -> OpCall:
    if "k_scale" not in call.spec.attrs:
        return call
    k_scale, v_scale = of_cache[call.attrs["layer"]]
    return replace(call, attrs={**call.attrs, "k_scale": k_scale, "v_scale": v_scale})
