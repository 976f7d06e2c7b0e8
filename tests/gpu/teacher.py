"""What transformers makes of texts on the same GPU: seeded models of true sizes, and the default model.

Seeded weights are made on the GPU and handed to transformers as they are; one file of them is for us.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Tensors = Mapping[str, Any]  # torch.Tensor by Hugging Face's name
TOP = 8
SLICE = 512  # positions whose logits or scores are held at a time
# Published sizes of the dense Qwen3 models.
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "4B": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
# Published sizes of the dense Qwen3.5 models.
SIZES_3_5: dict[str, dict[str, Any]] = {
    "3.5-0.8B": {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16,
    },
    "3.5-4B": {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32,
    },
}  # fmt: skip
# Published widths of mixtures of experts, with as many layers as show every kind of layer.
SIZES_MOE: dict[str, dict[str, Any]] = {
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}  # fmt: skip
SIZES_3_5_MOE: dict[str, dict[str, Any]] = {
    "35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
        "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    },
}  # fmt: skip
# DeepSeek-V2-Lite with fewer layers, so that it is written in seconds, and without the scaling of positions,
# whose softmax scale transformers got right only lately.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400,
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "rope_theta": 10000, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
# What makes a seeded model as decided as a trained one: the best token leads by some nats, now and then by
# next to nothing (in the median it has 0.84 to 0.98 here, 0.34 with SmolLM2-135M on prose). All logits are
# normals of this deviation, but that of one token, which the embedding alone points to.
LOGITS, POINTED = 2.0, 8.0  # nat; the pointed token's mean, in deviations
QK_NORM = 1.25  # mean weight of the norms of queries and keys: scores of a deviation of 1.6
ROUTER = 3.0  # deviation of a router's logits: the last expert chosen counts little, as in trained models
BRANCH = 0.6  # mean square of a layer's two outputs together, before they are scaled down


@dataclass(frozen=True)
class Reference:
    """transformers' scores of one text: after each token the best 8 in float32, and what bf16 makes of them.

    ids, exact, half: [n, 8]; half_best: [n], the token that bf16 would choose.
    """

    ids: Array
    exact: Array
    half: Array
    half_best: Array


def config(size: str) -> dict[str, Any]:
    """The config.json of such a model."""
    if size == "V2-Lite":
        return dict(V2_LITE)
    if (found := (SIZES_3_5 | SIZES_3_5_MOE).get(size)) is not None:
        return _config_3_5(found)
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
        "num_key_value_heads": 8, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": False, **(SIZES | SIZES_MOE)[size],
    }  # fmt: skip


def _config_3_5(sizes: dict[str, Any]) -> dict[str, Any]:
    """As saves of the text model alone have it."""
    layers = range(sizes["num_hidden_layers"])
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in layers],
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "mamba_ssm_dtype": "float32", "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        },
        **sizes,
    }  # fmt: skip


def _vector(fields: dict[str, Any], name: str, values: Any) -> Any:
    """The weight of a norm, or a decay's parameter, from standard normals."""
    if name.endswith("A_log"):
        return values / 2 + 0.5
    if name.endswith("dt_bias"):
        return values - 1  # states forget half of themselves in one to a hundred tokens
    values = 1 + values / 8
    if "q_norm" in name or "k_norm" in name:
        values *= QK_NORM
    if name == "model.norm.weight":
        values *= LOGITS / POINTED
    from_one = fields["model_type"].startswith("qwen3_5") and not name.endswith("linear_attn.norm.weight")
    return values - 1 if from_one else values


def seeded(fields: dict[str, Any], device: str, seed: int = 0) -> dict[str, Any]:
    """A model's parameters in bf16 by name, normals that keep activations of order one."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    width = fields["hidden_size"]
    tensors = {}
    for name, p in empty_model(fields, "sdpa").named_parameters():
        values = torch.randn(p.shape, generator=generator, device=device)
        if p.ndim == 1:
            values = _vector(fields, name, values)
        elif "embed" in name:
            values *= POINTED * width**-0.5
        elif "lm_head" in name:  # the token before the one read is the one pointed to
            values = tensors["model.embed_tokens.weight"].roll(-1, 0)
        else:
            values *= p.shape[-1] ** -0.5
            if name.endswith("mlp.gate.weight"):
                values *= ROUTER
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                values *= (BRANCH * fields["num_hidden_layers"]) ** -0.5
        tensors[name] = values.to(torch.bfloat16)
    return tensors


def empty_model(fields: dict[str, Any], attention: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = {k: v for k, v in fields.items() if k != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(fields["model_type"], **rest), attn_implementation=attention
        )


def as_saved(fields: dict[str, Any], tensors: Tensors) -> Tensors:
    """The tensors as files have them: all but those of Qwen3.5-MoE keep each expert by itself."""
    if fields["model_type"].startswith("qwen3_5"):
        return tensors
    found: dict[str, Any] = {}
    for name, t in tensors.items():
        stem, part = name.rpartition(".")[::2]
        if not stem.endswith(".experts"):
            found[name] = t
            continue
        for i, matrix in enumerate(t):
            pieces = matrix.chunk(2) if part == "gate_up_proj" else (matrix,)
            for kind, piece in zip(part.removesuffix("_proj").split("_"), pieces, strict=True):
                found[f"{stem}.{i}.{kind}_proj.weight"] = piece.contiguous()
    return found


def write_checkpoint(fields: dict[str, Any], tensors: Tensors, folder: Path) -> Path:
    """The model as one safetensors file, written by several threads."""
    header, at, tensors = {}, 0, as_saved(fields, tensors)
    for name, t in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [at, at + 2 * t.numel()]}
        at += 2 * t.numel()
    text = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    with open(folder / "model.safetensors", "wb") as file, ThreadPoolExecutor(8) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()

        def write(name: str) -> None:
            import torch

            data = memoryview(tensors[name].cpu().contiguous().view(torch.uint8).numpy().reshape(-1).data)
            start = 8 + len(text) + header[name]["data_offsets"][0]
            while data:
                count = os.pwrite(file.fileno(), data, start)
                data, start = data[count:], start + count

        for _ in pool.map(write, tensors):
            pass
    return folder


def free_torch() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def transformers_model(fields: dict[str, Any], tensors: Tensors, dtype: str, device: str) -> Iterator[Any]:
    """transformers' model in 'float32', with attention in slices, or in 'bfloat16' as transformers has it."""
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register("in_slices", attention_in_slices)
    model = empty_model(fields, "in_slices" if dtype == "float32" else "sdpa")
    state = {name: t.to(device, getattr(torch, dtype)) for name, t in tensors.items()}
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    try:
        yield model.eval()
    finally:
        del model, state
        free_torch()


def attention_in_slices(
    module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **rest: Any
) -> tuple[Any, None]:
    """Causal attention without a matrix of all scores: q, k [1, H, T, D], v [1, H, T, A] to [1, T, H, A]."""
    import torch

    assert mask is None
    _, heads, n, width = q.shape
    groups, values = k.shape[1], v.shape[-1]
    out = torch.empty(1, n, heads, values, dtype=q.dtype, device=q.device)
    for start in range(0, n, SLICE):
        stop = min(n, start + SLICE)
        part = q[0, :, start:stop].reshape(groups, -1, width)
        scores = (part @ k[0, :, :stop].transpose(1, 2)).view(groups, -1, stop - start, stop) * scaling
        later = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device).triu(start + 1)
        weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
        mixed = weights.view(groups, -1, stop) @ v[0, :, :stop]
        out[0, start:stop] = mixed.view(heads, stop - start, values).transpose(0, 1)
    return out, None


def references(models: Callable[[str], Any], texts: list[Array]) -> list[Reference]:
    """Scores of texts by transformers. `models`: from a dtype's name to a context that yields the model."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    with models("float32") as model:
        exact = [scores(model, text) for text in texts]
    with models("bfloat16") as model:
        half = [scores(model, text, ids) for text, (ids, *_) in zip(texts, exact, strict=True)]
    return [Reference(e[0], e[1], h[2], h[0][:, 0]) for e, h in zip(exact, half, strict=True)]


def scores(model: Any, ids: Array, wanted: Array | None = None) -> tuple[Array, Array, Array]:
    """Teacher-forced: after each token, the best tokens and all that `wanted` [n, k] names.

    Returns top_ids [n, 8], their log-probabilities [n, 8], and those of `wanted` [n, k] (k 0 for None).
    """
    import torch

    device = model.lm_head.weight.device
    if wanted is None:
        wanted = np.zeros((len(ids), 0), np.int64)
    with torch.inference_mode():
        hidden = model.model(torch.tensor(ids[None].astype(np.int64), device=device)).last_hidden_state[0]
        tops, values, asked = [], [], []
        for start in range(0, len(ids), SLICE):
            logprobs = model.lm_head(hidden[start : start + SLICE]).float().log_softmax(-1)
            best = logprobs.topk(TOP)
            tops.append(best.indices.cpu().numpy())
            values.append(best.values.cpu().numpy())
            index = torch.tensor(wanted[start : start + SLICE].astype(np.int64), device=device)
            asked.append(logprobs.gather(1, index).cpu().numpy())
    return np.concatenate(tops), np.concatenate(values), np.concatenate(asked)
