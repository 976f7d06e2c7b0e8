"""The forward pass of DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437) and Kimi-K2's text model, written
once (transformers `modeling_deepseek_v2.py` and `modeling_deepseek_v3.py`).

Attention caches one latent a token, which all heads share. The first layers have one feed-forward block;
the others have experts, and a shared block that every token meets.

Axes: T tokens of the step, R rows (sequences), L rows of the residual stream whose logits are wanted, M the
residual stream's width, H heads of E channels in queries and A in values, F feed-forward width of dense
layers, S that of the shared block, K experts of a token, V vocabulary, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pegainfer.contract.errors import UnsupportedError
from pegainfer.kv.device.layout import PageLayout, Part
from pegainfer.models.deepseek_v2.config import SIGMOID, DeepseekV2Config
from pegainfer.models.deepseek_v2.weights import TABLE
from pegainfer.ops.coarse import GATE_UP_SWIGLU, LM_HEAD
from pegainfer.ops.embed import EMBEDDING
from pegainfer.ops.float8 import E4M3
from pegainfer.ops.gemm import LINEAR
from pegainfer.ops.mla import MLA_ATTENTION, MLA_QKV_APPEND
from pegainfer.ops.moe_shard import emit_experts
from pegainfer.ops.program import Builder, Program
from pegainfer.ops.reduce import REDUCE_RESIDUAL
from pegainfer.ops.sampler import head_of
from pegainfer.runner.program import INPUTS, Formats, Sizes, shape

# Of the norms of latents and of narrow queries. The authors' code and transformers have it whatever
# rms_norm_eps says; that of Kimi-K2.5 is 1e-5.
LATENT_EPS = 1e-6

# name -> shape; activations in Formats.activation.
BUFFERS: dict[str, tuple[str, ...]] = {
    "q": ("T", "H", "E"),
    "attn": ("T", "H", "A"),
    "act": ("T", "F"),  # of dense layers
    "shared_act": ("T", "S"),
}


def groups(config: DeepseekV2Config, block_size: int, formats: Formats) -> tuple[PageLayout, ...]:
    """Pages of latents. All layers of a block lie together, so that a block is one copy.

    Raises UnsupportedError for a cache of 8-bit floats.
    """
    if formats.kv == E4M3:
        raise UnsupportedError(
            "latents are not cached in 8 bits", expected="auto, bf16, f16 or f32", got="fp8",
            where="kv_cache_dtype",
        )  # fmt: skip
    shape = (config.num_layers, block_size, config.cached_size)
    return (PageLayout("kv", (Part("kv", shape, formats.kv),), block_size),)


def forward(
    config: DeepseekV2Config, weights: Mapping[str, str], sizes: Sizes, formats: Formats | None = None
) -> Program:
    """Token ids to logits: x [T, M] and logits [L, V] are its outputs, `kv` the state it appends to.

    Long because it is the whole list of a step's calls, in order.

    Args:
        weights: storage format of each weight by its name in models/deepseek_v2/weights.py.
        formats: of what is computed; float32 throughout if None.
    """
    c, f = config, formats or Formats()
    b = Builder("deepseek_v2")
    w = {name: b.weight(name, *dims, dtype=weights[name]) for name, dims in TABLE.shapes(c).items()}
    cos_sin = b.weight("cos_sin", sizes.num_positions, c.rotary_dim, dtype="f32")
    pages = sizes.pages(b, "kv")
    kv = pages.parts["kv"]
    step = {name: b.input(name, *letters) for name, letters in INPUTS.items()}
    rows = {name: step[name] for name in ("query_starts", "query_lens", "context_lens")}
    axes = {
        "H": c.num_heads, "E": c.head_dim, "A": c.value_dim, "F": c.intermediate_size, "S": c.shared_size
    }  # fmt: skip
    q, attn, act, shared_act = (
        b.buffer(n, *shape(letters, axes), dtype=f.activation) for n, letters in BUFFERS.items()
    )
    x = b.output("x", "T", c.hidden_size, dtype=f.residual)  # so that `prompt_logprobs` can read it
    partial = b.buffer("partial", "T", c.hidden_size)  # float32, in which ranks add up
    experts = b.buffer("experts", "T", c.experts_per_token, dtype="i32")
    logits = b.output("logits", "L", c.vocab_size)
    eps = c.norm_eps

    b.emit(EMBEDDING, out=x, table=w["embed"], ids=step["token_ids"])
    for layer in range(c.num_layers):
        v = {part: w[name] for part, name in TABLE.of_layer(c, layer).items()}
        b.emit(
            MLA_QKV_APPEND, {"eps": eps, "latent_eps": LATENT_EPS, "layer": layer},
            q=q, kv=kv, x=x, norm=v["attn_norm"], wq=v["wq"], w_latent=v["w_latent"],
            latent_norm=v["latent_norm"], positions=step["positions"], slots=pages.places, cos_sin=cos_sin,
            wq_down=v.get("wq_down"), q_norm=v.get("q_norm"),
        )  # fmt: skip
        b.emit(
            MLA_ATTENTION, {"layer": layer, "scale": c.softmax_scale},
            out=attn, q=q, kv=kv, w_k=v["w_k"], w_v=v["w_v"], block_table=pages.block_table, **rows,
        )  # fmt: skip
        b.emit(LINEAR, out=partial, a=attn.view("T", c.values_size), w=v["wo"])
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
        if c.is_dense(layer):
            b.emit(
                GATE_UP_SWIGLU, {"eps": eps},
                out=act, x=x, norm=v["mlp_norm"], w_gate=v["w_gate"], w_up=v["w_up"],
            )  # fmt: skip
            b.emit(LINEAR, out=partial, a=act, w=v["w_down"])
            b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
            continue
        if c.num_shared_experts:  # reads the residual stream before anything is added to it
            b.emit(
                GATE_UP_SWIGLU, {"eps": eps},
                out=shared_act, x=x, norm=v["mlp_norm"], w_gate=v["shared_gate"], w_up=v["shared_up"],
            )  # fmt: skip
        emit_experts(
            b, {"eps": eps, **routing(c)}, c.first_expert,
            out=partial, experts=experts, x=x, norm=v["mlp_norm"], w_router=v["w_router"],
            w_gate=v["w_gate"], w_up=v["w_up"], w_down=v["w_down"], bias=v.get("router_bias"),
        )  # fmt: skip
        b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
        if c.num_shared_experts:
            b.emit(LINEAR, out=partial, a=shared_act, w=v["shared_down"])
            b.emit(REDUCE_RESIDUAL, x=x, partial=partial)
    b.emit(
        LM_HEAD, {"eps": eps},
        logits=logits, x=x, rows=step["logit_rows"], norm=w["norm"], w=w[TABLE.head_name(c)],
    )  # fmt: skip
    return b.build()


def routing(config: DeepseekV2Config) -> dict[str, Any]:
    """How tokens go to experts: attributes of `moe`."""
    return {
        "sigmoid": config.scoring == SIGMOID,
        "renormalize": config.norm_topk_prob,
        "scale": config.routed_scaling_factor,
        "groups": config.expert_groups,
        "kept_groups": config.kept_groups,
    }


head = partial(head_of, TABLE)  # the last call, for programs that apply it to other rows
