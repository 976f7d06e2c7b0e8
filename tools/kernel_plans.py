"""Makes docs/kernels/LINE.md for a model of each line: `python tools/kernel_plans.py [FOLDER]`.

The sizes are those of the published config.json of the model that a page is named after.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from pegainfer.app.config import EngineConfig
from pegainfer.cli.plan import step_programs
from pegainfer.cli.spec import EngineSpec
from pegainfer.engine.config import SchedulerConfig
from pegainfer.lower.cuda.target import Target, card_of
from pegainfer.measure import ledger
from pegainfer.measure.cards import priced_card
from pegainfer.measure.report_plan import PlannedModel, kernel_plan
from pegainfer.ops.program import Program

FOLDER = Path(__file__).parents[1] / "docs" / "kernels"
CARD, ARCH = "H100", "90a"
LENGTH = 16_384  # tokens of a sequence that programs are recorded for
QWEN: dict[str, Any] = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
                        "max_position_embeddings": 40960, "head_dim": 128}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepSeek-V2-Lite", {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "vocab_size": 102400, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "max_position_embeddings": 163840, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707,
            "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1,
        },
    }),
    "llama": ("Llama-3.1-8B", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "max_position_embeddings": 131072, "hidden_act": "silu", "tie_word_embeddings": False,
    }),
    "qwen3": ("Qwen3-4B", QWEN | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2560,
        "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "tie_word_embeddings": True,
    }),
    "qwen3_5": ("Qwen3.5-4B", {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 2560,
        "intermediate_size": 9216, "num_hidden_layers": 32, "full_attention_interval": 4, "head_dim": 256,
        "num_attention_heads": 16, "num_key_value_heads": 4, "attn_output_gate": True,
        "attention_bias": False, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "vocab_size": 248320, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }),
    "qwen3_moe": ("Qwen3-30B-A3B", QWEN | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip


def recorded(config: dict[str, Any]) -> tuple[Program, Program]:
    """The forward pass and the sampler of a model on a GPU."""
    engine = EngineConfig(backend="cuda", load_format="dummy", max_model_len=LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        programs = step_programs(EngineSpec(name="", path=folder, engine=engine, scheduler=SchedulerConfig()))
    return programs.forward, programs.sampler


def page(line: str) -> str:
    """The page of a line."""
    name, config = MODELS[line]
    device = priced_card(CARD, ledger.newest(ledger.read()))
    return kernel_plan(PlannedModel(name, *recorded(config), Target(card_of(ARCH)), device))


def main(argv: list[str]) -> None:
    folder = Path(argv[0]) if argv else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for line in MODELS:
        (folder / f"{line}.md").write_text(page(line))
        print(folder / f"{line}.md")


if __name__ == "__main__":
    main(sys.argv[1:])
