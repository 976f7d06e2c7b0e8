"""Options of other engines that share one explanation: names by what is said instead. See unserved.py."""

from __future__ import annotations

from typing import NamedTuple


class Unserved(NamedTuple):
    """
    instead: the equivalent here, or why there is none.
    holds: values, in lower case, that state what holds here anyway; 'true' is a flag without a value.
    takes: whether the command line gives it a value.
    """

    instead: str
    holds: tuple[str, ...] = ()
    takes: bool = True


ON, OFF = ("true", "1", "on"), ("false", "0", "off")
ONE_GPU = "one process computes on one GPU so far"
ALWAYS = "this is always on; leave it out"
NO_CODE = "no code is loaded into the server"
NO_IMAGES = "images and audio are not served yet"
NO_LORA = "use --enable-lora and --lora-modules NAME=FOLDER"
NO_DRAFT = "speculative decoding is not served yet"
REQUEST = "requests say this, each for itself; --override-generation-config sets the server's defaults"
LOG = "warnings and errors are logged; --access-log FILE has a line for every request"
CONFIG_JSON = "config.json is obeyed as it is"


def switch(instead: str, holds: tuple[str, ...] = ()) -> Unserved:
    return Unserved(instead, holds, takes=False)


_GROUPS: tuple[tuple[Unserved, str], ...] = (
    (
        switch(ALWAYS, ON),
        "async_scheduling cache_prompt cont_batching embedding embeddings enable_auto_tool_choice "
        "enable_cache_report enable_chunked_prefill enable_metrics enable_mixed_chunk "
        "enable_prompt_tokens_details enable_request_id_headers enable_server_load_tracking "
        "enable_tokenizer_info_endpoint jinja metrics",
    ),
    (
        Unserved(f"{ONE_GPU}; leave it out", ("1",)),
        "pipeline_parallel_size data_parallel_size_local decode_context_parallel_size pp_size ep_size nnodes",
    ),
    (
        Unserved(ONE_GPU),
        "master_addr master_port node_rank data_parallel_rank data_parallel_start_rank "
        "data_parallel_address data_parallel_rpc_port data_parallel_backend dist_init_addr dist_timeout "
        "all2all_backend eplb_config expert_placement_strategy max_parallel_loading_workers tensor_split "
        "cpu_moe n_cpu_moe",
    ),
    (Unserved(ONE_GPU, ("uni",)), "distributed_executor_backend"),
    (Unserved(ONE_GPU, ("none",)), "split_mode"),
    (
        switch(ONE_GPU, OFF),
        "data_parallel_hybrid_lb enable_dp_attention enable_dbo enable_eplb headless ray_workers_use_nsight",
    ),
    (switch(ONE_GPU, ON), "disable_custom_all_reduce"),
    (
        Unserved("the kernels are chosen by shape; leave it out", ("auto",)),
        "attention_backend sampling_backend grammar_backend guided_decoding_backend kernel_backend",
    ),
    (
        Unserved("kernels are compiled ahead by `pegainfer kernels build`"),
        "compilation_config optimization_level",
    ),
    (switch("kernels are compiled ahead by `pegainfer kernels build`", OFF), "enable_torch_compile"),
    (
        Unserved("use --cuda-graph or --no-cuda-graph"),
        "cuda_graph_sizes cuda_graph_max_bs cuda_graph_bs max_seq_len_to_capture",
    ),
    (
        Unserved(NO_IMAGES),
        "allowed_local_media_path allowed_media_domains limit_mm_per_prompt media_io_kwargs "
        "mm_encoder_tp_mode mm_processor_cache_gb mm_processor_kwargs",
    ),
    (switch(NO_IMAGES), "disable_chunked_mm_input interleave_mm_strings skip_mm_profiling"),
    (
        Unserved(NO_LORA),
        "lora lora_dtype lora_extra_vocab_size lora_paths",
    ),
    (switch(NO_LORA, OFF), "enable_lora_bias fully_sharded_loras"),
    (
        Unserved(NO_DRAFT),
        "draft draft_max model_draft num_lookahead_slots speculative_algorithm speculative_config",
    ),
    (
        Unserved(NO_CODE),
        "code_revision io_processor_plugin logits_processor_pattern scheduler_cls tool_parser_plugin "
        "worker_cls worker_extension_cls",
    ),
    (Unserved(CONFIG_JSON), "hf_overrides json_model_override_args override_kv rope_scaling rope_theta"),
    (Unserved(CONFIG_JSON), "rope_freq_base"),
    (
        Unserved(REQUEST),
        "frequency_penalty grammar json_schema min_p presence_penalty repeat_penalty temp top_k top_p",
    ),
    (Unserved(f"{REQUEST}; see chat_template_kwargs"), "reasoning_budget"),
    (Unserved(LOG), "log_config_file log_file log_level log_level_http uvicorn_log_level"),
    (switch(LOG), "log_error_stack show_time_cost verbose"),
    (switch("answers are never logged", OFF), "enable_log_outputs"),
    (switch("requests are logged with --access-log alone", ON), "disable_log_requests"),
    (switch("requests are logged with --access-log alone", ON), "disable_uvicorn_access_log log_disable"),
    (switch("use --access-log FILE", OFF), "enable_log_requests log_requests"),
    (switch("weights are packed into memory at the start; leave it out"), "mlock no_mmap"),
    (
        Unserved("weights are read from safetensors or GGUF files; leave it out", ("auto", "lazy")),
        "ignore_patterns model_loader_extra_config pt_load_map_location safetensors_load_strategy",
    ),
    (
        Unserved(
            "every model generates, embeds and scores; leave it out",
            ("auto", "generate", "none", "pooling", "embed", "embedding", "score"),
        ),
        "convert runner task",
    ),
    (switch("every model generates, embeds and scores; leave it out", ON), "is_embedding"),
    (Unserved("use --pooling"), "override_pooler_config pooler_config"),
    (
        Unserved("requests run by priority, then fairly by key, then in their order", ("priority",)),
        "schedule_policy scheduling_policy",
    ),
    (
        Unserved("prompts share each step by --target-itl-ms and --max-prefill-tokens"),
        "long_prefill_token_threshold max_long_partial_prefills max_num_partial_prefills "
        "schedule_conservativeness",
    ),
    (Unserved("use --max-prefill-tokens"), "batch_size chunked_prefill_size ubatch_size"),
    (Unserved("use --kv-cache-memory"), "max_total_tokens num_gpu_blocks_override"),
    (Unserved("KV blocks hold 16 tokens", ("16",)), "block_size page_size"),
    (
        Unserved("use --kv-cache-dtype, for keys and values together"),
        "cache_type_k cache_type_v",
    ),
    (Unserved("use --kv-offload", ("0",)), "kv_offloading_size swap_space"),
    (
        Unserved("use --state-dtype", ("auto", "float32")),
        "mamba_cache_dtype mamba_ssm_cache_dtype",
    ),
    (Unserved("each streamed event holds what one step yielded", ("1",)), "stream_interval"),
    (
        Unserved("pages of --allowed-origin may use every route; leave it out", ("*", "['*']", '["*"]')),
        "allowed_headers allowed_methods",
    ),
    (Unserved("client certificates are not asked for", ("0",)), "ssl_ca_certs ssl_cert_reqs"),
    (
        Unserved("use --threads, for prompts and answers together"),
        "cpu_mask cpu_strict numa poll prio threads_batch",
    ),
    (Unserved("several models in one server are not served yet"), "models_dir models_max"),
    (
        Unserved("each sequence has a KV cache of its own, which the prefix cache reuses"),
        "ctx_checkpoints defrag_thold slot_prompt_similarity slot_save_path",
    ),
    (switch("each sequence has a KV cache of its own; leave it out"), "kv_unified swa_full"),
)

GROUPED: dict[str, Unserved] = {name: unserved for unserved, names in _GROUPS for name in names.split()}
