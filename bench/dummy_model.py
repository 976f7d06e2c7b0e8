"""Writes a folder with the config.json of a published model, for benches with dummy weights.

python bench/dummy_model.py 30B-A3B /dev/shm/30B-A3B [--layers 12] [--weights]
python bench/cuda_steps.py /dev/shm/30B-A3B --dummy --batch 1 8 32 128 --prefill 1024 16000

--weights also writes a seeded checkpoint of a mixture of experts, each expert's matrices one by one as
published ones are: for `pegainfer bench load`. 16 layers of 30B-A3B are 20.9 GB.

All 48 layers of 30B-A3B take 61 GB in bf16, 12 of them 16 GB; those of V2-Lite 31 GB, of 35B-A3B 69 GB.
`1B-active` is no published model: a token meets 8 of 32 experts, 1.04 billion of 3.5 billion weights.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

# Hugging Face: Qwen/Qwen3-4B, Qwen3-8B, Qwen3-30B-A3B, deepseek-ai/DeepSeek-V2-Lite.
CONFIGS: dict[str, dict[str, Any]] = {
    "4B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 40960,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 151936,
    },
    "30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "mlp_only_layers": [], "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
    },
    "V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
        "v_head_dim": 128, "vocab_size": 102400,
    },
    "8B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151936,
    },
    # Hugging Face: Qwen/Qwen3.5-0.8B, the text model.
    "Qwen3.5-0.8B": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attention_bias": False,
        "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 3584,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(24)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "tie_word_embeddings": True, "vocab_size": 248320,
    },
    # Hugging Face: Qwen/Qwen3.5-35B-A3B, the text model.
    "35B-A3B": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "attention_bias": False,
        "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(40)],
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
        "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "vocab_size": 248320,
    },
    "1B-active": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 4096, "moe_intermediate_size": 1024, "norm_topk_prob": True,
        "num_attention_heads": 16, "num_experts": 32, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "tie_word_embeddings": False, "vocab_size": 32768,
    },
}  # fmt: skip


SHARD = 4 << 30  # bytes of a file of weights, about
# Of one word: without a tokenizer a folder is no model.
TOKENIZER = {
    "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": None, "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}  # fmt: skip


def tensors(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a qwen3_moe checkpoint."""
    m, d, f = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    yield "model.embed_tokens.weight", (c["vocab_size"], m)
    for i in range(c["num_hidden_layers"]):
        inside: dict[str, tuple[int, ...]] = {
            "input_layernorm": (m,), "self_attn.q_proj": (q, m), "self_attn.k_proj": (kv, m),
            "self_attn.v_proj": (kv, m), "self_attn.o_proj": (m, q), "self_attn.q_norm": (d,),
            "self_attn.k_norm": (d,), "post_attention_layernorm": (m,), "mlp.gate": (c["num_experts"], m),
        }  # fmt: skip
        for e in range(c["num_experts"]):
            shapes = {"gate": (f, m), "up": (f, m), "down": (m, f)}
            inside |= {f"mlp.experts.{e}.{name}_proj": shape for name, shape in shapes.items()}
        yield from ((f"model.layers.{i}.{name}.weight", shape) for name, shape in inside.items())
    yield "model.norm.weight", (m,)
    yield "lm_head.weight", (c["vocab_size"], m)


def write_weights(config: dict[str, Any], folder: Path) -> int:
    """Writes a checkpoint in bf16 as safetensors. Returns its bytes.

    Every tensor's values begin at the start of the same random numbers, which repeat.
    """
    normal = np.random.default_rng(0).standard_normal(1 << 23, np.float32) * np.float32(0.02)
    values = (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    held = 0
    for name, shape in tensors(config):
        if held > SHARD:
            shards.append({})
            held = 0
        shards[-1][name] = shape
        held += 2 * prod(shape)
    where = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        where |= dict.fromkeys(shard, file)
        _write_shard(folder / file, shard, values)
    total = sum(2 * prod(shape) for shard in shards for shape in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return total


def _write_shard(path: Path, shard: dict[str, tuple[int, ...]], values: bytes) -> None:
    header, end = {}, 0
    for name, shape in shard.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for shape in shard.values():
            left = 2 * prod(shape)
            while left:
                left -= f.write(memoryview(values)[: min(left, len(values))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--weights", action="store_true", help="a seeded checkpoint too")
    args = parser.parse_args()
    config = dict(CONFIGS[args.model])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if args.weights:
        if config["model_type"] != "qwen3_moe":
            parser.error(f"weights are written for a qwen3_moe model; got {config['model_type']}")
        print(f"{write_weights(config, args.folder) / 1e9:.1f} GB in {args.folder}")


if __name__ == "__main__":
    main()
