"""What the config of a DeepSeek-V2, V3 or R1 model or of Kimi-K2's text model says, read from Hugging Face's
config.json or from GGUF metadata. Long because it reads both, for four generations of the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pegainfer.ops.config import gguf_fields, gguf_rope, hf_rope, serve_only, served_length
from pegainfer.ops.quantization import Quantization, read_quantization
from pegainfer.ops.ranks import DENSE, HEADS, TensorRank, config_of_rank
from pegainfer.ops.rope import score_factor
from pegainfer.runtime.weights.fields import Fields

LINE = "deepseek_v2"
ARCHITECTURE = "deepseek2"  # what GGUF calls all of them
# Keys of GGUF that this line reads beside those of dense models.
GGUF_SERVED = frozenset(
    [
        "attention.q_lora_rank",
        "attention.kv_lora_rank",
        "attention.key_length_mla",
        "attention.value_length_mla",
        "leading_dense_block_count",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "expert_shared_count",
        "expert_weights_scale",
        "expert_weights_norm",
        "expert_gating_func",
        "expert_group_count",
        "expert_group_used_count",
    ]
)
GGUF_SCORING = {1: "softmax", 2: "sigmoid"}  # expert_gating_func
ROPE_KINDS = ("default", "yarn")
MOST_EXPERTS = 1 << 14
MOST_HEADS = 1 << 12
SOFTMAX, SIGMOID = "softmax", "sigmoid"
# scoring_func -> the ways of choosing experts that go with it
TOPK_METHODS = {SOFTMAX: ("greedy", "group_limited_greedy"), SIGMOID: ("noaux_tc",)}


class DeepseekV2Config(msgspec.Struct, frozen=True):
    """Sizes and constants of one model; every field was checked for type, range and mutual fit."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    dense_layers: int  # the first ones, which have one feed-forward block in place of experts
    intermediate_size: int  # of dense layers
    num_heads: int
    query_rank: int  # of the narrow product that queries go through; 0: they go through none
    latent_rank: int  # numbers of a token's latent: kv_lora_rank
    plain_dim: int  # channels of a query head that are not rotated: qk_nope_head_dim
    rotary_dim: int  # those that are, and the numbers cached beside the latent: qk_rope_head_dim
    value_dim: int  # of a value head: v_head_dim
    num_experts: int
    experts_per_token: int
    expert_size: int  # of one expert: moe_intermediate_size
    num_shared_experts: int  # every token meets these, as one block
    shared_size: int  # feed-forward width of that block
    scoring: str  # SOFTMAX over the experts, or SIGMOID of each with a correction bias
    norm_topk_prob: bool  # whether the weights of a token's experts are made to sum to 1
    routed_scaling_factor: float  # multiplies those weights
    expert_groups: int
    kept_groups: int  # groups of experts that a token chooses among
    norm_eps: float  # of the norms of the residual stream
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None  # rope_type 'yarn' with its numbers
    max_position_embeddings: int  # tokens that can be served
    tie_word_embeddings: bool  # lm_head is the embedding's table
    draft_layers: int = 0  # that a file has behind the others; not served
    quantization: Quantization | None = None  # of a checkpoint; GGUF says it tensor by tensor
    first_expert: int = 0
    held_experts: int = 0  # of this rank, from first_expert on; 0: all

    @property
    def head_dim(self) -> int:
        """Channels of a query head."""
        return self.plain_dim + self.rotary_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def query_inputs(self) -> int:
        """Columns of the query's last product."""
        return self.query_rank or self.hidden_size

    @property
    def cached_size(self) -> int:
        """Numbers that a layer caches for a token."""
        return self.latent_rank + self.rotary_dim

    @property
    def keys_size(self) -> int:
        return self.num_heads * self.plain_dim

    @property
    def values_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def keys_values_size(self) -> int:
        """Rows of kv_b_proj: of each head, its keys' and then its values'."""
        return self.keys_size + self.values_size

    @property
    def local_experts(self) -> int:
        """Experts whose matrices this rank has."""
        return self.held_experts or self.num_experts

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5 * score_factor(self.rope_scaling))

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], where: str) -> DeepseekV2Config:
        """From a parsed config.json, whose text model stands in `text_config` or in the object itself.

        Defaults are those of transformers' DeepseekV2Config, but sizes must be there. What concerns images
        is not read.

        Args:
            where: names the file in errors.

        Raises ConfigError and UnsupportedError.
        """
        top = Fields(config, where, line=LINE)
        text = top.mapping("text_config")
        f = top if text is None else top.inner(text, "text_config: ")
        _refuse_variants(f)
        trained = f.integer("max_position_embeddings", 2048, most=1 << 30)
        theta, scaling = hf_rope(f, ROPE_KINDS, trained)
        layers = f.integer("num_hidden_layers", most=1024)
        units = f.integer("moe_intermediate_size")
        shared = f.integer("n_shared_experts", 0, least=0, most=64)
        return cls(
            vocab_size=f.integer("vocab_size", most=1 << 24),
            hidden_size=f.integer("hidden_size"),
            num_layers=layers,
            dense_layers=f.integer("first_k_dense_replace", 0, least=0, most=layers - 1),
            intermediate_size=f.integer("intermediate_size"),
            num_heads=f.integer("num_attention_heads", most=MOST_HEADS),
            query_rank=f.integer("q_lora_rank") if f.has("q_lora_rank") else 0,
            latent_rank=f.integer("kv_lora_rank"),
            plain_dim=f.integer("qk_nope_head_dim", most=1024),
            rotary_dim=rotary_size(f, "qk_rope_head_dim"),
            value_dim=f.integer("v_head_dim", most=1024),
            expert_size=units,
            num_shared_experts=shared,
            shared_size=shared * units,
            **_routing(f),
            norm_eps=f.number("rms_norm_eps", 1e-6, most=1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=served_length(trained, scaling),
            tie_word_embeddings=f.boolean("tie_word_embeddings", top.boolean("tie_word_embeddings", False)),
            draft_layers=f.integer("num_nextn_predict_layers", 0, least=0, most=16),
            quantization=read_quantization(f) or read_quantization(top),
        )

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], where: str, *, vocab_size: int, tied: bool
    ) -> DeepseekV2Config:
        """From `deepseek2.*` metadata.

        Files made before llama.cpp cached latents give head sizes as key_length and value_length; later ones
        give those of the latent there, and head sizes as key_length_mla and value_length_mla.

        Args:
            vocab_size: rows of token_embd.weight, for files without `deepseek2.vocab_size`.
            tied: whether the file lacks output.weight, which is how GGUF says it.

        Raises ConfigError and UnsupportedError.
        """
        f = gguf_fields(metadata, ARCHITECTURE, where, LINE, GGUF_SERVED)
        ending = "_mla" if f.has("attention.key_length_mla") else ""
        rotary = rotary_size(f, "rope.dimension_count")
        head_dim = f.integer(f"attention.key_length{ending}", most=2048)
        f.require(
            f"attention.key_length{ending}", head_dim > rotary, f"more than the {rotary} rotated channels"
        )
        trained = f.integer("context_length", most=1 << 30)
        theta, scaling = gguf_rope(f, ROPE_KINDS, mscale=True)
        layers = f.integer("block_count", most=1024)
        units = f.integer("expert_feed_forward_length")
        shared = f.integer("expert_shared_count", 0, least=0, most=64)
        return cls(
            vocab_size=f.integer("vocab_size", vocab_size, most=1 << 24),
            hidden_size=f.integer("embedding_length"),
            num_layers=layers,
            dense_layers=f.integer("leading_dense_block_count", 0, least=0, most=layers - 1),
            intermediate_size=f.integer("feed_forward_length"),
            num_heads=f.integer("attention.head_count", most=MOST_HEADS),
            query_rank=f.integer("attention.q_lora_rank", 0, least=0),
            latent_rank=f.integer("attention.kv_lora_rank"),
            plain_dim=head_dim - rotary,
            rotary_dim=rotary,
            value_dim=f.integer(f"attention.value_length{ending}", most=1024),
            expert_size=units,
            num_shared_experts=shared,
            shared_size=shared * units,
            **_gguf_routing(f),
            norm_eps=f.number("attention.layer_norm_rms_epsilon", most=1.0),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=served_length(trained, scaling),
            tie_word_embeddings=tied,
        )


def rotary_size(f: Fields, key: str) -> int:
    """Rotated channels of a head: an even number. Raises ConfigError."""
    size = f.integer(key, most=1024)
    f.require(key, size % 2 == 0, "an even number")
    return size


def groups_of_experts(f: Fields, keys: tuple[str, str], experts: int, chosen: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token chooses among. Raises ConfigError."""
    groups = f.integer(keys[0], 1)
    f.require(keys[0], experts % groups == 0, f"a divisor of the {experts} experts")
    kept = f.integer(keys[1], groups, most=groups)
    each = experts // groups
    f.require(keys[1], kept * each >= chosen, f"groups of {each} that hold the {chosen} experts of a token")
    return groups, kept


def _refuse_variants(f: Fields) -> None:
    """Raises UnsupportedError for what would change the result and is not served."""
    serve_only(f, {"hidden_act": "silu"}, off=("attention_bias",))
    f.refuse("moe_layer_freq", f.integer("moe_layer_freq", 1) != 1, expected=1)
    # The sparse attention of DeepSeek-V3.2 adds an indexer.
    f.refuse("index_topk", f.has("index_topk"), expected="none")


def _routing(f: Fields) -> dict[str, Any]:
    """How tokens go to experts: fields of DeepseekV2Config. Raises ConfigError, UnsupportedError."""
    scoring = f.text("scoring_func", SOFTMAX)
    f.refuse("scoring_func", scoring not in TOPK_METHODS, expected=" or ".join(TOPK_METHODS))
    methods = TOPK_METHODS[scoring]
    method = f.text("topk_method", methods[0])
    f.refuse("topk_method", method not in methods, expected=" or ".join(methods))
    normalize = f.boolean("norm_topk_prob", scoring == SIGMOID)
    _refuse_normalized(f, "norm_topk_prob", normalize and scoring == SOFTMAX)
    experts = f.integer("n_routed_experts", most=MOST_EXPERTS)
    chosen = f.integer("num_experts_per_tok", most=experts)
    groups, kept = groups_of_experts(f, ("n_group", "topk_group"), experts, chosen)
    if method == "greedy":  # chooses among all, whatever the groups are
        groups, kept = 1, 1
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "scoring": scoring,
        "norm_topk_prob": normalize,
        "routed_scaling_factor": f.number("routed_scaling_factor", 1.0),
        "expert_groups": groups,
        "kept_groups": kept,
    }


def _gguf_routing(f: Fields) -> dict[str, Any]:
    """The same of GGUF metadata. Files of old converters name no groups: experts are chosen from all."""
    function = f.integer("expert_gating_func", 1)
    f.refuse("expert_gating_func", function not in GGUF_SCORING, expected="1 (softmax) or 2 (sigmoid)")
    scoring = GGUF_SCORING[function]
    normalize = f.boolean("expert_weights_norm", False)
    _refuse_normalized(f, "expert_weights_norm", normalize and scoring == SOFTMAX)
    experts = f.integer("expert_count", most=MOST_EXPERTS)
    chosen = f.integer("expert_used_count", most=experts)
    keys = ("expert_group_count", "expert_group_used_count")
    groups, kept = groups_of_experts(f, keys, experts, chosen)
    return {
        "num_experts": experts,
        "experts_per_token": chosen,
        "scoring": scoring,
        "norm_topk_prob": normalize,
        "routed_scaling_factor": f.number("expert_weights_scale", 1.0),
        "expert_groups": groups,
        "kept_groups": kept,
    }


def _refuse_normalized(f: Fields, key: str, found: bool) -> None:
    """No published model has it, and implementations differ in whether such weights are scaled as well."""
    f.refuse(key, found, expected="false beside softmax")


def of_rank(config: DeepseekV2Config, at: TensorRank) -> DeepseekV2Config:
    """The sizes of a rank: some heads, all of each latent, and a share of every expert or some experts.

    Raises ConfigError where they do not divide.
    """
    dense = DENSE if config.dense_layers else HEADS
    if config.num_shared_experts:
        dense = {**dense, "shared_size": "units of the shared experts"}
    experts = {"expert_size": "units of an expert"} if config.dense_layers < config.num_layers else {}
    return config_of_rank(config, at, dense, experts)
