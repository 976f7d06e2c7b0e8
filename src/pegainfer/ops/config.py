"""What ops have to know of a model's config: head sizes and the rotation's scaling, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer.runtime.weights.fields import Fields

MAX_HEAD_DIM = 256  # what the attention kernels are built for
# rope_type -> its numbers: those that must be there, those that may.
_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}
# llama.cpp's numbers beside the yarn that Hugging Face means; a file may only hold these values.
_GGUF_YARN_FIXED = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0}


def head_size(f: Fields, key: str, default: int) -> int:
    """An even head size that the kernels can have. Raises ConfigError and UnsupportedError."""
    size = f.integer(key, default)
    f.refuse(key, size % 2 != 0 or size > MAX_HEAD_DIM, expected=f"an even head size ≤ {MAX_HEAD_DIM}")
    return size


def serve_only(f: Fields, texts: Mapping[str, str], off: Sequence[str] = ()) -> None:
    """Raises UnsupportedError where a config says more than what is served; absent keys are fine.

    Args:
        texts: the one text that is served, by its key.
        off: flags that must be false.
    """
    for key in off:
        f.refuse(key, f.boolean(key, False), expected="false")
    for key, served in texts.items():
        f.refuse(key, f.text(key, served) != served, expected=served)


def kv_heads(f: Fields, key: str, heads: int, default: int | None) -> int:
    """Heads of keys and values, a divisor of the query heads. Raises ConfigError."""
    found = f.integer(key, default)
    f.require(key, heads % found == 0, f"a divisor of the {heads} query heads")
    return found


def hf_kv_heads(f: Fields, config: Mapping[str, Any], heads: int) -> int:
    """Of a config.json, which `f` reads: null means one for each query head, but the key must be there."""
    key = "num_key_value_heads"
    return kv_heads(f, key, heads, heads if key in config else None)


def rotary_size(f: Fields, head_dim: int, default: float) -> int:
    """Leading channels of a head that a config.json rotates: an even number of them.

    Args:
        default: `partial_rotary_factor` of a config without it.

    Raises ConfigError.
    """
    key = "partial_rotary_factor"
    rope = f.inner(f.mapping("rope_parameters") or f.mapping("rope_scaling") or {}, "rope scaling: ")
    size = int(head_dim * (rope if rope.has(key) else f).number(key, default, most=1.0))
    f.require(key, size > 0 and size % 2 == 0, f"a share of {head_dim} that is an even number")
    return size


def served_length(trained: int, scaling: Mapping[str, Any] | None) -> int:
    """Tokens that can be served: instructions to add yarn to a config.json leave the length in it alone."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return trained
    return max(trained, int(scaling["factor"] * scaling["original_max_position_embeddings"]))


def hf_rope(
    f: Fields, kinds: tuple[str, ...], max_position_embeddings: int, *, partial: bool = False
) -> tuple[float, Mapping[str, Any] | None]:
    """Theta and scaling (None for none) of a config.json, checked.

    transformers 5 writes rope_parameters; older files have rope_theta beside rope_scaling.

    Args:
        kinds: rope types that the line serves.
        max_position_embeddings: what yarn was trained for if it does not say (as in transformers).
        partial: whether the line may rotate a part of each head (`rotary_size`).

    Raises ConfigError and UnsupportedError.
    """
    found = f.mapping("rope_parameters") or f.mapping("rope_scaling") or {}
    rope = f.inner(found, "rope scaling: ")
    theta = (rope if rope.has("rope_theta") else f).number("rope_theta", 1e4, least=1.0)
    key = "partial_rotary_factor"
    rope.refuse(key, not partial and rope.number(key, 1.0) != 1.0, expected=1.0)
    return theta, rope_scaling(rope, found, kinds, max_position_embeddings)


def gguf_rope(
    f: Fields, kinds: tuple[str, ...], *, mscale: bool = False
) -> tuple[float, Mapping[str, Any] | None]:
    """Theta and scaling of GGUF metadata, under the names that config.json has for them.

    Args:
        mscale: whether the line's yarn has `mscale` and `mscale_all_dim`, both ten times the file's
            yarn_log_multiplier, which must be there then. Other lines refuse it.
    """
    theta = f.number("rope.freq_base", 1e4, least=1.0)
    # Old files say linear scaling by a factor without a type, or by the key rope.scale_linear.
    factor = next((k for k in ("rope.scaling.factor", "rope.scale_linear") if f.has(k)), None)
    kind = f.text("rope.scaling.type", "none" if factor is None else "linear")
    found: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    if kind in kinds and kind in ("linear", "yarn"):
        found["factor"] = f.number(factor or "rope.scaling.factor")
    if kind in kinds and kind == "yarn":
        trained = f.integer("rope.scaling.original_context_length", most=1 << 30)
        found["original_max_position_embeddings"] = trained
        for key in ("beta_fast", "beta_slow"):
            if f.has(f"rope.scaling.yarn_{key}"):
                found[key] = f.number(f"rope.scaling.yarn_{key}")
        for key, value in _GGUF_YARN_FIXED.items():
            name = f"rope.scaling.{key}"
            f.refuse(name, f.has(name) and f.number(name) != value, expected=value)
        key = "rope.scaling.yarn_log_multiplier"
        f.refuse(key, f.has(key) and not mscale, expected="none")
        if mscale:
            found["mscale"] = found["mscale_all_dim"] = 10 * f.number(key)
    return theta, rope_scaling(f.inner(found, "rope scaling: "), found, kinds)


def gguf_fields(
    metadata: Mapping[str, Any],
    architecture: str,
    where: str,
    line: str,
    served: frozenset[str] = frozenset(),
) -> Fields:
    """An architecture's GGUF metadata, without the prefix. `served`, errors: see refuse_unserved_gguf."""
    prefix = f"{architecture}."
    own = {k[len(prefix) :]: v for k, v in metadata.items() if k.startswith(prefix)}
    f = Fields(own, where, line=line, prefix=prefix)
    refuse_unserved_gguf(f, own, served)
    return f


def gguf_whole_head(f: Fields, default: int) -> int:
    """The size of heads that are rotated as a whole and whose values are as wide. Raises UnsupportedError."""
    size = head_size(f, "attention.key_length", default)
    for key in ("attention.value_length", "rope.dimension_count"):
        f.refuse(key, f.integer(key, size) != size, expected=f"the head size {size}")
    return size


# Keys of an architecture's GGUF metadata that are read, or that describe the file.
GGUF_SERVED = frozenset(
    [
        "vocab_size",
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "attention.key_length",
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
        "tensor_data_layout",
    ]
) | {f"rope.scaling.{key}" for key in _GGUF_YARN_FIXED}
# Values of other keys that change nothing; elsewhere 0, false and an empty text do.
_GGUF_NEUTRAL = {
    "logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1), "attention.causal": (True,),
    "rope.scaling.attn_factor": (1,), "attention.output_scale": (1,),
}  # fmt: skip


def refuse_unserved_gguf(
    f: Fields, metadata: Mapping[str, Any], served: frozenset[str] = frozenset()
) -> None:
    """Raises UnsupportedError that names the first key which would change the result and is not served.

    Args:
        metadata: the architecture's keys, without its prefix; what `f` reads.
        served: keys that the line reads beside those of all lines.
    """
    for key in sorted(metadata.keys() - GGUF_SERVED - served):
        neutral = _GGUF_NEUTRAL.get(key, (0, ""))
        value = metadata[key]
        ignorable = isinstance(value, int | float | str) and value in neutral
        f.refuse(
            key, not ignorable, expected="a model without it" if key not in _GGUF_NEUTRAL else neutral[-1]
        )


def rope_scaling(
    f: Fields, found: Mapping[str, Any], kinds: tuple[str, ...], max_position_embeddings: int | None = None
) -> Mapping[str, Any] | None:
    """The scaling's checked numbers for `ops.rope`, None for none. `found` is what `f` reads."""
    kind = f.text("rope_type", f.text("type", "default"))
    f.refuse("rope_type", kind not in kinds, expected=_any_of(kinds), got=kind)
    if kind == "default":
        return None
    needed, optional = _NUMBERS[kind]
    defaults: dict[str, float | None] = {}
    if kind == "yarn" and max_position_embeddings is not None:
        defaults["original_max_position_embeddings"] = max_position_embeddings
    scaling: dict[str, Any] = {key: f.number(key, defaults.get(key)) for key in needed}
    scaling |= {key: f.number(key) for key in optional if f.has(key)}
    if kind == "llama3":
        low = scaling["low_freq_factor"]
        f.require("high_freq_factor", scaling["high_freq_factor"] > low, f"above low_freq_factor {low}")
    if kind == "yarn":
        f.require("factor", scaling["factor"] >= 1, "a number from 1")
        fast, slow = scaling.get("beta_fast", 32.0), scaling.get("beta_slow", 1.0)
        f.require("beta_fast", fast > slow, f"above beta_slow {slow}")
        if f.has("truncate"):
            scaling["truncate"] = f.boolean("truncate", True)
    return {"rope_type": kind, **scaling}


def _any_of(words: tuple[str, ...]) -> str:
    """'a, b or c'"""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
