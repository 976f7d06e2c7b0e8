"""Options of vLLM, SGLang and llama-server that are not served here, and what takes their place.

Some of them may state what holds here anyway: `--tensor-parallel-size 1` or `--enable-chunked-prefill` are
accepted, for nothing is ignored by that. Every other value is an error that names the equivalent.
"""

from __future__ import annotations

from typing import Any

from pegainfer.app.unserved_groups import (
    ALWAYS,
    GROUPED,
    NO_CODE,
    OFF,
    ON,
    Unserved,
    switch,
)
from pegainfer.contract.errors import ConfigError

_LAYERS = "--device cuda puts every layer on the GPU"

# Name, with underscores -> what to say.
UNSERVED: dict[str, Unserved] = {
    **GROUPED,
    "additional_config": Unserved("options have names of their own, see docs/options.md"),
    "allow_auto_truncate": switch("use truncate_prompt_tokens in a request", OFF),
    "allow_credentials": switch("pages show a key, and no cookies are used", OFF),
    "allowed_origins": Unserved("use --allowed-origin, once for each origin"),
    "api_server_count": Unserved("there is one HTTP process; see --worker-processes", ("1",)),
    "base_gpu_id": Unserved("use --device-ordinal"),
    "cache_reuse": Unserved("use --prefix-cache, which is on", ("0",)),
    "calculate_kv_scales": switch("keys and values are stored without scales", OFF),
    "chat_template_content_format": Unserved("it is found out from the template", ("auto",)),
    "collect_detailed_traces": Unserved("use --otlp-traces-endpoint, whose spans have every stage"),
    "completion_template": Unserved("completions are texts as they are; use --chat-template for chats"),
    "config_format": Unserved("config.json and GGUF are told apart by themselves", ("auto", "hf")),
    "constrained_json_whitespace_pattern": Unserved("use a Lark grammar in the request"),
    "context_shift": switch("an answer ends where the context is full", OFF),
    "cpu_offload_gb": Unserved("weights stay on one device; use a smaller quantisation", ("0",)),
    "ctx_size": Unserved("use --max-model-len, which is for each sequence"),
    "decode_log_interval": Unserved("statistics are at /metrics and never logged"),
    "disable_async_output_proc": switch("use --pipeline-depth 1"),
    "disable_cascade_attn": switch("attention has no cascade; leave it out", ON),
    "disable_fastapi_docs": switch("/docs and /openapi.json are always served"),
    "disable_frontend_multiprocessing": switch("the engine runs in a process of its own"),
    "disable_hybrid_kv_cache_manager": switch("each model line declares its KV groups"),
    "disable_log_stats": switch("statistics are at /metrics and never logged", ON),
    "disable_overlap_schedule": switch("use --pipeline-depth 1"),
    "disable_sliding_window": switch("models with sliding windows are not served yet"),
    "enable_force_include_usage": switch("clients ask with stream_options.include_usage", OFF),
    "enable_prompt_embeds": switch("prompts are texts or token ids", OFF),
    "enable_sleep_mode": switch("an engine keeps its memory until it ends", OFF),
    "enable_ssl_refresh": switch("restart the server for a new certificate", OFF),
    "exclude_tools_when_tool_choice_none": switch("clients leave the tools out of such a request", OFF),
    "file_storage_path": Unserved("files are not stored; use `pegainfer run-batch`"),
    "fit": Unserved("the KV cache is made to fit the memory by itself", ON),
    "flash_attn": Unserved(ALWAYS, ("on", "auto", *ON)),
    "gpu_layers": Unserved(_LAYERS, ("all", "-1")),
    "guided_decoding_disable_fallback": switch("a grammar that cannot be compiled is always refused", ON),
    "h11_max_header_count": Unserved("use --max-header-bytes"),
    "hf_config_path": Unserved("config.json lies beside the weights"),
    "hf_file": Unserved("name it in the model: owner/model/FILE.gguf"),
    "hf_token": Unserved("set HF_TOKEN in the environment"),
    "keep": Unserved("an answer ends where the context is full", ("0",)),
    "kv_sharing_fast_prefill": switch("models that share KV among layers are not served yet", OFF),
    "kv_transfer_config": Unserved("use --role, --peer-listen and --prefill-peers"),
    "logits_processors": Unserved(f"{NO_CODE}; requests have logit_bias and structured_outputs"),
    "logprobs_mode": Unserved("logprobs are those of the raw logits", ("raw_logprobs",)),
    "main_gpu": Unserved("use --device-ordinal"),
    "mamba_block_size": Unserved("use --snapshot-share; the model line chooses the boundaries"),
    "max_log_len": Unserved("prompts are never logged"),
    "mem_fraction_static": Unserved("use --gpu-memory-utilization"),
    "middleware": Unserved(f"{NO_CODE}; put a proxy in front"),
    "model_impl": Unserved("one implementation serves each model line", ("auto",)),
    "n_gpu_layers": Unserved(_LAYERS, ("all", "-1")),
    "n_predict": Unserved("use max_tokens in a request"),
    "no_context_shift": switch("an answer ends where the context is full", ON),
    "no_webui": switch("use --no-page"),
    "path": Unserved("the page is built in; put a proxy in front for another"),
    "preemption_mode": Unserved("preempted requests are computed anew", ("recompute",)),
    "prefix_caching_hash_algo": Unserved("prefixes are hashed with SHA-256", ("sha256",)),
    "props": switch("there is no such route; restart the server with other options"),
    "reasoning_format": Unserved("use --reasoning-parser", ("auto", "deepseek")),
    "reranking": switch("/rerank is always served; leave it out", ON),
    "response_role": Unserved("answers have the role assistant", ("assistant",)),
    "return_tokens_as_token_ids": switch("requests ask for token ids with return_token_ids", OFF),
    "root_path": Unserved("put a proxy in front that takes the prefix off"),
    "show_hidden_metrics_for_version": Unserved("all metrics are shown; see --metrics-prefix"),
    "skip_server_warmup": switch("the server is ready when it says so; leave it out", ON),
    "skip_tokenizer_init": switch("prompts may be token ids with the tokenizer, too", OFF),
    "slots": switch("statistics are at /metrics and on /dashboard"),
    "stream_output": switch("each streamed event holds what is new", ON),
    "structured_outputs_config": Unserved("grammars need no setting; leave it out"),
    "threads_http": Unserved("use --worker-processes"),
    "timeout": Unserved("use --write-seconds and --idle-connection-seconds, or timeout in a request"),
    "tokenizer_mode": Unserved("tokenizer.json or the GGUF file's vocabulary is read", ("auto",)),
    "tokenizer_revision": Unserved("pull that revision, and give --tokenizer its path"),
    "tool_server": Unserved("clients run the tools"),
    # Both values are accepted, because code of a repository is never run.
    "trust_remote_code": switch("code of a repository is never run; leave it out", (*ON, *OFF)),
    "uds": Unserved("use --host and --port"),
    "use_tqdm_on_load": switch("downloads have a progress bar, and loading takes seconds", ON),
    "warmup": switch("the server is ready when it says so; leave it out", OFF),
    "warmups": Unserved("the server is ready when it says so; leave it out"),
    "webui": switch("use --page, which is on", ON),
}

# Short forms of the command line -> their name above, or that of an option here.
SHORT = {
    "-O": "compilation_config", "-b": "batch_size", "-c": "ctx_size", "-ctk": "cache_type_k",
    "-ctv": "cache_type_v", "-dp": "data_parallel_size", "-fa": "flash_attn", "-hf": "hf_repo", "-a": "alias",
    "-mg": "main_gpu", "-n": "n_predict", "-ngl": "n_gpu_layers", "-np": "parallel",
    "-pp": "pipeline_parallel_size", "-sm": "split_mode", "-tp": "tensor_parallel_size",
    "-ts": "tensor_split", "-ub": "ubatch_size", "-cb": "cont_batching", "-hff": "hf_file",
    "-ep": "enable_expert_parallel", "-tb": "threads_batch", "-md": "model_draft",
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
