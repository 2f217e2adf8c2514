"""vLLM's flags, once: which are taken, which change nothing here, and which are refused, with the reason and the way out.

The command line, YAML files, `LLM(...)`, `EngineArgs` and docs/VLLM_FLAGS.md derive from `TABLE`. Flags of ours that have
vLLM's name and meaning are in TAKEN. Names are those of vLLM 0.33, and older ones that scripts still use (OLDER).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm.errors import ConfigError
from jaxllm.log import info_once, warn_once
from jaxllm.vllm_compat.values import as_here, tell

Kind = Literal["switch", "value", "optional", "list", "object"]


@dataclass(frozen=True)
class VllmFlag:
    """A flag of vLLM that is no option of ours under that name."""

    name: str
    """As a keyword: enforce_eager."""
    kind: Kind
    """How the command line writes it: alone (or with no-), with a value, with or without one, with several, or as a JSON object."""
    text: str
    """How it is applied, or why it is refused and what to do instead."""
    refused: bool = False
    """Whether it is refused for every value but the harmless ones."""
    harmless: tuple[Any, ...] = ()
    """Values that say what is so anyway."""
    harmless_keys: tuple[str, ...] = ()
    """Keys of an object that may have any value."""
    option: str | None = None
    """The option of ours that it sets."""
    key: str | None = None
    """The key of that option, an object, that it sets."""
    words: Mapping[str, Any] = field(default_factory=dict)
    """How values of that option are called here; None: the option is left alone."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHORT_NAMES: Mapping[str, str] = {
    "tensor_parallel_size": "-tp",
    "api_server_count": "-asc",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm",
    "enable_expert_parallel": "-ep",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "nnodes": "-n",
    "node_rank": "-r",
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "speculative_config": "-sc",
    "optimization_level": "-O",
    "diffusion_config": "-dc",
}
TAKEN = _names("""
    model tokenizer dtype seed max_model_len quantization runner pooler_config hf_overrides revision generation_config
    override_generation_config max_logprobs logprobs_mode logits_processors skip_tokenizer_init load_format download_dir
    tensor_parallel_size prefill_context_parallel_size pipeline_parallel_size data_parallel_size enable_expert_parallel
    enable_eplb eplb_config gpu_memory_utilization
    kv_cache_memory_bytes kv_offloading_size kv_transfer_config kv_events_config block_size kv_cache_dtype
    enable_prefix_caching
    prefix_caching_hash_algo prefix_cache_retention_interval
    num_gpu_blocks_override disable_hybrid_kv_cache_manager max_num_batched_tokens max_num_seqs
    max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill long_prefill_token_threshold
    long_prefill_token_threshold_adaptive
    scheduling_policy scheduler_reserve_full_isl watermark async_scheduling stream_interval disable_log_stats
    speculative_config chat_template config
    nnodes node_rank master_addr master_port distributed_executor_backend distributed_timeout_seconds
    enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules
    limit_mm_per_prompt allowed_media_domains allowed_local_media_path media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
    mm_hasher_algorithm skip_mm_profiling language_model_only disable_chunked_mm_input interleave_mm_strings trust_request_mm_kwargs
""")
"""Flags that the engine's commands take under the same name with the same meaning."""
TAKEN_BY_SERVER = _names("""
    headless host port uds grpc_port uvicorn_log_level disable_uvicorn_access_log disable_access_log_for_endpoints allow_credentials
    allowed_origins allowed_methods allowed_headers api_key ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers
    root_path middleware enable_request_id_headers disable_fastapi_docs chat_template_content_format
    trust_request_chat_template default_chat_template_kwargs response_role return_tokens_as_token_ids enable_auto_tool_choice
    exclude_tools_when_tool_choice_none tool_call_parser reasoning_parser tool_parser_plugin reasoning_parser_plugin
    max_log_len enable_prompt_tokens_details
    enable_per_request_metrics enable_server_load_tracking enable_force_include_usage sse_keep_alive_interval
    enable_log_requests enable_tokenizer_info_endpoint fingerprint_mode shutdown_timeout served_model_name
    otlp_traces_endpoint api_server_count lora_modules enable_scale_out
""")
"""Additional flags of vLLM that `jaxllm serve` accepts."""
OLDER = _names("""
    swap_space disable_log_requests max_seq_len_to_capture task guided_decoding_backend device use_v2_block_manager
    num_scheduler_steps multi_step_stream_outputs disable_frontend_multiprocessing disable_async_output_proc preemption_mode
    num_lookahead_slots tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config enable_reasoning rope_scaling
    rope_theta speculative_model num_speculative_tokens disable_mm_preprocessor_cache enable_lora_bias cuda_graph_sizes
    max_num_partial_prefills max_long_partial_prefills enable_prompt_adapter quantization_param_path worker_use_ray
    calculate_kv_scales override_attention_dtype enable_bf16x3_router_gemm omni
""")
"""Names that vLLM had before 0.33, and those of packages over it."""


def _flags(
    text: str, *, switches: str = "", values: str = "", optional: str = "", lists: str = "", objects: str = "", **more: Any
) -> Iterator[VllmFlag]:
    kinds: dict[Kind, str] = {"switch": switches, "value": values, "optional": optional, "list": lists, "object": objects}
    for kind, names in kinds.items():
        yield from (VllmFlag(name, kind, text, **more) for name in names.split())


def _refused(text: str, **more: Any) -> Iterator[VllmFlag]:
    return _flags(text, refused=True, **more)


_ENGINE = (
    # Model
    *_flags("a checkpoint's own code is never run; models that need it are refused by name", switches="trust_remote_code"),
    *_flags("a checkpoint's own code is never run", values="code_revision"),
    *_flags("the tokenizer's files say which kind it is, and chat templates are Jinja; where the checkpoint has none, give one with "
            "--chat-template", values="tokenizer_mode", option="chat_template",
            words={**dict.fromkeys(("auto", "hf", "slow", "mistral")), "deepseek_v32": "deepseek_v32"}),
    *_refused("the tokenizer is read at --revision; for another, download it and name its directory with --tokenizer",
              values="tokenizer_revision"),
    *_refused("set $HF_TOKEN or run `hf auth login`: a token on the command line is seen in the list of processes",
              optional="hf_token", harmless=(True,)),
    *_refused("config.json is read from the model's directory; --hf-overrides changes it", values="hf_config_path"),
    *_refused("config.json is read, and where there is none, params.json of Mistral's mixtures of experts with attention over latents",
              values="config_format", harmless=("auto", "hf", "mistral")),
    *_refused("every model is an implementation of jaxllm's own; `jaxllm models` lists them",
              values="model_impl", harmless=("auto", "vllm")),
    *_refused("register the family in the source (docs/HOW_TO_ADD.md)", objects="model_class_overrides"),
    *_flags("--runner pooling makes embeddings, classes or scores, as the checkpoint's head does", values="convert", option="runner",
            words={"auto": None, "none": None, "embed": "pooling", "classify": "pooling"}),
    *_flags("the older name of --runner", values="task", option="runner",
            words={"auto": "auto", "generate": "generate",
                   **dict.fromkeys(("embed", "embedding", "classify", "score"), "pooling")}),
    *_refused("--quantization fp8 quantises all linear layers of the decoder alike", objects="quantization_config"),
    *_flags("nothing that is quantised here is deprecated", switches="allow_deprecated_quantization"),
    *_refused("give the scales in the checkpoint", values="quantization_param_path", switches="calculate_kv_scales"),
    *_refused("attention is computed in the model's type; --dtype sets it", values="override_attention_dtype"),
    *_refused("models read text and images and write text; all else needs the package vllm-omni",
              switches="omni"),
    *_flags("every step is a compiled program; --warmup lazy starts sooner", switches="enforce_eager"),
    *_flags("XLA compiles every step; --warmup says when, --decode-buckets and --token-buckets say for which sizes",
            objects="compilation_config", values="optimization_level max_cudagraph_capture_size max_seq_len_to_capture",
            lists="cudagraph_capture_sizes cuda_graph_sizes"),
    *_flags("there is one mode, for throughput and latency alike", values="performance_mode"),
    *_refused("attention in a sliding window is part of the model; --max-model-len keeps requests within it",
              switches="disable_sliding_window"),
    *_refused("write --hf-overrides.rope_theta X or --hf-overrides.rope_scaling JSON", values="rope_theta", objects="rope_scaling"),
    *_refused("prompts are text or token ids", switches="enable_prompt_embeds enable_prompt_adapter"),
    *_flags("sleep and wake_up need no option in Python, and --enable-dev-endpoints over HTTP",
            switches="enable_sleep_mode sleep_mode_offload_cudagraph enable_cumem_allocator enable_nccl_comm_suspend",
            values="sleep_mode_backend", lists="sleep_preserve_parameter_names"),
    *_refused("noise is drawn in float32", switches="use_fp64_gumbel"),
    *_refused("answers do not report it", switches="return_sampling_mask enable_return_routed_experts"),
    *_refused("traces cannot be replayed", switches="enable_trace_replay"),
    *_refused("there are no plugins for inputs and outputs", values="io_processor_plugin"),
    *_flags("texts are tokenized in threads; --api-server-count adds processes",
            values="renderer_num_workers tokenizer_pool_size tokenizer_pool_type", objects="tokenizer_pool_extra_config"),
    # Loading
    *_flags("weights are read slice by slice from memory-mapped files, and only the files that are needed",
            values="safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size "
            "pt_load_map_location max_parallel_loading_workers", lists="ignore_patterns"),
    *_refused("the loaders have no further options", objects="model_loader_extra_config"),
    *_flags("the older name of --use-progress-bar", switches="use_tqdm_on_load", option="use_progress_bar"),
    *_refused("weights stay on the device; --quantization fp8 or --tensor-parallel-size makes room",
              values="cpu_offload_gb offload_group_size", harmless=(0,)),
    *_flags("only matters where weights are offloaded, which is refused",
            values="offload_backend offload_num_in_group offload_prefetch_step", lists="cpu_offload_params offload_params"),
    # Kernels
    *_flags("kernels are chosen for the GPU and the model and checked at the start; --attention-implementation names one",
            values="attention_backend moe_backend linear_backend sparse_indexer_topk_backend gdn_prefill_backend "
            "kda_prefill_backend kda_decode_backend", objects="attention_config kernel_config ir_op_priority",
            switches="enable_flashinfer_autotune enable_bf16x3_router_gemm monokernel disable_cascade_attn"),
    *_flags("sums over GPUs run in a kernel that is checked at the start, and through NCCL where that cannot be",
            switches="disable_custom_all_reduce"),
    *_flags("states by row behind prefixes are in blocks of the KV cache: --prefix-cache-retention-interval",
            values="mamba_block_size mamba_cache_mode replayssm_buffer_len",
            switches="enable_mamba_shared_prefix_checkpoint use_replayssm"),
    *_flags("plain JAX computes Mamba-2", values="mamba_backend mamba_ssu_algorithm"),
    *_refused("states of Mamba-2 and of linear attention are float32; the last inputs of their convolutions have the model's type",
              values="mamba_ssm_cache_dtype mamba_cache_dtype", harmless=("auto", "float32")),
    *_refused("states of Mamba-2 are float32, which are not rounded", switches="enable_mamba_cache_stochastic_rounding"),
    *_flags("only matters with --enable-mamba-cache-stochastic-rounding, which is refused", values="mamba_cache_philox_rounds"),
    *_refused("states of Mamba-2 are float32, and plain JAX computes them", objects="mamba_config", harmless_keys=("backend",)),
    # Structured output and reasoning
    *_refused("llguidance constrains every output; whitespace and the like are said in the request", objects="structured_outputs_config",
              harmless_keys=("backend", "disable_fallback")),
    *_flags("llguidance constrains every output", values="guided_decoding_backend"),
    *_refused("thinking_token_budget finds the tokens of the model that open and close its thinking", objects="reasoning_config"),
    *_flags("reasoning is found by the chat template; --reasoning-parser names its format", switches="enable_reasoning"),
    # Parallelism
    *_refused("host 0's server reaches the replicas of all hosts and chooses among them; --nnodes and --node-rank say which a host has",
              values="data_parallel_rank", harmless=(0,)),
    *_refused("every host has as many replicas: with --data-parallel-size N, --nnodes M and --node-rank R it starts with N / M × R",
              values="data_parallel_start_rank", harmless=(0,)),
    *_refused("every host has as many replicas: --nnodes M with --data-parallel-size N makes it N / M", values="data_parallel_size_local"),
    *_flags("vLLM's name of --master-addr for replicas on several hosts (--nnodes)", values="data_parallel_address", option="master_addr"),
    *_flags("vLLM's name of --master-port for replicas on several hosts (--nnodes)", values="data_parallel_rpc_port",
            option="master_port"),
    *_refused("start a server for each GPU (CUDA_VISIBLE_DEVICES) behind a balancer of your own, without --data-parallel-size",
              switches="data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb"),
    *_flags("replicas are engine processes that do not wait for each other",
            values="data_parallel_backend dp_sync_interval data_parallel_supervisor_port "
            "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold",
            switches="disable_nccl_for_dp_synchronization"),
    *_refused("the devices that split each layer keep the cache by heads, and none is taken out of them to split it by tokens; those of "
              "--prefill-context-parallel-size do, for prompts and answers alike",
              values="decode_context_parallel_size", harmless=(1,)),
    *_flags("only matters with --decode-context-parallel-size, which is refused", switches="dcp_q_replicate",
            values="dcp_comm_backend dcp_kv_cache_interleave_size"),
    *_flags("devices take turns by blocks: --block-size tokens of a block are on each", values="cp_kv_cache_interleave_size"),
    *_refused("the number of devices is set at the start; --enable-eplb moves experts between them", switches="enable_elastic_ep"),
    *_flags("only matters for a number of devices that changes, which is refused", values="elastic_ep_max_dp_size"),
    *_flags("experts are loaded in their order; --enable-eplb moves them by their load", values="expert_placement_strategy"),
    *_flags("tokens are gathered or sent by their number and that of the devices (docs/EXPERTS.md)", values="all2all_backend"),
    *_flags("each device reads only the weights of its experts", switches="enable_ep_weight_filter"),
    *_refused("--distributed-executor-backend ray starts the other hosts", switches="worker_use_ray"),
    *_refused("--profiler-dir has JAX's profiler write traces", switches="ray_workers_use_nsight"),
    *_flags("--distributed-timeout-seconds holds for all devices", values="cpu_distributed_timeout_seconds"),
    *_refused("set $CUDA_VISIBLE_DEVICES", lists="device_ids"),
    *_refused("set $JAX_PLATFORMS", values="device", harmless=("auto", "cuda", "gpu")),
    *_refused("start the command under numactl", switches="numa_bind", lists="numa_bind_nodes numa_bind_cpus"),
    *_flags("each GPU always draws the tokens of its share of the requests", switches="enable_batch_sharded_sampling"),
    *_refused("steps are not split into micro-batches", switches="enable_dbo"),
    *_flags("only matters with --enable-dbo, which is refused",
            values="ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold"),
    *_refused("activations are not split along the sequence", switches="enable_hc_sp"),
    *_flags("nothing is passed between processes in tensors", switches="enable_shm_tensor_arena"),
    *_refused("there are no workers whose class could be changed", values="worker_cls", harmless=("auto",)),
    *_refused("there are no workers whose class could be changed", values="worker_extension_cls"),
    *_refused("docs/FAULTS.md says what happens when something fails", switches="enable_fault_tolerance",
              objects="fault_tolerance_config watchdog_config"),
    # KV cache
    *_flags("vLLM's second name of it", values="device_memory_utilization", option="gpu_memory_utilization"),
    *_flags("preempted requests are computed again, or loaded with --kv-offloading-size", values="swap_space preemption_mode"),
    *_refused("all layers have one type of cache, --kv-cache-dtype", lists="kv_cache_dtype_skip_layers"),
    *_refused("prefixes match by blocks of --block-size tokens", values="prefix_match_unit", harmless=(0,)),
    *_refused("layers do not share caches", switches="kv_sharing_fast_prefill"),
    *_flags("prefix hits in a sliding window need only the blocks of the window", switches="swa_bounded_replay"),
    *_refused("the engine itself keeps blocks in host memory, --kv-offloading-size", values="kv_offloading_backend", harmless=("native",)),
    *_flags("there is one block manager", switches="use_v2_block_manager"),
    # Scheduler
    *_refused("--max-num-batched-tokens limits a step", values="max_num_scheduled_tokens"),
    *_refused("--max-num-seqs limits running requests", values="max_num_active_seqs"),
    *_refused("prompts are admitted in every step", values="prefill_schedule_interval", harmless=(1,)),
    *_refused("the scheduler cannot be replaced", values="scheduler_cls"),
    *_flags("the host plans while the device computes (--async-scheduling)", values="num_scheduler_steps",
            switches="multi_step_stream_outputs disable_async_output_proc"),
    *_flags("--long-prefill-token-threshold limits long prompts", values="max_num_partial_prefills max_long_partial_prefills"),
    # LoRA
    *_refused("biases of adapters are not supported; train the adapter with bias='none'", switches="enable_lora_bias"),
    *_refused("name the adapter in the request", objects="default_mm_loras"),
    *_flags("each adapter is split over the GPUs as the layers are that it changes", switches="fully_sharded_loras"),
    *_flags("steps without adapters always run programs without them", switches="specialize_active_lora"),
    *_flags("the form of an adapter's experts is read from its files", switches="enable_mixed_moe_lora_format"),
    *_refused("each expert has its own matrices", switches="enable_moe_shared_loras"),
    *_refused("adapters change the language model alone", switches="enable_tower_connector_lora"),
    *_flags("no model here has a head for classes", values="max_lora_cls_labels"),
    # Speculative decoding and transfer
    *_flags("short for that key of --speculative-config", values="spec_method", option="speculative_config", key="method"),
    *_flags("short for that key of --speculative-config", values="spec_model", option="speculative_config", key="model"),
    *_flags("short for that key of --speculative-config", values="spec_tokens", option="speculative_config",
            key="num_speculative_tokens"),
    *_flags("the older name of that key of --speculative-config", values="speculative_model", option="speculative_config",
            key="model"),
    *_flags("the older name of that key of --speculative-config", values="num_speculative_tokens", option="speculative_config",
            key="num_speculative_tokens"),
    *_flags("each step reserves the slots that its drafts need", values="num_lookahead_slots"),
    *_refused("/metrics has the acceptance of all requests together (docs/METRICS.md)", values="per_request_spec_decode_metrics",
              harmless=("none",)),
    *_refused("caches and weights are not passed between servers",
              objects="ec_transfer_config ec_manager_config weight_transfer_config"),
    *_refused("no model here has use for it", objects="diffusion_config engram_config aux_output_config additional_config"),
    *_refused("--watermark is a fraction of the blocks", objects="watermark_config"),
    # Images, audio, video
    *_refused("every device holds the whole encoder and computes it, which is nearest to data", values="mm_encoder_tp_mode",
              harmless=("data",)),
    *_refused("send the images; embeddings that were computed elsewhere are not taken", switches="enable_mm_embeds"),
    *_refused("images are encoded where their requests run", switches="mm_encoder_only"),
    *_flags("each process that prepares images keeps some of them in its own memory (--mm-processor-cache-gb)",
            values="mm_processor_cache_type mm_shm_cache_max_object_size_mb"),
    *_flags("the older name of --mm-processor-cache-gb 0", switches="disable_mm_preprocessor_cache", option="mm_processor_cache_gb",
            words={True: 0.0, False: None}),
    *_flags("pixels travel to the engine as bytes in its messages", values="mm_tensor_ipc mm_ipc_gpu_memory_gb"),
    *_refused("images are prepared on the host", values="mm_processor_device", harmless=("cpu",)),
    *_flags("pixels are always normalised on the device", switches="mm_device_do_normalize"),
    *_flags("docs/METRICS.md lists what is measured", switches="enable_mm_processor_stats"),
    *_flags("kernels are chosen for the GPU and the model and checked at the start", values="mm_encoder_attn_backend"),
    *_refused("encoders compute attention in the model's type", values="mm_encoder_attn_dtype", harmless=("auto",)),
    *_flags("only matters with --mm-encoder-attn-dtype, which is refused",
            values="mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"),
    *_flags("all tokens of a video are kept", values="video_pruning_rate video_pruning_method"),
    # Observation
    *_refused("--otlp-traces-endpoint sends a span for each request", lists="collect_detailed_traces"),
    *_flags("no metric is hidden", values="show_hidden_metrics_for_version"),
    *_refused("docs/METRICS.md lists what is measured", switches="kv_cache_metrics cudagraph_metrics enable_mfu_metrics "
              "enable_logging_iteration_details", objects="custom_histogram_buckets"),
    *_flags("only matters with --kv-cache-metrics, which is refused", values="kv_cache_metrics_sample"),
    *_refused("--profiler-dir records traces by JAX's profiler", switches="enable_layerwise_nvtx_tracing", objects="profiler_config"),
    *_refused("the metric programs_compiled_after_warmup counts them", values="jit_monitor_mode", harmless=("warn",)),
    *_flags("the metric programs_compiled_after_warmup counts compilations", switches="jit_monitor_verbose"),
    *_refused("set $JAXLLM_LOG_LEVEL, or -v for debug", values="log_level", harmless=("info", "INFO")),
    *_refused("set $JAXLLM_LOG_LEVEL and $JAXLLM_LOG_FORMAT, or --log-format", values="log_config_file", objects="logging_config"),
    *_flags("there is one engine, with one log", switches="aggregate_engine_logging"),
    *_flags("unknown options in the environment are always errors", switches="fail_on_environ_validation"),
    *_flags("requests are logged only with --enable-log-requests", switches="disable_log_requests"),
)  # fmt: skip
_SERVER = (
    *_refused("--grpc-port N offers gRPC in addition to HTTP", switches="grpc"),
    *_refused("start the server again when its certificate changes", switches="enable_ssl_refresh"),
    *_refused("headers have fixed limits; --max-request-body-bytes limits bodies",
              values="h11_max_incomplete_event_size h11_max_header_count"),
    *_flags("/docs needs nothing from other hosts", switches="enable_offline_docs"),
    *_refused("calls are constrained when tool_choice is required or names a function", values="tool_strict_level", harmless=("auto",)),
    *_refused("the server runs no tools", values="tool_server"),
    *_refused("--default-chat-template-kwargs sets what the template reads", objects="reasoning_effort_map",
              values="anthropic_disabled_thinking_effort"),
    *_refused("every other route stays; --enable-scale-out adds those for token ids", switches="tokens_only"),
    *_refused("outputs are never logged", switches="enable_log_outputs"),
    *_flags("only matters with --enable-log-outputs, which is refused", switches="enable_log_deltas"),
    *_flags("unexpected errors are always logged with their stack", switches="log_error_stack"),
    *_refused("--fingerprint-mode full, hash or none says what system_fingerprint holds", values="fingerprint_value"),
    *_flags("scores of many vectors are not offered", switches="enable_flash_late_interaction"),
    *_flags("there is no API in Cohere's form", switches="cohere_is_reasoning_model", values="cohere_format"),
    *_flags("HTTP always has separate processes", switches="disable_frontend_multiprocessing"),
)  # fmt: skip
_NO_DATASET = "its dataset is not offered; write the prompts to a file for --dataset-name custom or sharegpt of `bench serve`"
_BENCH = (
    *_refused(_NO_DATASET, values="hf_name hf_subset hf_split hf_output_len spec_bench_output_len spec_bench_category "
              "speed_bench_dataset_subset speed_bench_output_len speed_bench_category blazedit_min_distance blazedit_max_distance "
              "timed_trace_chunk_hash_size timed_trace_sec_multiplier timed_trace_label_timestamp timed_trace_label_input_length "
              "timed_trace_label_output_length timed_trace_label_hash_ids", lists="bfcl_categories"),
    *_refused("speech is not measured", values="asr_max_audio_len_sec asr_min_audio_len_sec"),
    *_refused("each request has one prompt", values="random_batch_size", switches="no_reranker"),
    *_refused("`bench serve --plot FILE` draws the run", switches="plot_timeline plot_dataset_stats", values="timeline_itl_thresholds"),
    *_refused("a file with fewer prompts is used again; give --num-prompts of at most its number", switches="no_oversample"),
    *_refused("times of tokens are measured in streams", switches="no_stream"),
    *_refused("a search streams no tokens whose times could be measured", switches="use_beam_search"),
    *_refused("requests start as --request-rate, --burstiness and --ramp-up-strategy say", switches="self_timed",
              values="probe_request_rate"),
    *_refused("prompts of a file are sent as they are", switches="custom_ensure_client_side_data"),
    *_refused("this engine alone is measured", values="hf_max_batch_size", switches="hf_enable_torch_compile"),
    *_refused("all prompts are given at once, before the first step", switches="prequeue_requests"),
    *_flags("prompts of a file are sent in its order and as they are", switches="disable_shuffle skip_chat_template"),
    *_flags("no tokenizer is loaded without --tokenizer", switches="skip_tokenizer_init"),
    *_flags("images are always sent in chat messages", switches="enable_multimodal_chat"),
    *_flags("token ids are measured, which are never made text", switches="disable_detokenize"),
    *_flags("the engine is measured as `LLM` runs it", switches="async_engine"),
)  # fmt: skip
TABLE: Mapping[str, VllmFlag] = {flag.name: flag for flag in (*_ENGINE, *_SERVER)}
BENCH_TABLE: Mapping[str, VllmFlag] = {flag.name: flag for flag in _BENCH}
"""Flags of vLLM's benchmarks alone."""
BENCH_DATASETS: Mapping[str, str] = dict.fromkeys(
    ("hf", "sonnet", "burstgpt", "random-rerank", "custom_audio", "custom_image", "spec_bench", "speed_bench", "timed_trace"),
    _NO_DATASET,
)
"""Why datasets of vLLM's benchmarks are refused."""


SECRETS = frozenset({"hf_token"})
"""Flags whose values no message shows."""


def translated(name: str, value: Any, how: str | None = None, table: Mapping[str, VllmFlag] = TABLE) -> dict[str, Any]:
    """The options of ours that a flag of the table sets: usually none, and a line of the log.

    `how` it was written, for messages; default: as a keyword. Raises ConfigError for what is refused.
    """
    flag, how = table[name], how or (name if name in SECRETS else f"{name}={value!r}")
    if value is None:
        return {}
    if flag.option is not None:
        return _set_by(flag, value, how)
    if _asks_for_nothing(value):
        return {}
    if not _is_harmless(flag, value):
        allowed = " or ".join(str(entry) for entry in flag.harmless if not isinstance(entry, bool))
        raise ConfigError(f"{how} is refused{f' (only {allowed} is taken)' if allowed else ''}: {flag.text}")
    tell = info_once if flag.harmless or flag.harmless_keys else warn_once
    tell(f"{how} changes nothing here: {flag.text}")
    return {}


def as_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keywords of vLLM's constructors to engine options; keep unknown ones. Raises ConfigError for refused ones."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in TABLE:
            continue
        if name in TAKEN_BY_SERVER:
            if not _asks_for_nothing(value):
                warn_once(f"{name}={value!r} changes nothing here: it is for clients of `jaxllm serve`")
        else:
            try:
                found[name] = as_here(name, value)
            except ValueError as error:
                raise ConfigError(f"{name}: {error}") from None
            tell(name, value)
    for name, value in options.items():
        if name in TABLE:
            add_translated(found, translated(name, value))
    return found


def add_translated(found: dict[str, Any], translation: Mapping[str, Any]) -> None:
    """Add what `translated` returns to options of ours, which win; of objects, each key of theirs."""
    for name, value in translation.items():
        own = found.get(name)
        if isinstance(value, Mapping) and (own is None or isinstance(own, Mapping)):
            found[name] = {**(own or {}), **value, **(own or {})}
        else:
            found.setdefault(name, value)


def _set_by(flag: VllmFlag, value: Any, how: str) -> dict[str, Any]:
    assert flag.option is not None
    if flag.key is not None:
        return {flag.option: {flag.key: value}}
    if not flag.words:
        return {flag.option: value}
    if value not in flag.words:
        raise ConfigError(f"{how} is refused: {flag.name} can only be {', '.join(flag.words)}; {flag.text}")
    word = flag.words[value]
    return {} if word is None else {flag.option: word}


def _is_harmless(flag: VllmFlag, value: Any) -> bool:
    if not flag.refused:
        return True
    if flag.harmless_keys and isinstance(value, Mapping):
        return all(key in flag.harmless_keys or _asks_for_nothing(entry) for key, entry in value.items())
    return not isinstance(value, Mapping) and any(value == entry and type(value) is type(entry) for entry in flag.harmless)


def _asks_for_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, tuple, dict, set, frozenset)) and not value)
