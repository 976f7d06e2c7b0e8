"""What a Qwen3.5 model's config says, read from Hugging Face's config.json or from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pegainfer.ops.config import (
    gguf_fields,
    gguf_rope,
    head_size,
    hf_rope,
    kv_heads,
    rotary_size,
    serve_only,
    served_length,
)
from pegainfer.ops.quantization import Quantization, read_quantization
from pegainfer.ops.ranks import DENSE, HEADS, TensorRank, config_of_rank
from pegainfer.runtime.weights.fields import Fields

LINE = "qwen3_5"
ROPE_KINDS = ("default", "yarn")
FULL, LINEAR = "full_attention", "linear_attention"
DEFAULT_INTERVAL = 4  # every fourth layer is one of full attention
DEFAULT_ROTARY = 0.25  # share of a head that is rotated
GGUF_SERVED = frozenset(
    [
        "full_attention_interval",
        "nextn_predict_layers",
        "rope.dimension_sections",  # of image positions; those of text are equal on all axes
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    ]
)
DENSE_GGUF, MOE_GGUF = "qwen35", "qwen35moe"  # what GGUF calls the two architectures
GGUF_EXPERTS = frozenset(
    [
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
    ]
)
MOST_EXPERTS = 1 << 14


class Qwen3_5Config(msgspec.Struct, frozen=True):
    """Sizes and constants of one model; every field was checked for type, range and mutual fit."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the feed-forward block of dense models; 0 where layers have experts
    layer_types: tuple[str, ...]  # FULL or LINEAR, at least one of each
    num_heads: int  # of full attention
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # leading channels of a head that are rotated
    delta_key_heads: int  # of linear attention
    delta_heads: int  # value heads, each with a state [delta_key_dim, delta_dim]
    delta_key_dim: int
    delta_dim: int
    conv_width: int  # taps of the causal convolution
    norm_eps: float  # of all norms, those of heads included
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # rope_type 'yarn' with its numbers
    max_position_embeddings: int  # tokens that the model was trained for, or that yarn stretches it to
    tie_word_embeddings: bool  # lm_head is the embedding's table
    quantization: Quantization | None = None  # of a checkpoint; GGUF says it tensor by tensor
    draft_layers: int = 0  # that GGUF counts behind the others; not served
    tiled_heads: bool = False  # value head h reads key head h mod G, not h // (heads / G), of G key heads
    # Experts take the place of the feed-forward block in every layer, or in none; all are 0 in dense models.
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # feed-forward width of one expert
    shared_expert_size: int = 0  # of the one expert that every token meets
    first_expert: int = 0
    held_experts: int = 0  # of this rank, from first_expert on; 0: all

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_full_layers(self) -> int:
        return self.layer_types.count(FULL)

    @property
    def num_linear_layers(self) -> int:
        return self.layer_types.count(LINEAR)

    @property
    def num_shared_experts(self) -> int:
        return 1

    @property
    def local_experts(self) -> int:
        """Experts whose matrices this rank has."""
        return self.held_experts or self.num_experts

    @property
    def gate_up_size(self) -> int:
        """Rows of one expert's matrix where a file has its gate and up projections in one tensor."""
        return 2 * self.expert_size

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def gated_q_size(self) -> int:
        """Rows of q_proj: of each head, the queries and then the output gate."""
        return 2 * self.q_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def delta_size(self) -> int:
        """Channels of the values of linear attention."""
        return self.delta_heads * self.delta_dim

    @property
    def conv_size(self) -> int:
        """Channels of q, k and v of linear attention."""
        return 2 * self.delta_key_heads * self.delta_key_dim + self.delta_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> Qwen3_5Config:
        """From a parsed config.json, whose text model stands in `text_config` or in the object itself.

        Defaults are those of transformers' Qwen3_5TextConfig and Qwen3_5MoeTextConfig, but sizes must be
        there. What concerns images is not read.

        Args:
            where: names the file in errors.

        Raises ConfigError and UnsupportedError.
        """
        top = Fields(config, where, line=LINE)
        text = top.mapping("text_config")
        f = top if text is None else top.inner(text, "text_config: ")
        _refuse_variants(f)
        trained = f.integer("max_position_embeddings", 32768, most=1 << 30)
        theta, scaling = hf_rope(f, ROPE_KINDS, trained, partial=True)
        heads = f.integer("num_attention_heads")
        head_dim = head_size(f, "head_dim", 256)
        key_heads, value_heads = f.integer("linear_num_key_heads"), f.integer("linear_num_value_heads")
        f.require(
            "linear_num_value_heads", value_heads % key_heads == 0, f"a multiple of {key_heads} key heads"
        )
        return cls(
            vocab_size=f.integer("vocab_size", most=1 << 24),
            hidden_size=f.integer("hidden_size"),
            layer_types=_layer_types(f),
            num_heads=heads,
            num_kv_heads=kv_heads(f, "num_key_value_heads", heads, None),
            head_dim=head_dim,
            rotary_dim=rotary_size(f, head_dim, DEFAULT_ROTARY),
            delta_key_heads=key_heads,
            delta_heads=value_heads,
            delta_key_dim=f.integer("linear_key_head_dim", 128, most=1024),
            delta_dim=f.integer("linear_value_head_dim", 128, most=1024),
            conv_width=f.integer("linear_conv_kernel_dim", 4, least=2, most=64),
            norm_eps=f.number("rms_norm_eps", 1e-6, most=1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=served_length(trained, scaling),
            # Files say it in both places or in one; the text model's own word counts.
            tie_word_embeddings=f.boolean("tie_word_embeddings", top.boolean("tie_word_embeddings", False)),
            **_hf_feed_forward(f),
            quantization=read_quantization(f) or read_quantization(top),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], where: str, *, vocab_size: int, tied: bool
    ) -> Qwen3_5Config:
        """From `qwen35.*` or `qwen35moe.*` metadata. The draft head's layers, which follow the others, are
        left out.

        Args:
            vocab_size: rows of token_embd.weight, for files that do not say it.
            tied: whether the file lacks output.weight, which is how GGUF says it.

        Raises ConfigError and UnsupportedError.
        """
        has_experts = metadata.get("general.architecture") == MOE_GGUF
        served = GGUF_SERVED | (GGUF_EXPERTS if has_experts else frozenset())
        f = gguf_fields(metadata, MOE_GGUF if has_experts else DENSE_GGUF, where, LINE, served)
        heads = f.integer("attention.head_count")
        head_dim = head_size(f, "attention.key_length", 256)
        value_dim = f.integer("attention.value_length", head_dim)
        f.refuse("attention.value_length", value_dim != head_dim, expected=f"the head size {head_dim}")
        rotary = f.integer("rope.dimension_count", int(head_dim * DEFAULT_ROTARY))
        f.require("rope.dimension_count", rotary % 2 == 0 and rotary <= head_dim, f"even, at most {head_dim}")
        key_heads, value_heads = f.integer("ssm.group_count"), f.integer("ssm.time_step_rank")
        f.require("ssm.time_step_rank", value_heads % key_heads == 0, f"a multiple of {key_heads}")
        inner = f.integer("ssm.inner_size")
        f.require("ssm.inner_size", inner % value_heads == 0, f"a multiple of {value_heads}")
        trained = f.integer("context_length", most=1 << 30)
        theta, scaling = gguf_rope(f, ROPE_KINDS)
        blocks, drafting = f.integer("block_count", most=1024), f.integer("nextn_predict_layers", 0, least=0)
        interval = f.integer("full_attention_interval", DEFAULT_INTERVAL)
        f.require("block_count", blocks - drafting >= interval > 1, "enough for both kinds of layers")
        return cls(
            vocab_size=f.integer("vocab_size", vocab_size, most=1 << 24),
            hidden_size=f.integer("embedding_length"),
            layer_types=_by_interval(blocks - drafting, interval),
            num_heads=heads,
            num_kv_heads=kv_heads(f, "attention.head_count_kv", heads, None),
            head_dim=head_dim,
            rotary_dim=rotary,
            delta_key_heads=key_heads,
            delta_heads=value_heads,
            delta_key_dim=f.integer("ssm.state_size", most=1024),
            delta_dim=inner // value_heads,
            conv_width=f.integer("ssm.conv_kernel", least=2, most=64),
            norm_eps=f.number("attention.layer_norm_rms_epsilon", most=1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=served_length(trained, scaling),
            tie_word_embeddings=tied,
            draft_layers=drafting,
            tiled_heads=True,
            **_gguf_feed_forward(f, has_experts),
        )


def _hf_feed_forward(f: Fields) -> dict[str, Any]:
    """Sizes of the feed-forward block or of the experts, by the config's fields."""
    if not f.has("num_experts") and not f.text("model_type", "").startswith("qwen3_5_moe"):
        return {"intermediate_size": f.integer("intermediate_size")}
    f.refuse("norm_topk_prob", not f.boolean("norm_topk_prob", True), expected="true")
    f.refuse("mlp_only_layers", bool(f.integers("mlp_only_layers")), expected="experts in every layer")
    f.refuse("decoder_sparse_step", f.integer("decoder_sparse_step", 1) != 1, expected=1)
    experts = f.integer("num_experts", most=MOST_EXPERTS)
    return {
        "intermediate_size": 0,
        "num_experts": experts,
        "experts_per_token": f.integer("num_experts_per_tok", most=experts),
        "expert_size": f.integer("moe_intermediate_size"),
        "shared_expert_size": f.integer("shared_expert_intermediate_size"),
    }


def _gguf_feed_forward(f: Fields, has_experts: bool) -> dict[str, Any]:
    """The same of GGUF metadata."""
    if not has_experts:
        return {"intermediate_size": f.integer("feed_forward_length")}
    experts = f.integer("expert_count", most=MOST_EXPERTS)
    return {
        "intermediate_size": 0,
        "num_experts": experts,
        "experts_per_token": f.integer("expert_used_count", most=experts),
        "expert_size": f.integer("expert_feed_forward_length"),
        "shared_expert_size": f.integer("expert_shared_feed_forward_length"),
    }


def _by_interval(layers: int, interval: int) -> tuple[str, ...]:
    """The last layer of each interval is one of full attention."""
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))


def _refuse_variants(f: Fields) -> None:
    """Raises UnsupportedError for what would change the result and is not served."""
    f.refuse("attn_output_gate", not f.boolean("attn_output_gate", True), expected="true")
    only = {"hidden_act": "silu", "output_gate_type": "swish", "mamba_ssm_dtype": "float32"}
    serve_only(f, only, off=("attention_bias",))


def _layer_types(f: Fields) -> tuple[str, ...]:
    """The kind of each layer: the config's list, or one of full attention at the end of each interval."""
    layers = f.integer("num_hidden_layers", most=1024)
    interval = f.integer("full_attention_interval", DEFAULT_INTERVAL)
    found = f.texts("layer_types") or _by_interval(layers, interval)
    f.require("layer_types", len(found) == layers, f"one for each of {layers} layers")
    f.refuse("layer_types", set(found) != {FULL, LINEAR}, expected=f"{FULL} and {LINEAR}, both of them")
    return tuple(found)


def of_rank(config: Qwen3_5Config, at: TensorRank) -> Qwen3_5Config:
    """The sizes of a rank: some heads of both kinds of attention, and some feed-forward units. In models with
    experts units of every expert, or whole experts. Raises ConfigError where they do not divide."""
    linear = {
        "delta_key_heads": "key heads of linear attention", "delta_heads": "value heads of linear attention"
    }  # fmt: skip
    if not config.num_experts:
        return config_of_rank(config, at, DENSE | linear)
    divided = HEADS | linear | {"shared_expert_size": "units of the shared expert"}
    return config_of_rank(config, at, divided, {"expert_size": "units of an expert"})
