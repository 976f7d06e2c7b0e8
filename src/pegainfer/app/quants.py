"""Chooses a GGUF model of a repository: by the formats that its name says, its size, and the free memory.

Names follow llama.cpp's: `Model-Q4_K_M.gguf`, `model.q8_0.gguf`, `BF16/Model-BF16-00001-of-00003.gguf`. A
model in several parts goes by the path of its first part here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from pegainfer.contract.errors import ConfigError, UnsupportedError
from pegainfer.runtime.weights.gguf_split import group_parts, number_of_parts

# The first that is served and fits is taken: four bits are the usual balance of size, speed and accuracy;
# then more bits for their accuracy, then other ways of four and five bits, then fewer bits.
PREFERENCE = (
    "Q4_K_M", "Q4_K_XL", "Q4_K_S", "Q5_K_M", "Q5_K_XL", "Q5_K_S", "Q6_K", "Q6_K_XL", "Q8_0", "Q8_K_XL",
    "MXFP4", "MXFP4_MOE", "IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0", "Q5_1", "Q5_0", "BF16", "F16", "F32",
    "Q3_K_L", "Q3_K_XL", "Q3_K_M", "IQ3_M", "Q3_K_S", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K_L", "Q2_K_XL",
    "Q2_K",
)  # fmt: skip
# What llama.cpp's quantiser puts beside the format that a file is named by.
_BESIDE = {
    "Q2_K": ("q3_k", "q6_k"), "Q3_K_S": ("q6_k",), "Q3_K_M": ("q4_k", "q5_k", "q6_k"),
    "Q3_K_L": ("q5_k", "q6_k"), "Q4_K_S": ("q5_k",), "Q4_K_M": ("q6_k",), "Q5_K_M": ("q6_k",),
}  # fmt: skip
# Names of mixtures that are not called after the format of most of their weights.
_MIXTURES = {
    "IQ2_M": ("iq2_s",), "IQ3_XS": ("iq3_s", "iq3_xxs"), "IQ3_M": ("iq3_s",), "MXFP4_MOE": ("mxfp4", "q8_0"),
    "Q8_K_XL": ("q8_0",),
}  # fmt: skip
_PLAIN = {"FP16": "F16", "FP32": "F32"}
_QUANT = re.compile(
    r"(?:^|[-._/])((?:UD-)?I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|FP?16|FP?32)(?=[-.])",
    re.IGNORECASE,
)
# Beside the weights: KV cache, activations and the process.
_EXTRA_SHARE, _EXTRA_BYTES = 0.10, 256 << 20


class Choice(msgspec.Struct, frozen=True):
    """The files of a model, the parts of a split one in order, and why it was taken."""

    files: tuple[str, ...]
    why: str


def quant_of(path: str) -> str | None:
    """'Q4_K_M' of 'Model-Q4_K_M.gguf'; None for a name that says nothing of formats."""
    found: str | None = None
    for match in _QUANT.finditer(path):  # the last one: a model's own name may hold another
        found = match[1].upper()
    return None if found is None else _PLAIN.get(found, found)


def formats_of(quant: str) -> tuple[str, ...]:
    """Storage formats of a file that is named by this quantisation, in ggml's names."""
    name = quant.removeprefix("UD-")
    if name in _MIXTURES:
        return _MIXTURES[name]
    # IQ4_XS is a format itself; Q4_K_M is a mixture with Q4_K.
    base = name if name.startswith("IQ") else re.sub(r"_(?:XXS|XS|S|M|L|XL)$", "", name)
    return (base.lower(), *_BESIDE.get(quant, ()))


def memory_for(nbytes: int) -> int:
    """About what a model of so many bytes of weights takes, in bytes."""
    return round(nbytes * (1 + _EXTRA_SHARE)) + _EXTRA_BYTES


def choose_file(
    repository: str,
    files: Mapping[str, int],
    served: tuple[str, ...],
    memory: int,
    *,
    quant: str | None = None,
    file: str | None = None,
) -> Choice:
    """The GGUF model that was asked for, or the best one for this machine.

    Args:
        files: paths of GGUF files, parts of split ones among them -> bytes.
        served: formats of weights that are served.
        memory: bytes that a model may take.
        quant, file: what the user has named, if anything; any part stands for a split model.

    Raises ConfigError where what was named is not there, not one model, or lacks parts, UnsupportedError
    where it, or every model of the repository, is not served.
    """
    models = {parts[0]: parts for parts in group_parts(files)}
    sizes = {path: sum(files[part] for part in parts) for path, parts in models.items()}
    if file is not None or quant is not None:
        named = _named(repository, models, quant, file)
        _check_named(models[named], served)
        return Choice(models[named], "it was named")
    usable, refused = _usable(models, served)
    if not usable:
        raise UnsupportedError(
            f"no GGUF file of {repository} is served",
            expected="formats " + " ".join(served),
            got="; ".join(f"{path}: {why}" for path, why in sorted(refused.items()))[:400],
            remedy="name another repository of this model",
        )
    order = sorted(usable, key=lambda path: (_rank(path), sizes[path], path))
    fitting = [path for path in order if memory_for(sizes[path]) <= memory]
    if not fitting:
        smallest = min(usable, key=lambda path: (sizes[path], path))
        return Choice(
            models[smallest],
            f"none fits into the {memory / 2**30:.1f} GiB that are free; this is the smallest",
        )
    return Choice(models[fitting[0]], _reason(fitting[0], order, sizes, refused, memory))


def _named(
    repository: str, models: Mapping[str, tuple[str, ...]], quant: str | None, file: str | None
) -> str:
    """Raises ConfigError."""
    if file is not None:
        found = [path for path, parts in models.items() if file in parts]
    else:
        # It stands between the model's name and the suffix: Model-Q4_K_M.gguf, model.q8_0.gguf.
        between = re.compile(rf"(^|[-._/]){re.escape((quant or '').lower())}[-.]")
        found = [path for path in models if between.search(path.lower())]
    if len(found) != 1:
        raise ConfigError(
            f"{repository} has {'no' if not found else 'more than one'} such GGUF file",
            expected=" ".join(sorted(models))[:400] or "a repository with GGUF files",
            got=file or quant,
            remedy=f"name one: {repository}:QUANT or {repository}/FILE.gguf",
        )
    return found[0]


def _check_named(parts: tuple[str, ...], served: tuple[str, ...]) -> None:
    """Raises ConfigError for missing parts, UnsupportedError for a format in the name that is not served.

    What a quantiser puts beside that format depends on its version, so the file itself decides about it.
    """
    path = parts[0]
    quant, count = quant_of(path), number_of_parts(path)
    if len(parts) != count:
        raise ConfigError(
            "parts of this GGUF model are missing", expected=f"{count} parts", got=len(parts), where=path
        )
    if quant is not None and formats_of(quant)[0] not in served:
        raise UnsupportedError(
            "the format of this GGUF file is not served", expected=" ".join(served), got=formats_of(quant)[0],
            where=path,
        )  # fmt: skip


def _usable(
    models: Mapping[str, tuple[str, ...]], served: tuple[str, ...]
) -> tuple[list[str], dict[str, str]]:
    """The models whose names say nothing against them; and the others, each with its reason."""
    refused: dict[str, str] = {}
    for path, parts in models.items():
        quant, count = quant_of(path), number_of_parts(path)
        name = path.rsplit("/", 1)[-1].lower()
        if len(parts) != count:
            refused[path] = f"{len(parts)} of {count} parts"
        elif name.startswith(("mmproj", "imatrix")) or "-mmproj" in name or "imatrix" in name:
            refused[path] = "not a language model"
        elif quant is not None and (wrong := [f for f in formats_of(quant) if f not in served]):
            refused[path] = f"{' and '.join(wrong)} not served"
    return [path for path in models if path not in refused], refused


def _rank(path: str) -> int:
    quant = (quant_of(path) or "").removeprefix("UD-")
    return PREFERENCE.index(quant) if quant in PREFERENCE else len(PREFERENCE)


def _reason(
    path: str, order: list[str], sizes: Mapping[str, int], refused: Mapping[str, str], memory: int
) -> str:
    """One sentence for the user."""
    size = f"{memory_for(sizes[path]) / 2**30:.1f} of {memory / 2**30:.1f} GiB free"
    if len(sizes) == 1:
        return f"the only GGUF model; {size}"
    larger = [f"{quant_of(p) or p} does not fit" for p in order[: order.index(path)]]
    unserved = [f"{quant_of(p)}: {why}" for p, why in refused.items() if _rank(p) < _rank(path)]
    passed = larger + sorted(unserved)
    if passed:
        return f"{size}; " + ", ".join(passed[:4])
    return f"the usual balance of size, speed and accuracy; {size}"
