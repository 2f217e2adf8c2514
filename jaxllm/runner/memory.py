"""How much memory a model needs and how many KV-cache blocks that leaves. Estimates before loading, exact after compiling."""

import importlib.util
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm import address_space, gpus
from jaxllm.cache_spec import CacheLayout, RowState, cache_layout, cache_specs
from jaxllm.config import AUTO_MODEL_LEN, EngineConfig
from jaxllm.errors import OutOfMemoryError
from jaxllm.kernel_policy import KernelPolicy, platform_policy
from jaxllm.layers import build
from jaxllm.layers.build import Widened
from jaxllm.model_config import ModelConfig, check_max_model_len
from jaxllm.parallel.topology import ONE_DEVICE, Topology
from jaxllm.runner.drafter import Drafter
from pallas_kernels import sparse_attention
from pallas_kernels.collectives import WORKSPACE_BYTES

COLLECTIVE_BYTES = 1536 << 20
"""Memory that NCCL uses on each device outside JAX's pool: 1.1 GiB on each of two H200s (measured), plus a margin."""

CONTEXT_BYTES = 512 << 20
"""Memory that CUDA uses on each GPU that JAX finds before any program runs, even if the engine does not use the GPU."""

PATIENCE_SECONDS = 3.0
"""How long a process that has just ended may still hold GPU memory."""

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_NEWER_FRACTION = "XLA_CLIENT_MEM_FRACTION"
"""JAX refuses to start if both are set."""

_CPU_CACHE_BYTES = 2 << 30
_CPU_CACHE_FRACTION = 0.25
"""Most of a cache on a CPU by default, and the fraction of the machine's memory, which other programs use too. One request of the longest
length may have more than the former, not more than the latter."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device."""

    device: str
    limit_bytes: int
    """Total memory that the engine may use."""
    weight_bytes: int
    work_bytes: int
    """Temporary arrays of the largest step."""
    cache: CacheLayout
    num_blocks: int
    max_model_len: int
    sized_by: str | None = None
    """The option that set the size of the cache, if it was not the device's memory."""
    collective_bytes: int = 0
    """Memory of collectives, in addition to `limit_bytes`."""
    num_devices: int = 1
    on_gpu: bool = True
    num_rows: int = 0
    """Rows of the states that layers keep by row: that of padding included."""
    num_queries: int = 1
    """Most tokens of a row in a decode: 1, and its drafts."""
    num_ranks: int = 1
    """Data-parallel ranks: groups of `num_devices` devices, each with its own cache."""
    is_cut: bool = False
    """Whether the cache is smaller by default than the requests that may run at once can use."""

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def block_bytes(self) -> int:
        return self.cache.block_bytes // self.num_devices

    @property
    def cache_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all rows, on one device."""
        return self.num_rows * self.cache.row_bytes // self.num_devices

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the cache holds, in requests of max_model_len."""
        # Block 0 is the null block.
        num_usable, num_rounded = max(0, self.num_blocks - 1), -(-self.max_model_len // self.block_size) * self.block_size
        return num_usable * num_rounded // self.cache.num_blocks_for(self.max_model_len)

    def describe(self) -> str:
        """The plan in a few lines for people."""
        beside = f", {_size(self.collective_bytes)} beside it for collectives" if self.collective_bytes else ""
        num_devices = self.num_devices * self.num_ranks
        each = f", the same on each of {num_devices} devices" if num_devices > 1 else ""
        ranks = f" in each of {self.num_ranks} data-parallel ranks" if self.num_ranks > 1 else ""
        more = "; --kv-cache-memory-bytes makes it larger" if self.is_cut else ""
        cache = (
            f"  KV cache  {_size(self.cache_bytes)}: {self.num_blocks} blocks of {self.block_size} tokens, "
            f"{self.num_cache_tokens} tokens, {self.num_cache_tokens / self.max_model_len:.1f} requests "
            f"of {self.max_model_len} tokens at once{ranks}{more}"
        )
        states = f"  states    {_size(self.state_bytes)} ({self.num_rows} rows)"
        return "\n".join(
            [
                f"memory plan for {self.device}{each}: {_size(self.limit_bytes)} to use{beside}",
                f"  weights   {_size(self.weight_bytes)}",
                f"  work      {_size(self.work_bytes)} (largest step)",
                *([states] if self.state_bytes else []),
                cache if self.block_bytes else "  KV cache  none",
            ]
        )

    def check(self) -> None:
        """Reject weights and a cache that exceed the device's memory, and a cache too small for one request of max_model_len.

        Raises OutOfMemoryError with the numbers.
        """
        self._check_limit()
        needed = self.cache.num_blocks_for(self.max_model_len)
        usable = max(0, self.num_blocks - 1)
        if usable >= needed:
            return
        if usable == 0 and self.sized_by is None:
            raise OutOfMemoryError(
                f"no memory is left for the KV cache: {self.device} has {_size(self.limit_bytes)} for the engine, weights take "
                f"{_size(self.weight_bytes)}{self._and_states()} and the largest step {_size(self.work_bytes)}; "
                f"lower --max-num-seqs or --max-num-batched-tokens, {self._ways_out()}"
            )
        # Block 0 is the null block, so one more is needed than a request has.
        enough = {
            "num_gpu_blocks_override": f"--num-gpu-blocks-override {needed + 1} or more",
            "kv_cache_memory_bytes": f"--kv-cache-memory-bytes {(needed + 1) * self.block_bytes} or more",
            None: f"more memory ({'a lower --max-num-seqs, --gpu-memory-utilization, ' * self.on_gpu}--kv-cache-memory-bytes)",
        }[self.sized_by]
        longest = self.cache.max_tokens(usable)
        shorter = f", or use --max-model-len {longest} or less (-1: the largest that fits)" if longest else ""
        raise OutOfMemoryError(
            f"the KV cache is too small for one request of max_model_len {self.max_model_len}: it needs {needed} blocks of "
            f"{self.block_size} tokens ({_size(needed * self.block_bytes)}), {usable} are there besides the null block "
            f"({_size(usable * self.block_bytes)}); give it {enough}{shorter}"
        )

    def _check_limit(self) -> None:
        if self.weight_bytes > self.limit_bytes:
            raise OutOfMemoryError(
                f"the weights take {_size(self.weight_bytes)}{self._on_each()}, {self.device} has {_size(self.limit_bytes)} "
                f"for the engine; {self._ways_out()}"
            )
        left = self.limit_bytes - self.weight_bytes - self.state_bytes
        if left < 0:
            raise OutOfMemoryError(
                f"weights take {_size(self.weight_bytes)} and the states of {self.num_rows} rows {_size(self.state_bytes)}"
                f"{self._on_each()}, {self.device} has {_size(self.limit_bytes)} for the engine; lower --max-num-seqs, {self._ways_out()}"
            )
        if self.sized_by is not None and self.cache_bytes > left:
            enough = {
                "num_gpu_blocks_override": f"--num-gpu-blocks-override {left // self.block_bytes}",
                "kv_cache_memory_bytes": f"--kv-cache-memory-bytes {left}",
            }[self.sized_by]
            raise OutOfMemoryError(
                f"weights take {_size(self.weight_bytes)}{self._and_states()} and the KV cache {_size(self.cache_bytes)}{self._on_each()}, "
                f"{self.device} has {_size(self.limit_bytes)} for the engine; use {enough} or less"
            )

    def _and_states(self) -> str:
        return f", the states of {self.num_rows} rows {_size(self.state_bytes)}" if self.state_bytes else ""

    def _on_each(self) -> str:
        num_devices = self.num_devices * self.num_ranks
        return f" on each of {num_devices} devices" if num_devices > 1 else ""

    def _ways_out(self) -> str:
        """How to make the weights fit."""
        more = "raise --gpu-memory-utilization or --tensor-parallel-size" if self.on_gpu else "use a machine with more memory"
        return f"{more}, or use a smaller model or narrower weights (--dtype bfloat16, --quantization fp8)"


def usable_bytes(config: EngineConfig, device_bytes: int) -> int:
    """Bytes that the engine may use on a GPU with `device_bytes`: its share, minus the memory of collectives."""
    return int(config.cache.gpu_memory_utilization * device_bytes) - _collective_bytes(Topology.of(config.parallel))


def memory_plan(
    config: EngineConfig,
    model: ModelConfig,
    *,
    weight_bytes: int | None = None,
    work_bytes: int | None = None,
    device_bytes: int | None = None,
    drafter: Drafter | None = None,
    layers: range | None = None,
    policy: KernelPolicy | None = None,
    widened: Widened | None = None,
) -> MemoryPlan:
    """The plan for a config with platform defaults resolved. Known byte counts replace the estimates.

    drafter: its layers get caches behind the model's; weight_bytes counts its weights and states.
    layers: plan one stage of a pipeline, whose weights weight_bytes counts.
    device_bytes: plan for GPUs with so much memory instead of for this machine's devices.
    policy: None for the platform's. widened: as `estimate_work_bytes` takes it.
    """
    topology = Topology.of(config.parallel)
    on_gpu = device_bytes is not None or jax.default_backend() != "cpu"
    if device_bytes is None:
        device, limit = device_limit(topology.num_devices)
    else:
        device, limit = f"a GPU of {_size(device_bytes)}", usable_bytes(config, device_bytes)
    if weight_bytes is None:
        weight_bytes = build.weight_bytes(model) // topology.tensor  # devices that split tokens have all weights
    num_queries, num_features = (1, 0) if drafter is None else (1 + drafter.num_drafts, len(drafter.feature_layers))
    if work_bytes is None:
        policy = policy or platform_policy(on_gpu=on_gpu)
        work_bytes = estimate_work_bytes(config, model, policy, width=num_queries, num_features=num_features, widened=widened)
    cache = whole_cache(config, model, drafter)
    if layers is not None:
        cache = cache.of_layers(layers)
    block_size, block_bytes = cache.block_size, cache.block_bytes // topology.stage_devices
    wanted_len = config.model.max_model_len
    max_len = model.max_position if wanted_len in (None, AUTO_MODEL_LEN) else wanted_len
    assert max_len is not None and config.scheduler.max_num_seqs is not None
    num_rows = config.scheduler.max_num_seqs + 1
    state_bytes = num_rows * cache.row_bytes // topology.tensor
    check_max_model_len(model, max_len, may_be_long=config.model.allow_long_max_model_len)
    # Blocks that have left a window can still be found in the prefix cache.
    useful = config.scheduler.max_num_seqs * len(cache.groups) * -(-max_len // block_size) + 1
    sized_by, is_cut = None, False
    if config.cache.num_gpu_blocks_override is not None:
        sized_by = "num_gpu_blocks_override"
        num_blocks = config.cache.num_gpu_blocks_override
    else:
        if config.cache.kv_cache_memory_bytes is not None:
            sized_by = "kv_cache_memory_bytes"
            cache_bytes = config.cache.kv_cache_memory_bytes
        elif not on_gpu:
            longest_bytes = (cache.num_blocks_for(max_len) + 1) * block_bytes
            most = min(max(_CPU_CACHE_BYTES, longest_bytes), int(limit * _CPU_CACHE_FRACTION))
            cache_bytes = min(most, limit - weight_bytes - work_bytes - state_bytes)
        else:
            cache_bytes = limit - weight_bytes - work_bytes - state_bytes - _other_bytes(topology)
            if config.compile.warmup != "all":
                is_timed = drafter is not None or widened is None or not widened.head_in_tiles
                cache_bytes -= tuning_bytes(config, model, has_head=is_timed)
        # The cache is indexed by 32-bit slots.
        num_affordable = max(0, cache_bytes // block_bytes) if block_bytes else useful  # a stage may have no layer with blocks
        is_cut = not on_gpu and sized_by is None and num_affordable < useful
        num_blocks = min(num_affordable, useful, (2**31 - 1) // (block_size * cache.layers_per_block))
        for array in cache.arrays:
            values_per_block = array.num_heads // topology.tensor * (block_size // topology.context) * array.width
            num_blocks = countable_blocks(num_blocks, values_per_block, jnp.dtype(array.dtype).itemsize)
    if wanted_len == AUTO_MODEL_LEN:
        max_len = max(1, min(max_len, cache.max_tokens(num_blocks - 1)))
    return MemoryPlan(
        device,
        limit,
        weight_bytes,
        work_bytes,
        cache,
        num_blocks,
        max_len,
        sized_by,
        _collective_bytes(topology) if on_gpu else 0,
        topology.stage_devices,
        on_gpu,
        num_rows,
        num_queries,
        topology.data,
        is_cut,
    )


def whole_cache(config: EngineConfig, model: ModelConfig, drafter: Drafter | None = None) -> CacheLayout:
    """The cache of all layers of a model, and behind them those of a drafter, whichever stages they are in."""
    of_drafter, num_drafts = ((), 0) if drafter is None else (drafter.cache_specs, drafter.num_drafts)
    specs = cache_specs(model, disable_windows=config.cache.disable_hybrid_kv_cache_manager, num_drafts=num_drafts)
    return cache_layout(
        (*specs, *of_drafter),
        block_size=config.block_tokens,
        max_step_tokens=config.scheduler.max_step_tokens,
    )


def countable_blocks(num_blocks: int, values_per_block: int, itemsize: int) -> int:
    """So many blocks, or fewer if kernels could not address the keys of a layer.

    Pallas-Triton counts an array's values in 32 bits, with a sign, up to 2**32 bytes and in 64 bits beyond: between, single bytes are
    too many to count.
    """
    num_values = num_blocks * values_per_block
    if num_values > 2**31 and num_values * itemsize <= 2**32:
        return 2**31 // values_per_block
    return num_blocks


def estimate_work_bytes(
    config: EngineConfig,
    model: ModelConfig,
    policy: KernelPolicy,
    *,
    width: int = 1,
    num_features: int = 0,
    widened: Widened | None = None,
) -> int:
    """Temporary memory of the largest step, a little too much rather than too little.

    width: most tokens that a row samples. num_features: hidden states of each token that a drafter takes. widened: the weights that
    products make whole, if kernels do what they are chosen for; None: all that may be.
    """
    scheduler, topology = config.scheduler, Topology.of(config.parallel)
    size = topology.tensor
    assert scheduler.max_num_seqs is not None
    itemsize = jnp.dtype(model.dtype).itemsize
    widest = _widest(model)
    per_token = widest // size + (6 + 2 * num_features) * model.hidden_size
    has_head = any(format.of_head for format in model.formats)
    widened = widened or Widened(*(model.widens_in_products,) * 2, has_head)
    widened_bytes = 0  # of weights of a layer, which a step with many tokens computes so
    if widened.linears:  # two at a time: XLA may begin with one while another is computed with
        widened_bytes = 2 * widest * model.hidden_size * itemsize // size
    if model.mixtures and (model.has_packed_experts or widened.experts):
        values = max(3 * len(part.slots) * part.width for part in model.mixtures) * model.hidden_size
        widened_bytes = max(widened_bytes, values * itemsize // max(size, topology.expert))
    if widened.head:
        widened_bytes = max(widened_bytes, model.padded_vocab_size * model.hidden_size * itemsize // size)
    max_rows = max(scheduler.max_num_seqs, policy.least_rows)
    sampling = 6 * 4 * max(max_rows, min(max_rows, policy.max_draft_rows) * width) * model.vocab_size
    rows = (spec.bytes_per_row for spec in cache_specs(model) if isinstance(spec, RowState))
    states = 3 * max_rows * max(rows, default=0) // size  # of one layer: gathered, changed and scattered
    num_tokens = scheduler.max_step_tokens
    waiting = entering_bytes(model, num_tokens, topology.stage) + exchange_bytes(model, num_tokens, topology, policy)
    largest = -(-num_tokens // topology.context) * per_token * itemsize
    if topology.context > 1:  # each device attends with all tokens: their projections, and results of all parts
        attended = max(layer.attention.values_per_token for layer in set(model.layers) if layer.attention is not None)
        largest += num_tokens * (2 * attended // size + model.hidden_size) * itemsize
    counts = [part.top_k for part in model.latent_attentions if part.top_k is not None]
    chosen = sparse_attention.work_bytes(num_tokens, max(counts)) if counts else 0
    return int(1.25 * (largest + sampling + states)) + widened_bytes + waiting + chosen + (64 << 20)


def entering_bytes(model: ModelConfig, num_tokens: int, num_stages: int) -> int:
    """Hidden states that wait for a stage of a pipeline while it computes earlier steps: as many as there may be in flight."""
    if num_stages == 1:
        return 0
    return (num_stages + 2) * num_tokens * model.hidden_size * jnp.dtype(model.dtype).itemsize


def exchange_bytes(model: ModelConfig, num_tokens: int, topology: Topology, policy: KernelPolicy) -> int:
    """Bytes on a device of all ranks' tokens while it computes those that chose its experts; `num_tokens`: of each data-parallel rank."""
    if topology.data == 1:
        return 0
    at_once = min(topology.data * num_tokens, policy.max_tokens_at_once)
    values = max(4 * part.routing.top_k * part.width for part in model.mixtures) + 4 * model.hidden_size
    return at_once * values * jnp.dtype(model.dtype).itemsize


def tuning_bytes(config: EngineConfig, model: ModelConfig, *, has_head: bool = True) -> int:
    """Bytes that XLA allocates to time the largest product, that of the vocabulary, when a program is compiled next to a full cache.

    Without it a small program falls back to slow products and a large one fails to compile.
    has_head: whether XLA times that product; kernels that multiply a head in tiles are not timed, and a layer's products are the largest.
    """
    assert config.scheduler.max_num_seqs is not None
    rows, itemsize = config.scheduler.max_num_seqs + 1, jnp.dtype(model.dtype).itemsize
    values = model.padded_vocab_size if has_head else min(model.padded_vocab_size, _widest(model))
    values //= Topology.of(config.parallel).tensor
    return int(1.1 * values * (model.hidden_size * itemsize + rows * 4))


def _widest(model: ModelConfig) -> int:
    """Most values that a layer makes of a token, and more than any one product of it does."""
    return max(sum(part.values_per_token for part in layer.parts.values()) for layer in set(model.layers))


_COMPILER_BYTES = 512 << 20
"""Bytes of a limited address space that XLA's compiler may use."""


def device_limit(num_devices: int = 1, devices: Sequence[jax.Device] | None = None) -> tuple[str, int]:
    """Name of a device and the bytes on it that the engine may use: of the first `num_devices` the one with the least memory.

    On a CPU the devices share the machine's memory, or what is left of the address space after the share of XLA's compiler.
    """
    found = list(jax.local_devices() if devices is None else devices)[:num_devices]
    limits = [(int(stats["bytes_limit"]), i) for i, device in enumerate(found) if (stats := _stats(device))]
    if not limits:
        left = address_space.left_bytes()
        if left is not None and (left := left - min(left // 2, _COMPILER_BYTES)) < _machine_bytes():
            return "a CPU with a limited address space (ulimit -v)", left // num_devices
        return "CPU", _machine_bytes() // num_devices
    limit, index = min(limits)
    differ = any(other != limit for other, _ in limits)
    return found[index].device_kind + f" {found[index].id}, the smallest of {len(found)} devices" * differ, limit


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _stats(device: jax.Device) -> dict[str, int]:
    """The statistics of a device's memory pool; empty on a CPU."""
    return (device.memory_stats() if device.platform != "cpu" else None) or {}


def reserve_device_memory(fraction: float, topology: Topology = ONE_DEVICE) -> None:
    """Have JAX reserve this fraction of each GPU at its start, minus the memory of collectives.

    Has no effect once a device has been used.
    """
    if _NEWER_FRACTION in os.environ:
        return
    beside, total = _collective_bytes(topology), gpus.smallest_total_bytes(topology.num_devices)
    if beside and total:
        fraction = max(fraction - beside / total, 0.01)
    os.environ.setdefault(_FRACTION, f"{fraction:.3f}")


def check_free_memory(topology: Topology = ONE_DEVICE) -> None:
    """Refuse to start JAX on GPUs whose memory another program holds. Raises OutOfMemoryError that names each with its numbers.

    After `reserve_device_memory` and before JAX finds its devices: then their memory is JAX's own. Waits a little first, because a
    program that has just ended may still be giving its memory back. Checks nothing where NVML is missing, JAX does not use GPUs, or takes
    memory only as it needs it.
    """
    if not _will_start_on_gpus() or not _takes_all_at_once():
        return
    until = time.monotonic() + PATIENCE_SECONDS
    while (fault := _busy_gpus(gpus.visible_gpus(), topology)) is not None:
        if time.monotonic() >= until:
            raise OutOfMemoryError(fault)
        time.sleep(0.25)


def _busy_gpus(visible: Sequence[gpus.Gpu], topology: Topology) -> str | None:
    """Which GPUs have too little memory free for JAX to start, and the ways out; None if all have enough."""
    num_devices, beside = topology.num_devices, _collective_bytes(topology)
    fraction = float(os.environ.get(_NEWER_FRACTION) or os.environ[_FRACTION])
    used = visible[:num_devices]
    busy = [gpu for gpu in used if gpu.free_bytes < fraction * gpu.total_bytes + beside]
    # JAX starts on all that are visible, and without a context on one of them on none.
    full = [gpu for gpu in visible[num_devices:] if gpu.free_bytes < CONTEXT_BYTES]
    if not busy and not full:
        return None
    told = "; ".join(f"{gpu} has {_size(gpu.free_bytes)} of {_size(gpu.total_bytes)} free" for gpu in (*busy, *full))
    needed = f"{_size(int(fraction * busy[0].total_bytes) + beside)} are needed there" if busy else _needed_unused()
    ways = ["end what holds the rest (nvidia-smi lists programs)"]
    # Half a GiB for the context, which this process has not made yet.
    fits = min((gpu.free_bytes - CONTEXT_BYTES) / gpu.total_bytes for gpu in used)
    if busy and int(100 * fits) >= 10:
        ways.append(f"use --gpu-memory-utilization {int(100 * fits) / 100:g} or less")
    free = [gpu for gpu in visible if gpu not in busy and gpu not in full]
    if len(free) >= num_devices:
        ways.append(f"choose free GPUs: CUDA_VISIBLE_DEVICES={','.join(str(gpu.index) for gpu in free[:num_devices])}")
    else:
        ways.append("choose others with CUDA_VISIBLE_DEVICES")
    because = f" (--gpu-memory-utilization, JAX takes {fraction:.3f} of each GPU when it starts)" if busy else ""
    return f"{told}; {needed}{because}: {', '.join(ways[:-1])}, or {ways[-1]}"


def _needed_unused() -> str:
    return f"the engine does not use it, but JAX starts on every visible GPU and needs {_size(CONTEXT_BYTES)}"


def _will_start_on_gpus() -> bool:
    """Whether JAX has not started yet, and will do so on NVIDIA GPUs if there are any."""
    asked = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return False
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return False
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:  # not a public name
        return False
    return not backends_are_initialized()


def _takes_all_at_once() -> bool:
    """Whether JAX takes its fraction when it starts, as it does unless its variables say otherwise."""
    at_once = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true") not in ("false", "False", "0")
    return at_once and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() in ("default", "bfc")


def check_pool(plan: MemoryPlan, devices: Sequence[jax.Device]) -> None:
    """Refuse a plan for memory that other arrays of this process hold, such as those of another engine. Raises OutOfMemoryError.

    JAX's pool is one for the whole process. Before anything of the plan has been allocated.
    """
    wanted = plan.weight_bytes + plan.state_bytes + plan.cache_bytes
    for device in devices:
        in_use = _stats(device).get("bytes_in_use", 0)
        if wanted <= plan.limit_bytes < wanted + in_use:
            raise OutOfMemoryError(
                f"other arrays of this process hold {_size(in_use)} of the {_size(plan.limit_bytes)} of device {device.id}, weights and KV "
                f"cache need {_size(wanted)}; end the engine that this process had before (LLM.shutdown), "
                "delete the arrays, or set --kv-cache-memory-bytes lower"
            )


def _other_bytes(topology: Topology) -> int:
    """Bytes that the runner keeps in the pool of each GPU: spacers, and the workspace for exchange between GPUs."""
    return (8 << 20) + (WORKSPACE_BYTES if topology.tensor > 1 else 0)


def _collective_bytes(topology: Topology) -> int:
    return COLLECTIVE_BYTES if topology.has_exchange else 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if abs(num_bytes) >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
