"""EngineCore: builds scheduler and runner from a config and serves requests in token ids. Text stays in the front."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxllm import env
from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.engine.loop import StepLoop
from jaxllm.errors import ConfigError, EngineDeadError, OutOfMemoryError
from jaxllm.hub import resolve_model
from jaxllm.loaders.load import load_weights
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig, load_model_config
from jaxllm.models.registry import build_model
from jaxllm.outputs import EngineCoreOutput
from jaxllm.parallel.mesh import make_mesh
from jaxllm.progress import Progress
from jaxllm.request import EngineCoreRequest, Request, RequestStatus
from jaxllm.runner.memory import MemoryPlan, memory_plan, reserve_device_memory
from jaxllm.runner.programs import use_persistent_cache
from jaxllm.runner.runner import ModelRunner
from jaxllm.sampling.processors import Processor, check_processors
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stats import SchedulerStats
from pallas_kernels import paged_attention

_MAX_IN_FLIGHT = {False: 2, True: 3}
"""Steps in flight by whether they run on a GPU. There the news of a finished step takes up to a millisecond to reach the host (measured,
docs/PERFORMANCE.md): with two in flight a step of 1.5 ms is over before the next but one is dispatched."""


class EngineCore:
    """An engine on the devices of this process.

    After construction `config` has no "auto" left, `model_config` describes the model, `max_model_len` the longest request
    and `processor_arguments` the logits processors that requests may name.
    Raises ConfigError, ModelLoadError or OutOfMemoryError.
    """

    def __init__(self, config: EngineConfig, progress: Progress | None = None, processors: Sequence[Processor] = ()):
        progress = progress or Progress()
        self.processor_arguments: Mapping[str, int] = check_processors(processors)
        started = time.perf_counter()
        reserve_device_memory(config.cache.gpu_memory_utilization)
        if config.compile.compilation_cache:
            use_persistent_cache(env.cache_dir() / "programs")
        self.model_dir = resolve_model(config.model.model, config.model.revision, config.model.download_dir)
        config, model_config, mesh = resolve(config, self.model_dir)
        estimate = memory_plan(config, model_config)
        estimate.check()  # now, because loading weights for nothing can take minutes
        logger.info("%s", estimate.describe())
        model = build_model(model_config)
        with _explained_out_of_memory():
            weights = load_weights(
                model_config,
                model,
                self.model_dir,
                load_format=config.model.load_format,
                mesh=mesh,
                seed=config.model.seed or 0,
                progress=_bytes_to(progress),
            )
        progress.finish()
        loaded = time.perf_counter()
        with _explained_out_of_memory():
            self.runner, plan = _size_and_build(config, model_config, model, weights, mesh, tuple(processors))
            if plan.num_blocks != estimate.num_blocks:
                logger.info("measured: %s", plan.describe())
            self.runner.allocate_caches()
            if config.compile.warmup == "all":
                self.runner.warm_up(progress)
        self.config = config.replace(max_model_len=plan.max_model_len)
        self.model_config = model_config
        self.max_model_len = plan.max_model_len
        self.memory_plan = plan
        logger.debug("options: %s", ", ".join(f"{name}={value}" for name, value in self.config.flat().items()))
        logger.info(
            "engine ready in %.1f s (weights %.1f s, compiling %d programs %.1f s)",
            time.perf_counter() - started,
            loaded - started,
            len(self.runner.programs),
            self.runner.programs.compile_seconds,
        )
        self.scheduler = Scheduler(
            self.config.scheduler, self.config.cache, num_blocks=plan.num_blocks, max_model_len=plan.max_model_len
        )
        max_in_flight = _MAX_IN_FLIGHT[jax.default_backend() != "cpu"] if self.config.scheduler.async_scheduling else 1
        self.loop = StepLoop(self.scheduler, self.runner, max_in_flight=max_in_flight)
        self._dead: BaseException | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises InvalidRequestError if it could never run."""
        self._check_alive()
        self.scheduler.add_request(Request(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests now; unknown ids are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def has_unfinished_requests(self) -> bool:
        return self.loop.has_work

    def step(self) -> list[EngineCoreOutput]:
        """Run until the next step's results are there. Raises EngineDeadError if a step failed; all requests end with it."""
        self._check_alive()
        try:
            return self.loop.step()
        except Exception as error:  # whatever it was, a step is lost: what the device holds is unknown now
            self._die(error)
            raise EngineDeadError(_explain(error)) from error

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. False if blocks are in use."""
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def stats(self) -> SchedulerStats:
        """Numbers for logs and metrics."""
        return self.scheduler.stats()

    @property
    def num_compiled_after_warmup(self) -> int:
        return self.runner.programs.num_compiled_after_warmup

    def shutdown(self) -> None:
        """Drop all requests, wait for the device and give its memory back. The engine cannot be used afterwards."""
        if self._dead is None:
            self._die(EngineDeadError("the engine was shut down"))
        self.runner.delete_arrays()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead: {self._dead}") from self._dead

    def _die(self, error: BaseException) -> None:
        self._dead = error
        self.loop.forget()
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ERROR)


def resolve(config: EngineConfig, model_dir: Path) -> tuple[EngineConfig, ModelConfig, Mesh]:
    """Make a config concrete for a model and this machine's devices."""
    on_gpu = _backend() != "cpu"
    attention = config.compile.attention_implementation
    config = resolve_platform_defaults(config, on_gpu=on_gpu)
    model_config = load_model_config(
        model_dir,
        overrides=config.model.hf_overrides,
        dtype=config.model.dtype,
        on_gpu=on_gpu,
        quantization=config.model.quantization,
        kv_cache_dtype=config.cache.kv_cache_dtype,
    )
    model_config = model_config.for_tensor_parallel(config.parallel.tensor_parallel_size)
    mesh = make_mesh(config.parallel.tensor_parallel_size)
    config = config.replace(attention_implementation=_attention_implementation(attention, model_config, on_gpu=on_gpu))
    scheduler = config.scheduler
    assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, less than max_num_seqs {scheduler.max_num_seqs}; "
            "each running request needs a token a step: raise --max-num-batched-tokens or lower --max-num-seqs"
        )
    return config, model_config, mesh


def _attention_implementation(wanted: str, model: ModelConfig, *, on_gpu: bool) -> str:
    """The wanted implementation if it takes the model's shapes, or for "auto" the fastest that does."""
    num_groups = model.num_heads // model.num_kv_heads
    if wanted == "auto":
        return paged_attention.choose(
            platform="gpu" if on_gpu else "cpu",
            dtype=model.dtype,
            num_groups=num_groups,
            head_dim=model.head_dim,
            cache_dtype=model.kv_cache_dtype,
        )
    if not paged_attention.supports(
        wanted,
        dtype=model.dtype,
        num_groups=num_groups,
        head_dim=model.head_dim,
        cache_dtype=model.kv_cache_dtype,
        interpret=not on_gpu,
    ):
        raise ConfigError(
            f"attention_implementation is {wanted!r}, which does not take {num_groups} query heads per key-value head of "
            f"width {model.head_dim} in {model.dtype} over a cache of {model.kv_cache_dtype}; use auto"
        )
    return wanted


def _backend() -> str:
    """The kind of device that JAX found. Raises ConfigError if it cannot use what it was told to use."""
    try:
        return jax.default_backend()
    except Exception as error:  # a plugin that is missing, or a driver that is broken, shows in many types
        asked = os.environ.get("JAX_PLATFORMS")
        raise ConfigError(
            f"JAX finds no device{f' for JAX_PLATFORMS={asked}' if asked else ''} "
            f"({(str(error) or type(error).__name__).splitlines()[0]}); unset JAX_PLATFORMS, or install jaxllm[cuda12] or "
            "jaxllm[cuda13] for a GPU; `jaxllm env` tells what is there"
        ) from error


def _size_and_build(
    config: EngineConfig,
    model_config: ModelConfig,
    model: nnx.Module,
    weights: nnx.State,
    mesh: Mesh,
    processors: tuple[Processor, ...],
) -> tuple[ModelRunner, MemoryPlan]:
    """Size the cache by what the weights take and the largest program needs, and build the runner for it."""
    weight_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(weights))
    plan = memory_plan(config, model_config, weight_bytes=weight_bytes)
    plan.check()
    runner = ModelRunner(config, model_config, model, weights, mesh, plan, processors)
    by_memory = config.cache.num_gpu_blocks_override is None and config.cache.kv_cache_memory_bytes is None
    if by_memory and config.compile.warmup == "all":
        # Programs depend on the number of blocks, so they are compiled for the estimate and again only if it was too high.
        work_bytes = runner.work_bytes()
        if work_bytes > plan.work_bytes:
            plan = memory_plan(config, model_config, weight_bytes=weight_bytes, work_bytes=work_bytes)
            plan.check()
            runner = ModelRunner(config, model_config, model, weights, mesh, plan, processors)
    return runner, plan


def _bytes_to(progress: Progress) -> Callable[[int, int], None]:
    """A callback (bytes done, bytes in all) that feeds a progress bar."""
    last = 0

    def report(done: int, total: int) -> None:
        nonlocal last
        if last == 0:
            progress.start("loading weights", total, "B")
        progress.advance(done - last)
        last = done

    return report


class _explained_out_of_memory:
    """Turns the device's out-of-memory errors into ours."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and "RESOURCE_EXHAUSTED" in str(error):
            raise OutOfMemoryError(_explain(error)) from error


def _explain(error: BaseException) -> str:
    if "RESOURCE_EXHAUSTED" in str(error):
        first_line = str(error).splitlines()[0]
        return (
            f"the device ran out of memory ({first_line}); lower --gpu-memory-utilization (the cache took what it allows), "
            "--max-num-batched-tokens or --max-num-seqs"
        )
    return f"a step failed: {type(error).__name__}: {error}"
