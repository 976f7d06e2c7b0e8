"""Options of vLLM, SGLang and llama-server that are not served here, and what takes their place.

Some of them may state what holds here anyway: `--tensor-parallel-size 1` or `--enable-chunked-prefill` are
accepted, for nothing is ignored by that. Every other value is an error that names the equivalent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pegainfer.contract.errors import ConfigError


class Unserved(NamedTuple):
    """
    instead: the equivalent here, or why there is none.
    holds: values, in lower case, that state what holds here anyway; 'true' is a flag without a value.
    takes: whether the command line gives it a value.
    """

    instead: str
    holds: tuple[str, ...] = ()
    takes: bool = True


_ON, _OFF = ("true", "1", "on"), ("false", "0", "off")
_ONE_GPU = "one process computes on one GPU so far"
_LAYERS = "--device cuda puts every layer on the GPU"
_ALWAYS = "this is always on; leave it out"
_REQUEST = "requests say this, each for itself"
_LOG = "warnings and errors are logged; --access-log FILE has a line for every request"
_NO_CODE = "no code is loaded into the server"
_FILE = "the formats are those of the model's file"


def _switch(instead: str, holds: tuple[str, ...] = ()) -> Unserved:
    return Unserved(instead, holds, takes=False)


_ALWAYS_ON = (
    "async_scheduling", "cont_batching", "embedding", "embeddings", "enable_auto_tool_choice",
    "enable_chunked_prefill", "enable_metrics", "enable_prompt_tokens_details", "enable_server_load_tracking",
    "jinja", "metrics",
)  # fmt: skip
_LONE = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "tp_size",
    "dp_size",
    "pp_size",
)
_NO_CHOICE = (
    "attention_backend", "sampling_backend", "grammar_backend", "guided_decoding_backend", "kernel_backend",
)  # fmt: skip

# Name, with underscores -> what to say.
UNSERVED: dict[str, Unserved] = {
    **{name: _switch(_ALWAYS, _ON) for name in _ALWAYS_ON},
    **{name: Unserved(f"{_ONE_GPU}; leave it out", ("1",)) for name in _LONE},
    **{name: Unserved("the kernels are chosen by shape; leave it out", ("auto",)) for name in _NO_CHOICE},
    "allowed_local_media_path": Unserved("images and audio are not served yet"),
    "allowed_origins": Unserved("use --allowed-origin, once for each origin"),
    "api_server_count": Unserved("there is one HTTP process; see --worker-processes", ("1",)),
    "batch_size": Unserved("use --max-prefill-tokens"),
    "block_size": Unserved("KV blocks hold 16 tokens", ("16",)),
    "cache_reuse": Unserved("use --prefix-cache, which is on", ("0",)),
    "cache_type_k": Unserved("use --kv-cache-dtype, for keys and values together"),
    "cache_type_v": Unserved("use --kv-cache-dtype, for keys and values together"),
    "chunked_prefill_size": Unserved("use --max-prefill-tokens"),
    "compilation_config": Unserved("kernels are compiled ahead by `pegainfer kernels build`"),
    "config_format": Unserved("config.json and GGUF are told apart by themselves", ("auto", "hf")),
    "convert": Unserved("one server generates and embeds; leave it out", ("auto", "none")),
    "cpu_offload_gb": Unserved("weights stay on one device; use a smaller quantisation", ("0",)),
    "disable_cascade_attn": _switch("attention has no cascade; leave it out", _ON),
    "ctx_size": Unserved("use --max-model-len, which is for each sequence"),
    "disable_log_requests": _switch("requests are logged with --access-log alone", _ON),
    "disable_log_stats": _switch("statistics are at /metrics and never logged", _ON),
    "disable_sliding_window": _switch("models with sliding windows are not served yet"),
    "distributed_executor_backend": Unserved(_ONE_GPU, ("uni",)),
    "draft": Unserved("speculative decoding is not served yet"),
    "enable_log_requests": _switch("use --access-log FILE", _OFF),
    "enable_lora": _switch("LoRA adapters are not served yet", _OFF),
    "flash_attn": Unserved(_ALWAYS, ("on", "auto", *_ON)),
    "gpu_layers": Unserved(_LAYERS, ("all", "-1")),
    "guided_decoding_disable_fallback": _switch("a grammar that cannot be compiled is always refused", _ON),
    "hf_overrides": Unserved("config.json is obeyed as it is"),
    "hf_token": Unserved("set HF_TOKEN in the environment"),
    "is_embedding": _switch("one server generates and embeds; leave it out"),
    "kv_events_config": Unserved("KV events are not published yet"),
    "kv_transfer_config": Unserved("KV transfer between servers is not served yet"),
    "limit_mm_per_prompt": Unserved("images and audio are not served yet"),
    "log_level": Unserved(_LOG),
    "logits_processors": Unserved(f"{_NO_CODE}; requests have logit_bias and structured_outputs"),
    "lora": Unserved("LoRA adapters are not served yet"),
    "lora_modules": Unserved("LoRA adapters are not served yet"),
    "main_gpu": Unserved("use --device-ordinal"),
    "max_log_len": Unserved("prompts are never logged"),
    "max_loras": Unserved("LoRA adapters are not served yet"),
    "max_parallel_loading_workers": Unserved(_ONE_GPU),
    "max_seq_len_to_capture": Unserved("use --cuda-graph or --no-cuda-graph"),
    "mem_fraction_static": Unserved("use --gpu-memory-utilization"),
    "middleware": Unserved(f"{_NO_CODE}; put a proxy in front"),
    "mlock": _switch("weights are packed into memory at the start; leave it out"),
    "mm_processor_kwargs": Unserved("images and audio are not served yet"),
    "model_impl": Unserved("one implementation serves each model line", ("auto",)),
    "n_gpu_layers": Unserved(_LAYERS, ("all", "-1")),
    "n_predict": Unserved("use max_tokens in a request"),
    "no_mmap": _switch("weights are packed into memory at the start; leave it out"),
    "no_webui": _switch("use --no-page"),
    "num_gpu_blocks_override": Unserved("use --kv-cache-memory"),
    "preemption_mode": Unserved("preempted requests are computed anew", ("recompute",)),
    "quantization": Unserved(f"{_FILE}; leave it out"),
    "reasoning_format": Unserved("use --reasoning-parser", ("auto", "deepseek")),
    "response_role": Unserved("answers have the role assistant", ("assistant",)),
    "rope_scaling": Unserved("config.json is obeyed as it is"),
    "rope_theta": Unserved("config.json is obeyed as it is"),
    "runner": Unserved("one server generates and embeds; leave it out", ("auto", "generate")),
    "schedule_policy": Unserved("requests run by priority, then fairly by key, then in their order"),
    "scheduling_policy": Unserved("requests run by priority, then fairly by key, then in their order",
                                  ("priority",)),
    "skip_tokenizer_init": _switch("prompts may be token ids with the tokenizer, too", _OFF),
    "speculative_config": Unserved("speculative decoding is not served yet"),
    "split_mode": Unserved(_ONE_GPU, ("none",)),
    "structured_outputs_config": Unserved("grammars need no setting; leave it out"),
    "swap_space": Unserved("preempted requests are computed anew", ("0",)),
    "task": Unserved("one server generates and embeds; leave it out", ("auto", "generate")),
    "tensor_split": Unserved(_ONE_GPU),
    "timeout": Unserved("use --write-seconds and --idle-connection-seconds, or timeout in a request"),
    "tokenizer_mode": Unserved("tokenizer.json or the GGUF file's vocabulary is read", ("auto",)),
    "tool_parser_plugin": Unserved(f"{_NO_CODE}; see --tool-call-parser"),
    "trust_remote_code": _switch("code of a repository is never run; leave it out", _OFF),
    "ubatch_size": Unserved("use --max-prefill-tokens"),
    "uvicorn_log_level": Unserved(_LOG),
    "webui": _switch("use --page, which is on", _ON),
    **{name: Unserved(f"{_REQUEST}; the server's defaults are set by --override-generation-config")
       for name in ("temp", "repeat_penalty")},
}  # fmt: skip

# Short forms of the command line -> their name above, or that of an option here.
SHORT = {
    "-O": "compilation_config", "-b": "batch_size", "-c": "ctx_size", "-ctk": "cache_type_k",
    "-ctv": "cache_type_v", "-dp": "data_parallel_size", "-fa": "flash_attn", "-hf": "hf_repo", "-a": "alias",
    "-mg": "main_gpu", "-n": "n_predict", "-ngl": "n_gpu_layers", "-np": "parallel",
    "-pp": "pipeline_parallel_size", "-q": "quantization", "-sm": "split_mode", "-tp": "tensor_parallel_size",
    "-ts": "tensor_split", "-ub": "ubatch_size", "-cb": "cont_batching",
}  # fmt: skip


def check_unserved(name: str, value: Any, *, shown: str) -> None:
    """Returns where the value states what holds here anyway.

    Args:
        name: a key of UNSERVED.
        value: as it was given; None for a flag without a value.
        shown: the option as the user wrote it.

    Raises ConfigError with the equivalent otherwise.
    """
    unserved = UNSERVED[name]
    text = "true" if value is None else str(value).lower()
    if text in unserved.holds:
        return
    got = "" if value is None or value is True else f" {value!s:.80}"
    raise ConfigError(f"{shown}{got} is not served here", remedy=unserved.instead)
