"""vLLM's environment variables, once: which are honoured, which need nothing here, and which have no effect, with the reason.

Commands, `LLM(...)`, `EngineArgs(...)` and docs/VLLM_ENVIRONMENT.md derive from `TABLE`. A variable is the weakest way to set an
option: command line, $JAXLLM_…, keywords and config files win. Names are those of vLLM 0.33, and older ones that scripts still
use (OLDER).
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm import env
from jaxllm.config import flags
from jaxllm.errors import ConfigError
from jaxllm.flag_arguments import spelling
from jaxllm.log import info_once, warn_once

PREFIX = "VLLM_"
PAGE = "docs/VLLM_ENVIRONMENT.md"


@dataclass(frozen=True)
class VllmVariable:
    """An environment variable of vLLM."""

    name: str
    text: str
    """Meaning of its value, why nothing needs to be done, or what to do instead."""
    option: str | None = None
    """The option of ours that it sets."""
    read: Callable[[str], Any] = str
    """From its text to the value of that option. Raises ValueError that says what is taken."""
    own: str | None = None
    """The variable of ours that wins, or, without an option, that it stands for."""
    needs: str | None = None
    """The option without which it has no effect."""
    is_harmless: bool = False
    """Whether its effect is not needed here."""
    unless: tuple[str, ...] = ()
    """Values, in lower case, that ask for nothing, where it has no effect."""

    @property
    def is_honoured(self) -> bool:
        """Whether it sets something."""
        return self.option is not None or self.own is not None

    @property
    def is_secret(self) -> bool:
        """Whether its value must not be shown."""
        return self.name.endswith("_KEY")


def _switch(text: str) -> bool:
    if (word := text.strip().lower()) not in ("1", "0", "true", "false"):
        raise ValueError("1 or 0")
    return word in ("1", "true")


def _no_switch(text: str) -> bool:
    return not _switch(text)


def _whole(low: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise ValueError(f"a whole number, at least {low}")
        return value

    return read


def _mebibytes(text: str) -> int:
    return _whole(1)(text) << 20


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("a number of seconds above 0")
    return value


def _key(text: str) -> list[str]:
    if not (text.isascii() and text.isprintable()):
        raise ValueError("ASCII")
    return [text]


def _directory(text: str) -> str:
    if not os.path.isdir(text):
        raise ValueError("a directory")
    return text


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(_whole(1)(part) for part in text.split(","))
    except ValueError:
        raise ValueError("the layers of each stage, such as 15,17") from None


_HONOURED = (
    VllmVariable("VLLM_API_KEY", "key that clients must send", "api_key", _key, own=env.API_KEY),
    VllmVariable("VLLM_SERVER_DEV_MODE", "1 or 0", "enable_dev_endpoints", _switch),
    VllmVariable("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1 or 0", "allow_runtime_lora_updating", _switch, needs="enable_lora"),
    VllmVariable("VLLM_LORA_RESOLVER_CACHE_DIR", "directory of adapters", "lora_dir", _directory, needs="enable_lora"),
    VllmVariable(
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1 or 0", "kv_events_use_int_block_hashes", _switch, needs="kv_events_config"
    ),
    VllmVariable("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "seconds", "step_timeout", _seconds),
    VllmVariable("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH", "1 or 0", "keep_alive_on_engine_death", _switch),
    VllmVariable("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "seconds", "timeout_keep_alive", _whole(1)),
    VllmVariable("VLLM_HTTP_MAX_REQUEST_BODY_SIZE", "bytes, at least 1024", "max_request_body_bytes", _whole(1024)),
    VllmVariable("VLLM_MAX_N_SEQUENCES", "number", "max_n", _whole(1)),
    VllmVariable("VLLM_MAX_COMPLETION_PROMPTS", "number", "max_prompts_per_request", _whole(1)),
    VllmVariable("VLLM_MAX_STOP_STRINGS", "number", "max_stop_strings", _whole(1)),
    VllmVariable("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "seconds, above 0", "chat_template_timeout", _seconds),
    VllmVariable("VLLM_IMAGE_FETCH_TIMEOUT", "seconds, above 0", "mm_fetch_timeout", _seconds),
    VllmVariable("VLLM_MAX_IMAGE_PIXELS", "number", "mm_max_image_pixels", _whole(1)),
    VllmVariable("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", "MiB", "mm_max_image_bytes", _mebibytes),
    VllmVariable("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1 or 0", "allow_long_max_model_len", _switch),
    VllmVariable("VLLM_PP_LAYER_PARTITION", "layers of each stage, such as 15,17", "pipeline_parallel_layers", _layers),
    VllmVariable("VLLM_DISABLE_COMPILE_CACHE", "1 (off) or 0", "compilation_cache", _no_switch),
    VllmVariable("VLLM_TORCH_PROFILER_DIR", "directory of traces", "profiler_dir"),
    VllmVariable(env.VLLM_LOG_LEVEL, "as there; critical is error", own=env.LOG_LEVEL),
    VllmVariable(env.VLLM_CACHE_ROOT, "directory, of which the folder jaxllm is used", own=env.CACHE_DIR),
)


def _harmless(text: str, names: str) -> Iterator[VllmVariable]:
    """Variables whose effect is not needed here."""
    yield from (VllmVariable(PREFIX + name, text, is_harmless=True) for name in names.split())


def _missing(text: str, names: str, unless: str = "0 false") -> Iterator[VllmVariable]:
    """Variables without effect, about which a warning says what to do instead."""
    yield from (VllmVariable(PREFIX + name, text, unless=tuple(unless.split())) for name in names.split())


_KERNELS = "kernels are chosen for the GPU and the model and checked at the start; --attention-implementation names one"
_OFF = "weights are not moved off the device, and caches are passed between servers in one way (--kv-role)"
_HARMLESS = (
    *_harmless(_KERNELS, """
        ATTENTION_BACKEND FLASH_ATTN_VERSION USE_TRITON_FLASH_ATTN USE_TRTLLM_ATTENTION USE_CUDNN_PREFILL DISABLE_FLASHINFER_PREFILL
        MLA_DISABLE KV_CACHE_LAYOUT SSM_CONV_STATE_LAYOUT GDN_DECODE_KERNEL ENABLE_FLA_PACKED_RECURRENT_DECODE TRITON_USE_TD
        DISABLED_KERNELS USE_HW_AGNOSTIC USE_OINK_OPS ENABLE_HPC_OPS HAS_FLASHINFER_CUBIN TUNED_CONFIG_FOLDER FLOAT32_MATMUL_PRECISION
        USE_DEEP_GEMM MOE_USE_DEEP_GEMM USE_DEEP_GEMM_E8M0 USE_DEEP_GEMM_TMA_ALIGNED_SCALES DEEP_GEMM_WARMUP USE_TRITON_AWQ
        MARLIN_USE_ATOMIC_ADD MARLIN_INPUT_DTYPE HUMMING_ONLINE_QUANT_CONFIG HUMMING_INPUT_QUANT_CONFIG HUMMING_USE_F16_ACCUM
        HUMMING_MOE_GEMM_TYPE BLOCKSCALE_FP8_GEMM_FLASHINFER MXFP4_EMULATION_DEQUANT_AT_LOAD MXFP8_EMULATION_DEQUANT_AT_LOAD
        USE_FLASHINFER_SAMPLER USE_FLASHINFER_MOE_INT4 USE_FLASHINFER_MOE_FP4 USE_FLASHINFER_MOE_FP8 USE_FLASHINFER_MOE_FP16
        USE_FLASHINFER_MOE_MXFP4_BF16 USE_FLASHINFER_MOE_MXFP4_MXFP8 USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS FLASHINFER_MOE_BACKEND
        FLASHINFER_AUTOTUNE_CACHE_DIR FLASHINFER_AUTOTUNE_SKIP_OPS FLASHINFER_WORKSPACE_BUFFER_SIZE
        FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE B12X_MOE_FP4_FORCE_A16 USE_B12X_FP8_GEMM USE_B12X_MHC USE_B12X_MOE
        USE_B12X_SPARSE_INDEXER USE_B12X_WO_PROJECTION MINIMAX_M3_MSA_CUTLASS_MIN_BATCH SPARSE_INDEXER_MAX_LOGITS_MB
        USE_FUSED_MOE_GROUPED_TOPK MOE_SKIP_PADDING FUSED_MOE_CHUNK_SIZE ENABLE_FUSED_MOE_ACTIVATION_CHUNKING
        MAX_TOKENS_PER_EXPERT_FP4_MOE KIMI_K3_AUX_ATTN_RES_STREAM KIMI_K3_GEMM_AR KIMI_K3_SHARD_SP_SHARED_EXPERT
        STEP5_SHARD_SP_SHARED_EXPERT ENABLE_GEMM_RS DISABLE_SHARED_EXPERTS_STREAM DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION
        SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD MULTI_STREAM_GEMM_TOKEN_THRESHOLD COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD
        LORA_DISABLE_PDL LORA_ENABLE_DUAL_STREAM REPLICATE_EMBED TRITON_FORCE_FIRST_CONFIG TRITON_JIT_WARMUP_NUM_THREADS
        ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN MEMORY_PROFILE_INCLUDE_ATTN
        MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"""),
    *_harmless("sums and exchanges between GPUs run in kernels that are checked at the start, and through NCCL", """
        ALLREDUCE_USE_FLASHINFER ALLREDUCE_USE_FLASHINFER_PCIE_IPC ALLREDUCE_USE_SYMM_MEM FLASHINFER_ALLREDUCE_BACKEND
        CUSTOM_ALLREDUCE_ALGO USE_NCCL_SYMM_MEM NCCL_INCLUDE_PATH DISABLE_PYNCCL SKIP_P2P_CHECK DISTRIBUTED_USE_SPLIT_GROUP
        ALL2ALL_BACKEND DEEPEPLL_NVFP4_DISPATCH DEEPEP_BUFFER_SIZE_MB DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
        DEEPEP_LOW_LATENCY_USE_MNNVL DEEPEP_V2_ALLOW_HYBRID_MODE DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION DEEPEP_V2_PREFER_OVERLAP
        DBO_COMM_SMS DCP_Q_REPLICATE USE_DIRECT_DCP_A2A USE_DIRECT_DCP_KV_GATHER USE_DIRECT_DCP_Q_GATHER GPU_NIC_PCIE_MAPPING
        NIC_SELECTION_VARS RANDOMIZE_DP_DUMMY_INPUTS"""),
    *_harmless("XLA compiles every step; --warmup says when", """
        USE_AOT_COMPILE FORCE_AOT_LOAD USE_MEGA_AOT_ARTIFACT USE_BYTECODE_HOOK USE_STANDALONE_COMPILE USE_BREAKABLE_CUDAGRAPH
        USE_LAYERNAME ENABLE_PREGRAD_PASSES ENABLE_INDUCTOR_MAX_AUTOTUNE ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING
        ENABLE_CUDAGRAPH_GC COMPILE_CACHE_SAVE_FORMAT ENABLE_STARTUP_PLAN XLA_USE_SPMD"""),
    *_harmless("there is one engine, with its own processes and threads; --api-server-count adds some that speak HTTP", """
        USE_V1 USE_V2_MODEL_RUNNER ENABLE_V1_MULTIPROCESSING WORKER_MULTIPROC_METHOD USE_RUST_FRONTEND USE_RUST_BENCH
        RUST_FRONTEND_PATH USE_RAY_COMPILED_DAG USE_RAY_SPMD_WORKER RPC_BASE_PATH RPC_TIMEOUT ENGINE_READY_TIMEOUT_S
        WORKER_SHUTDOWN_TIMEOUT_SECONDS MQ_MAX_CHUNK_BYTES_MB MSGPACK_ZERO_COPY_THRESHOLD RINGBUFFER_WARNING_INTERVAL
        V1_OUTPUT_PROC_CHUNK_SIZE ALLOW_INSECURE_SERIALIZATION DISABLE_REQUEST_ID_RANDOMIZATION USE_SPINLOOP_EXT USE_FASTOKENS
        PROCESS_NAME_PREFIX OBJECT_STORAGE_SHM_BUFFER_NAME"""),
    *_harmless("the behaviour is fixed, or chosen by the request", """
        COMPUTE_NANS_IN_LOGITS ENABLE_RESPONSES_API_STORE USE_EXPERIMENTAL_PARSER_CONTEXT TOOL_PARSE_REGEX_TIMEOUT_SECONDS
        CHAT_TEMPLATE_FUEL XGRAMMAR_CACHE_MB V1_USE_OUTLINES_CACHE BEAM_ALWAYS_CONSTRAIN_OUTPUT FASTSAFETENSORS_QUEUE_SIZE
        DISABLE_LOG_LOGO LOGGING_COLOR NO_DEPRECATION_WARNING NO_USAGE_STATS DO_NOT_TRACK USAGE_SOURCE USAGE_STATS_SERVER"""),
    *_harmless("--kv-offloading-size keeps caches in host memory in one way, whichever connector is named",
               "KV_OFFLOAD_MAX_BATCH_DESCRIPTORS USE_SIMPLE_KV_OFFLOAD"),
    *_harmless(_OFF, """
        WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
        WEIGHT_OFFLOADING_DISABLE_UVA WSL2_ENABLE_PIN_MEMORY NIXL_SIDE_CHANNEL_HOST NIXL_SIDE_CHANNEL_PORT P2P_SIDE_CHANNEL_HOST
        P2P_SIDE_CHANNEL_PORT P2P_MAX_PEERS P2P_HANDSHAKE_TIMEOUT_S P2P_IDLE_TIMEOUT_S EC_SIDE_CHANNEL_HOST EC_SIDE_CHANNEL_PORT
        MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_BOOTSTRAP_PORT MOONCAKE_CONNECTOR_TIMEOUT MOONCAKE_DISK_STAGING_USABLE_RATIO
        MOONCAKE_LOAD_RECV_THREADS MOONCAKE_STORE_TIER_LOG MORIIO_CONNECTOR_READ_MODE MORIIO_NUM_WORKERS MORIIO_POST_BATCH_SIZE
        MORIIO_QP_PER_TRANSFER MORIIO_TRANSFER_TIMEOUT_S ELASTIC_EP_DRAIN_REQUESTS ELASTIC_EP_SCALE_UP_LAUNCH SNAPSHOT_TIMEOUT_S"""),
    *_harmless("videos are fetched as images are (--mm-fetch-timeout), and files of videos are read with the package av",
               "VIDEO_FETCH_TIMEOUT VIDEO_LOADER_BACKEND"),
    *_harmless("files of audio have limits of their own (--mm-max-audio-bytes, --mm-max-audio-seconds), and none are fetched", """
        AUDIO_FETCH_TIMEOUT MAX_AUDIO_CLIP_FILESIZE_MB MAX_AUDIO_DECODE_BYTES MAX_AUDIO_DECODE_DURATION_S
        MAX_AUDIO_PREPROCESS_WORKERS MAX_EMBED_DECODE_BYTES"""),
    *_harmless("images are fetched once and read in a few threads; what is kept are prepared ones (--mm-processor-cache-gb)", """
        ASSETS_CACHE ASSETS_CACHE_MODEL_CLEAN MEDIA_CACHE MEDIA_CACHE_MAX_SIZE_MB MEDIA_CACHE_TTL_HOURS MEDIA_FETCH_MAX_RETRIES
        MEDIA_LOADING_THREAD_COUNT"""),
    *_missing("images of a request have fixed limits together (docs/IMAGES.md), and each has --mm-max-image-bytes and "
              "--mm-max-image-pixels", "MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB MAX_MEDIA_REQUEST_DECODE_BYTES"),
    *_missing("addresses that images redirect to are checked as they are", "MEDIA_URL_ALLOW_REDIRECTS", unless="1 true"),
    *_missing("images come from data: addresses, --allowed-media-domains and --allowed-local-media-path", "MEDIA_CONNECTOR",
              unless="http"),
    *_harmless("for hardware that is not supported, or threads that XLA manages", """
        ROCM_USE_AITER ROCM_USE_AITER_CUSTOM_AR ROCM_USE_AITER_FP4BMM ROCM_USE_AITER_FP8BMM ROCM_USE_AITER_FUSION_SHARED_EXPERTS
        ROCM_USE_AITER_LINEAR ROCM_USE_AITER_LINEAR_HIPBMM ROCM_USE_AITER_MHA ROCM_USE_AITER_MLA ROCM_USE_AITER_MOE
        ROCM_USE_AITER_MOE_A4W4_DSV4 ROCM_USE_AITER_MOE_SITUV2 ROCM_USE_AITER_MOE_SITUV2_A8W4 ROCM_USE_AITER_RMSNORM
        ROCM_USE_AITER_TRITON_GEMM ROCM_USE_AITER_TRITON_ROPE ROCM_USE_AITER_TRITON_SPARSE_MLA ROCM_USE_AITER_UNIFIED_ATTENTION
        ROCM_AITER_MLA_ASM_PADDING ROCM_AITER_MOE_DISPATCH_POLICY ROCM_FP8_MFMA_PAGE_ATTN ROCM_FP8_PADDING ROCM_MOE_PADDING
        ROCM_MUSE_MOE_ONLINE_QUANT ROCM_MUSE_MOE_REDUCE_DTYPE ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
        ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB ROCM_QUICK_REDUCE_QUANTIZATION
        ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB ROCM_SHUFFLE_KV_CACHE_LAYOUT ROCM_SLEEP_MEM_CHUNK_SIZE ROCM_USE_SKINNY_GEMM
        XPU_FORCE_N_CONTIG_WEIGHT XPU_INC_WNA16_BACKEND XPU_PP_MICROBATCH XPU_USE_SAMPLER_KERNEL TPU_USING_PATHWAYS
        CPU_ATTN_SPLIT_KV CPU_CI_ENV CPU_INT4_W4A8 CPU_MOE_PREPACK CPU_NUM_OF_RESERVED_CPU CPU_OMP_THREADS_BIND CPU_SIM_MULTI_NUMA
        ZENTORCH_WEIGHT_PREPACK"""),
    *_harmless("for the installation of vLLM", """
        BUILD_COMMIT BUILD_PIPELINE BUILD_URL IMAGE_TAG CONFIG_ROOT DOCKER_BUILD_CONTEXT MAIN_CUDA_VERSION PRECOMPILED_WHEEL_LOCATION
        SKIP_PRECOMPILED_VERSION_SUFFIX SKIP_VERSION_SUFFIX USE_PRECOMPILED USE_PRECOMPILED_RUST VERSION"""),
)  # fmt: skip
_MISSING = (
    # Models
    *_missing("models come from the Hugging Face hub; download the model and give its directory", "USE_MODELSCOPE"),
    *_missing("give the model's directory itself", "MODEL_REDIRECT_PATH"),
    *_missing("adapters are not fetched from the hub by name; download them into the directory of --lora-dir",
              "LORA_RESOLVER_HF_REPO_LIST"),
    *_missing("plugins of vLLM are not loaded; docs/HOW_TO_ADD.md says how to add a model family", "PLUGINS",
              unless="lora_filesystem_resolver"),
    *_missing("set --load-format", "TEST_FORCE_LOAD_FORMAT"),
    *_missing("experts are those that the model chooses", "MOE_ROUTING_SIMULATION_STRATEGY"),
    *_missing("the last bits of an answer may depend on the other requests of its batch", "BATCH_INVARIANT"),
    # Devices and hosts
    *_missing("set $JAX_PLATFORMS", "TARGET_DEVICE", unless="cuda cpu"),
    *_missing("set --kv-cache-memory-bytes", "CPU_KVCACHE_SPACE"),
    *_missing("JAX's wheels bring these libraries; $LD_LIBRARY_PATH names other directories",
              "NCCL_SO_PATH CUDART_SO_PATH CUDA_COMPATIBILITY_PATH ENABLE_CUDA_COMPATIBILITY"),
    *_missing("set --nnodes, --node-rank, --master-addr and --master-port", "HOST_IP LOOPBACK_IP PORT DP_MASTER_IP DP_MASTER_PORT"),
    *_missing("set --data-parallel-size, and --node-rank on several hosts", "DP_RANK DP_RANK_LOCAL DP_SIZE"),
    *_missing("--distributed-executor-backend ray starts an actor on each host, with this environment",
              "RAY_BUNDLE_INDICES RAY_DP_PACK_STRATEGY RAY_DP_PLACEMENT_NODE_IPS RAY_EXTRA_ENV_VARS_TO_COPY "
              "RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY RAY_PER_WORKER_GPUS"),
    *_missing("set --step-timeout", "ENGINE_ITERATION_TIMEOUT_S"),
    # Requests
    *_missing("a request names the model, or an adapter; --served-model-name gives the model more names",
              "SKIP_MODEL_NAME_VALIDATION"),
    *_missing("a tool's own `strict` says whether its calls are constrained", "ENFORCE_STRICT_TOOL_CALLING", unless="1 true"),
    *_missing("a request with NaN ends alone with an error; the metric corrupted_requests counts them", "RAISE_ON_LOGIT_NANS"),
    *_missing("these limits are fixed", "MAX_NUM_BAD_WORDS MAX_BAD_WORDS_TOTAL_TOKENS REGEX_COMPILATION_TIMEOUT_S"),
    *_missing("there is no API in Cohere's form", "ENABLE_COHERE_API"),
    *_missing("the server runs no tools", "GPT_OSS_SYSTEM_TOOL_MCP_LABELS TOOL_JSON_ERROR_AUTOMATIC_RETRY"),
    *_missing("the chat template writes the system prompt; --default-chat-template-kwargs sets what it reads",
              "GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS SYSTEM_START_DATE"),
    # Logs and debugging
    *_missing("the log goes to stderr; --log-format and $JAXLLM_LOG_LEVEL say how",
              "CONFIGURE_LOGGING LOGGING_CONFIG_PATH LOGGING_PREFIX LOGGING_STREAM", unless="1 ext://sys.stderr"),
    *_missing("the log has a line of statistics every 10 seconds, or none with --disable-log-stats", "LOG_STATS_INTERVAL",
              unless="10 10. 10.0"),
    *_missing("--enable-log-requests logs requests; outputs are never logged",
              "DEBUG_LOG_API_SERVER_RESPONSE REQUEST_BODY_LOG_LEVEL", unless="0 false debug"),
    *_missing("-v logs more; --profiler-dir records traces; docs/METRICS.md lists what is measured",
              "TRACE_FUNCTION PATTERN_MATCH_DEBUG DEBUG_DUMP_PATH DEBUG_WORKSPACE DEBUG_MFU_METRICS GC_DEBUG GPU_SYNC_CHECK "
              "LOG_MODEL_INSPECTION LOG_BATCHSIZE_INTERVAL CUSTOM_SCOPES_FOR_PROFILING NVTX_SCOPES_FOR_PROFILING "
              "XLA_CHECK_RECOMPILATION", unless="0 false -1"),
    *_missing("set $JAXLLM_CACHE_DIR", "XLA_CACHE_PATH"),
)  # fmt: skip
TABLE: Mapping[str, VllmVariable] = {variable.name: variable for variable in (*_HONOURED, *_HARMLESS, *_MISSING)}
_OLDER = """
    ATTENTION_BACKEND FLASH_ATTN_VERSION USE_TRITON_FLASH_ATTN USE_TRTLLM_ATTENTION USE_CUDNN_PREFILL DISABLE_FLASHINFER_PREFILL
    USE_FLASHINFER_MOE_FP4 USE_FLASHINFER_MOE_FP8 USE_FLASHINFER_MOE_FP16 USE_FLASHINFER_MOE_MXFP4_BF16
    USE_FLASHINFER_MOE_MXFP4_MXFP8 USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS FLASHINFER_MOE_BACKEND USE_B12X_FP8_GEMM USE_B12X_MHC
    USE_B12X_MOE USE_B12X_SPARSE_INDEXER USE_B12X_WO_PROJECTION FUSED_MOE_CHUNK_SIZE ENABLE_FUSED_MOE_ACTIVATION_CHUNKING
    MEMORY_PROFILE_INCLUDE_ATTN ALL2ALL_BACKEND USE_V1 USE_RAY_COMPILED_DAG USE_RAY_SPMD_WORKER RPC_TIMEOUT ENGINE_ITERATION_TIMEOUT_S
    NO_DEPRECATION_WARNING ROCM_USE_AITER_MOE_SITUV2_A8W4 TORCH_PROFILER_DIR VERSION
"""
OLDER = frozenset(PREFIX + name for name in _OLDER.split())
"""Names that vLLM had before 0.33, or that its scripts set."""

_BY_OPTION = {variable.option: variable for variable in _HONOURED if variable.option is not None}
_OF_KUBERNETES = re.compile(r"VLLM_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
"""Variables that Kubernetes sets in each pod for a service whose name begins with vllm."""


def found_for(option: str, environment: Mapping[str, str]) -> tuple[VllmVariable, Any] | None:
    """The variable that sets an option of ours, with its value. Raises ConfigError for a value that the option does not take."""
    variable = _BY_OPTION.get(option)
    if variable is None or not (text := environment.get(variable.name)) or (variable.own and environment.get(variable.own)):
        return None
    try:
        return variable, variable.read(text)
    except ValueError as error:
        shown = "not usable" if variable.is_secret else f"{text!r}"
        raise ConfigError(
            f"environment variable {variable.name} is {shown}; as {spelling(option)} it must be {error}"
        ) from None


def tell_taken(variable: VllmVariable) -> None:
    """Log which option a variable has become."""
    assert variable.option is not None
    info_once(f"environment variable {variable.name} is taken as {spelling(variable.option)}")


def tell_unused(variable: VllmVariable, reason: str) -> None:
    """Log why a variable that is honoured otherwise has no effect."""
    info_once(f"environment variable {variable.name} has no effect: {reason}")


def with_engine_variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's options as a program gives them, and those that only vLLM's variables set. Logs what becomes of all variables."""
    found = with_variables(given, (flag.name for flag in flags()), os.environ)
    report(os.environ)
    return found


def with_variables(given: Mapping[str, Any], options: Iterable[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The given options, and those of `options` that only vLLM's variables set. Logs what becomes of these."""
    found = dict(given)
    for option in options:
        if (setting := found_for(option, environment)) is None:
            continue
        variable, value = setting
        if option in given:
            tell_unused(variable, f"{option} is given")
        elif variable.needs and not given.get(variable.needs):
            tell_unused(variable, f"it needs {variable.needs}")
        else:
            tell_taken(variable)
            found[option] = value
    return found


def report(environment: Mapping[str, str]) -> None:
    """Log which of vLLM's variables stand for one of ours, need nothing, or have no effect; the two latter once in a process."""
    harmless, unknown = [], []
    for name, text in sorted(environment.items()):
        if not name.startswith(PREFIX) or not text or _OF_KUBERNETES.fullmatch(name) or re.match(r"(tcp|udp|sctp)://", text):
            continue
        variable = TABLE.get(name)
        if variable is None:
            unknown.append(name)
        elif variable.is_harmless:
            harmless.append(name)
        elif variable.is_honoured:
            if environment.get(str(variable.own)):
                tell_unused(variable, f"${variable.own} is set")
            elif variable.option is None:
                info_once(f"environment variable {name} is taken as ${variable.own}")
        elif text.strip().lower() not in variable.unless:
            warn_once(f"environment variable {name} has no effect here: {variable.text}")
    if harmless:
        info_once(f"nothing to do for the environment variables {', '.join(harmless)} ({PAGE})")
    if unknown:
        warn_once(f"no variables of vLLM 0.33, and without effect: {', '.join(unknown)}")
