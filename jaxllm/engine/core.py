"""EngineCore: builds scheduler and runner from a config and serves requests in token ids. Text is handled outside."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from jaxllm.adapters import AdapterInfo, AdapterState
from jaxllm.cache_events import CacheEvents
from jaxllm.config import EngineConfig
from jaxllm.core_interface import PauseMode, SleepMode
from jaxllm.engine import fault_points
from jaxllm.engine.background_programs import BackgroundPrograms
from jaxllm.engine.executor import Executor
from jaxllm.engine.failures import FailurePolicy
from jaxllm.engine.features import AdapterManager, check_address, check_request, open_kv_events
from jaxllm.engine.grammars import Grammars
from jaxllm.engine.loop import StepLoop
from jaxllm.engine.needed_programs import NeededPrograms
from jaxllm.engine.op_queue import OpQueue
from jaxllm.engine.parallel_backends import make_scheduler
from jaxllm.engine.pause import Pause
from jaxllm.engine.preparations import Preparation
from jaxllm.engine.prepare import Prepared
from jaxllm.engine.profiler import Profiler
from jaxllm.engine.sleep import Sleep, check_level
from jaxllm.engine.start import Started
from jaxllm.errors import (
    AdapterNotFoundError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineSleepingError,
    GrammarError,
    InvalidRequestError,
    JaxLLMError,
    OverloadedError,
)
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.kv_transfer import KVTransfer
from jaxllm.log import logger
from jaxllm.outputs import EngineCoreOutput
from jaxllm.parallel.topology import Topology
from jaxllm.progress import Progress
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason, Request, RequestStatus
from jaxllm.runner.buckets import Buckets
from jaxllm.sampling.processors import Processor, check_processors, load_processors, read_arguments
from jaxllm.scheduler.admission import AdmissionRoom
from jaxllm.scheduler.cache_observer import CacheObserver
from jaxllm.scheduler.interface import AnyScheduler
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.start_times import StartTimes
from jaxllm.text.model_files import text_files

if TYPE_CHECKING:
    from jaxllm.structured.token_table import Vocabulary

STORE_SECONDS = 5.0
"""So long an engine that ends stores what it has computed, where tiers want all of it."""
_MAX_IN_FLIGHT = {False: 2, True: 3}
"""Steps in flight by whether they run on a GPU. There the host learns of a finished step up to a millisecond late (measured,
docs/MEASUREMENTS.md): with two in flight a step of 1.5 ms is over before the next but one is dispatched."""

_LEAD_SECONDS = 0.005
"""So long before a step of a prompt is over the next one is planned on one GPU: one there takes the host 1.5 to 2.7 ms, and up to a
millisecond passes before its results are known. Several GPUs, whose steps take longer to launch, were not measured."""


class EngineCore:
    """An engine on the devices of this process.

    After construction `config` has no "auto" left. `model_config` describes the model, `max_model_len` is the longest request
    in tokens, `processor_arguments` lists the logits processors that requests may name, `kernels` reports each op's kernel.
    kernel_policy: None for the platform's. replica: its number among engines of the same options. Raises ConfigError,
    ModelLoadError, KernelCheckError or OutOfMemoryError.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        processors: Sequence[Processor | str] = (),
        times: StartTimes | None = None,
        kernel_policy: KernelPolicy | None = None,
        replica: int = 0,
    ):
        if rank := config.parallel.node_rank:
            raise ConfigError(
                f"node_rank is {rank}: hosts above 0 take no requests; start this one with `jaxllm serve --node-rank {rank}`"
            )
        fault_points.install_from_environment("core")
        progress = progress or Progress()
        self.start_times = times or StartTimes()
        """Durations of the phases of the start."""
        loaded = load_processors((*(config.model.logits_processors or ()), *processors))
        self._processors = loaded
        self.processor_arguments: Mapping[str, int] = check_processors(loaded)
        began = time.perf_counter()
        check_address(config)
        self._kv_events = open_kv_events(config, replica)  # first, because its ports may be taken
        try:
            started = Started.of(config, loaded, progress, self.start_times, kernel_policy)
        except BaseException:
            self._close_kv_events()
            raise
        prepared, self.model_dir = started.prepared, started.model_dir
        self.runner = prepared.runner
        self.executor: Executor = started.executor
        self.hosts = started.hosts
        """The other hosts, if there are any."""
        plan = prepared.plan
        self.config = prepared.config.replace(max_model_len=plan.max_model_len)
        self.model_config = prepared.model_config
        self.kernels = prepared.kernel_report
        self.max_model_len = plan.max_model_len
        self.memory_plan = plan
        logger.debug("options: %s", ", ".join(f"{name}={value}" for name, value in self.config.flat().items()))
        self._tell_of_start(time.perf_counter() - began)
        features = prepared.features
        self.ops = OpQueue(self.executor)
        self.adapters = None if features.adapters is None else features.adapters.new_manager(self.executor, self.ops)
        self._expert_load = None if features.expert_load is None else features.expert_load.new_reader(self.ops)
        self.grammars = Grammars(self._vocabulary, self.model_config.padded_vocab_size, drafts_forced=features.drafts_forced)
        self.needed_programs = NeededPrograms(self.executor)
        self._items = tuple(features.items.values())
        self._kv_tiers = kv_tiers = features.kv_tiers
        try:
            self._tiers = () if kv_tiers is None else kv_tiers.new_tiers(self.executor, plan.num_blocks, self.model_dir)
        except BaseException:  # e.g. its port is taken
            self._close_kv_events()
            self.executor.close()
            raise
        self._of_tiers: tuple[Preparation, ...] = () if kv_tiers is None else tuple(kv_tiers.preparations)
        self.scheduler = self._new_scheduler(prepared)
        num_devices = Topology.of(self.config.parallel).num_devices
        max_in_flight = _MAX_IN_FLIGHT[jax.default_backend() != "cpu"] if self.config.scheduler.async_scheduling else 1
        self.loop = StepLoop(
            self.scheduler,
            self.executor,
            max_in_flight=max_in_flight,
            ops=self.ops,
            wait=self.wait_for_preparations,
            lead_seconds=_LEAD_SECONDS if max_in_flight > 2 and num_devices == 1 else None,
        )
        self._failures = FailurePolicy()
        self._sleep = Sleep(self.executor)
        self._pause = Pause(self.config.scheduler)
        self._profiler = Profiler(self.config.observe.profiler_dir)
        self._background = BackgroundPrograms(self.executor.programs, self._run_new_program, began=began)
        self._background.watch()
        self._publish_kv_events()
        self._outputs: list[EngineCoreOutput] = []
        """Outputs of requests that ended between two steps."""
        self._dead: BaseException | None = None

    def _tell_of_start(self, seconds: float) -> None:
        num_following = self.executor.programs.num_queued
        logger.info(
            "engine ready in %.1f s, %d programs compiled and %d loaded%s (%s; some at the same time)",
            seconds,
            self.executor.programs.num_compiled,
            self.executor.programs.num_loaded,
            f", {num_following} follow in the background" if num_following else "",
            self.start_times.describe(),
        )

    def _new_scheduler(self, prepared: Prepared) -> AnyScheduler:
        """The scheduler of all ranks, when tiers and preparations are there."""
        plan, features = prepared.plan, prepared.features
        new_scheduler = partial(
            Scheduler,
            self.config.scheduler,
            self.config.cache,
            num_blocks=plan.num_blocks,
            max_model_len=plan.max_model_len,
            policies=plan.cache.policies,
            drafts=None if features.speculation is None else features.speculation.new_control(prepared.policy),
            num_stages=self.config.parallel.pipeline_parallel_size,
            block_size=plan.block_size,
            tiers=self._tiers,
            num_state_blocks=plan.cache.state_blocks if self.config.cache.enable_prefix_caching else 0,
            token_sizes=Buckets.choose(self.config, prepared.policy).tokens,
        )

        def new_observer() -> CacheObserver | None:
            made = self._kv_events
            return None if made is None else made.new_observer(self.config, self.model_config, plan.cache, self._tiers)

        return make_scheduler(self.config.parallel, lambda: new_scheduler(rooms=self.new_rooms(), observer=new_observer()))

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request. While the engine is paused, it waits outside the queue.

        Raises InvalidRequestError if it can never run, OverloadedError if the queue is full, EngineSleepingError during sleep.
        """
        self._check_alive()
        try:
            self._admit(request)
        except JaxLLMError:
            self._end_lease_of(request)
            raise

    def _admit(self, request: EngineCoreRequest) -> None:
        if self._sleep.level:
            raise EngineSleepingError("the engine sleeps and takes no requests; wake it up first")
        if request.sampling_params.extra_args:
            request = replace(request, sampling_params=read_arguments(request.sampling_params, self._processors))
        if self._pause.mode is not None:
            self._pause.hold(request, (each.spec for each in self.scheduler.requests.values()))
            return
        self._queue(request)

    def _queue(self, request: EngineCoreRequest) -> None:
        admitted = Request(request)
        if request.options.adapter is not None and self.adapters is None:
            raise InvalidRequestError(
                f"adapter {request.options.adapter!r} is named, but the engine has none: start it with enable_lora", "adapter"
            )
        check_request(request.sampling_params, request.pooling_params)
        for preparation in self.preparations:
            preparation.bind(admitted)
        self.scheduler.add_request(admitted)
        try:
            for preparation in self.preparations:
                preparation.admit(admitted)
        except BaseException:
            self.scheduler.finish_requests(admitted.request_id, RequestStatus.FINISHED_ERROR)
            raise

    @property
    def preparations(self) -> tuple[Preparation, ...]:
        """Preparations that requests may wait for before they run."""
        always: tuple[Preparation, ...] = (self.grammars, self.needed_programs, *self._of_tiers)
        return always if self.adapters is None else (*always, self.adapters)

    def wait_for_preparations(self, seconds: float) -> None:
        """Wait until one that is under way is done, at most so long; not at all if there is none."""
        jobs = [job for preparation in self.preparations for job in preparation.jobs() if not job.done()]
        futures.wait(jobs, seconds, return_when=futures.FIRST_COMPLETED)

    def new_rooms(self) -> tuple[AdmissionRoom, ...]:
        """Make the rooms of one scheduler: preparations, which all schedulers share, and separate rooms of items."""
        return (*self.preparations, *(items.new_room() for items in self._items))

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests now; unknown ids are ignored."""
        for request_id in request_ids:
            if (held := self._pause.held.pop(request_id, None)) is not None:
                self._end_lease_of(held)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        self.loop.note_work()
        self._publish_kv_events()

    def end_lease(self, transfer: KVTransfer) -> None:
        """See Core."""
        if self._kv_tiers is not None:
            self._kv_tiers.end_lease(transfer)

    @property
    def prefill_address(self) -> KVTransfer | None:
        """See SteppedCore, as for the next one."""
        return None if self._kv_tiers is None else self._kv_tiers.prefill_address

    def meet(self, transfer: KVTransfer) -> None:
        if self._kv_tiers is not None:
            self._kv_tiers.meet(transfer)

    def continue_request(self, request_id: str, output_token_ids: Sequence[int]) -> None:
        """See SteppedCore."""
        held, request = self._pause.held.get(request_id), self.scheduler.requests.get(request_id)
        if held is not None and held.awaits_first_token:
            self._pause.held[request_id] = replace(held, output_token_ids=tuple(output_token_ids), awaits_first_token=False)
        if request is None or not request.awaits_first_token:
            return
        try:
            request.take_outputs(output_token_ids)
        except GrammarError as error:
            self._outputs += self.scheduler.fail_requests([request_id], ErrorKind.CONSTRAINT, str(error))

    def _end_lease_of(self, request: EngineCoreRequest) -> None:
        """A request ends that was not queued."""
        if request.options.kv_transfer is not None:
            self.end_lease(request.options.kv_transfer)

    def hold_requests(self, request_ids: list[str]) -> None:
        """See PauseCalls, as for the next one."""
        self.scheduler.hold_requests(request_ids)
        self.loop.note_work()

    def release_requests(self, request_ids: list[str]) -> None:
        self.scheduler.release_requests(request_ids)
        self.loop.note_work()

    def has_unfinished_requests(self) -> bool:
        """Whether a step has work to do or outputs to return."""
        return bool(self._outputs) or (self._pause.mode != "keep" and self.loop.has_work)

    def step(self) -> list[EngineCoreOutput]:
        """Run until the next step's results arrive. A failed step returns outputs too, for the requests that it ends.

        Raises EngineDeadError if the engine cannot continue; all requests end then.
        """
        self._check_alive()
        outputs = self.scheduler.fail_expired()
        if self._outputs:
            outputs, self._outputs = self._outputs + outputs, []
        try:
            for preparation in self.preparations:
                outputs += preparation.settle(self.scheduler)
            if self._pause.mode == "keep":
                return outputs
            num_before = self.loop.num_finished_steps
            outputs += self.loop.step()
            if self.loop.num_finished_steps > num_before:  # else it only waited
                self._note_finished_step()
        except Exception as error:
            outputs += self._recover(error)
        self._publish_kv_events()
        return outputs

    def _note_finished_step(self) -> None:
        if self._expert_load is not None:
            self._expert_load.note_step(is_idle=not self.loop.has_work)
        if self._failures.limits_steps:
            self._failures.note_success(self.loop)

    def _publish_kv_events(self) -> None:
        if self._kv_events is not None:
            self._kv_events.publish()

    def _close_kv_events(self) -> None:
        if self._kv_events is not None:
            self._kv_events.close()

    def _recover(self, error: Exception) -> list[EngineCoreOutput]:
        if isinstance(error, EngineDeadError):  # a host is lost
            self._die(error)
            raise error
        try:
            return self._failures.recover(self.loop, error)
        except EngineDeadError as dead:
            self._die(error)
            raise dead from error

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """See ControlCalls."""
        was_reset = self.scheduler.reset_prefix_cache(reset_running_requests, reset_external)
        self._publish_kv_events()
        return was_reset

    def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """See ControlCalls. The next `step` reports the aborted requests."""
        self._check_alive()
        check_level(level)
        unfinished = list(self.scheduler.requests)
        num_unfinished = len(unfinished) + len(self._pause.held)
        if num_unfinished and mode == "refuse":
            raise EngineError(
                f"{num_unfinished} requests are not finished; wait for them or abort them before the engine sleeps"
            )
        self._outputs += self.scheduler.abort_requests(unfinished)
        for held in self._pause.held.values():
            self._end_lease_of(held)
            self._outputs.append(EngineCoreOutput(held.request_id, [], FinishReason.ABORT))
        self._pause.held.clear()
        self.loop.forget()
        if self._expert_load is not None and not self._sleep.level:
            self._expert_load.read()
        self.scheduler.start_over()
        self.loop.note_work()
        self._sleep.fall_asleep(level)
        if level > 1:
            self.scheduler.reset_prefix_cache()  # the weights may be others after it
            for preparation in self.preparations:
                preparation.forget_slots()
            if self._expert_load is not None:
                self._expert_load.forget_places()
        self._publish_kv_events()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See ControlCalls."""
        self._check_alive()
        reads_weights = self._sleep.level > 1
        self._sleep.wake_up(tags)
        if reads_weights:  # what a reset during sleep had tiers find out about weights may be of those before
            self.scheduler.reset_prefix_cache()
            self._publish_kv_events()

    def is_sleeping(self) -> bool:
        """Whether the engine sleeps."""
        return self._sleep.level > 0

    @property
    def sleep_level(self) -> int:
        return self._sleep.level

    def pause(self, mode: PauseMode = "abort") -> None:
        """See PauseCalls."""
        self._check_alive()
        self._pause.begin(mode)
        if mode == "abort":
            self._outputs += self.scheduler.abort_requests(list(self.scheduler.requests))
            self.loop.note_work()
            self._publish_kv_events()

    def resume(self) -> None:
        """Continue computing, and queue the requests that arrived during the pause."""
        self._check_alive()
        for request in self._pause.end():
            try:
                self._queue(request)
            except JaxLLMError as error:
                self._end_lease_of(request)
                kinds = {OverloadedError: ErrorKind.QUEUE_TIMEOUT, AdapterNotFoundError: ErrorKind.ADAPTER}
                kind = kinds.get(type(error), ErrorKind.INTERNAL)
                self._outputs.append(EngineCoreOutput(request.request_id, [], FinishReason.ERROR, str(error), error_kind=kind))

    def is_paused(self) -> bool:
        """Whether requests are held back."""
        return self._pause.mode is not None

    def is_draining(self) -> bool:
        """Whether the engine is paused while earlier requests run to completion."""
        return self._pause.mode in ("abort", "wait") and self.loop.has_work

    def add_adapter(self, name: str, path: str, replace: bool = False) -> int:
        """See ControlCalls, as for the next four."""
        return self._manager().add_adapter(name, path, replace)

    def adapter_state(self, number: int) -> AdapterState:
        return self._manager().adapter_state(number)

    def remove_adapter(self, name: str) -> bool:
        return self._manager().remove_adapter(name)

    def list_adapters(self) -> list[AdapterInfo]:
        return [] if self.adapters is None else self.adapters.list_adapters()

    def pin_adapter(self, name: str) -> None:
        self._manager().pin_adapter(name)

    def _manager(self) -> AdapterManager:
        self._check_alive()
        if self.adapters is None:
            raise ConfigError("the engine has no adapters: start it with enable_lora")
        return self.adapters

    def expert_load(self) -> dict[str, Any]:
        """See ControlCalls."""
        self._check_alive()
        if self._expert_load is None:
            raise ConfigError("the engine does not count tokens of experts: start it with expert_load")
        if self._sleep.level:
            raise EngineSleepingError("the engine sleeps, and its counts with it; wake it up first")
        return self._expert_load.table()

    def start_profile(self) -> None:
        """Start a trace with JAX's profiler. Raises ConfigError without `profiler_dir`, EngineError during a trace."""
        self._profiler.start()

    def stop_profile(self) -> None:
        """End the trace and write it. Raises EngineError if there is none."""
        self._profiler.stop()

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent or a request leaked resources. Call without unfinished requests."""
        self._check_alive()
        self.scheduler.check_integrity()
        assert not self.scheduler.requests, f"{len(self.scheduler.requests)} requests are not finished"
        assert not self._outputs, f"{len(self._outputs)} outputs were not returned"
        assert not self._pause.held, f"{len(self._pause.held)} requests wait until the engine resumes"
        while self.loop.has_work:  # steps that were in flight when the last request ended
            assert not self.loop.step(), "a step has outputs of a request that has ended"
        assert not self.scheduler.holds_blocks, "blocks are held by nobody"
        self.executor.check_idle(self.scheduler.finished_ids)
        for preparation in self.preparations:
            preparation.check_integrity()

    def stats(self) -> SchedulerStats:
        """Numbers for logs and metrics."""
        stats = self.scheduler.stats()
        stats.work_seconds, stats.device_idle_seconds = self.loop.work_clock.totals()
        stats.device_wait_seconds = self.loop.wait_seconds
        stats.num_deferred = self.needed_programs.num_waiting
        stats.sleep_level = self._sleep.level
        stats.num_retried_steps, stats.num_lost_steps = self._failures.num_retried_steps, self._failures.num_lost_steps
        stats.num_computed_patches, stats.num_encoder_runs = self.executor.encoder_totals
        if self.adapters is not None:
            self.adapters.add_stats(stats)
        if self._expert_load is not None:
            self._expert_load.add_stats(stats)
        if self._kv_events is not None:
            self._kv_events.add_stats(stats)
        return stats

    def publish_cache_events(self) -> None:
        """See SteppedCore, as for the next two."""
        self.scheduler.publish_cache_events()

    def take_cache_events(self) -> CacheEvents | None:
        return self.scheduler.take_cache_events()

    def cache_snapshot(self) -> CacheEvents:
        return self.scheduler.cache_snapshot()

    def replica_of(self, request_id: str) -> int:
        """See Core."""
        return 0

    def loads(self) -> list[tuple[SchedulerStats, int]]:
        """See Core."""
        return [(self.stats(), self.num_compiled_after_warmup)]

    @property
    def num_compiled_after_warmup(self) -> int:
        return self.executor.programs.num_compiled_after_warmup

    @property
    def awaited_programs(self) -> tuple[int, int]:
        """Programs that a step waits for now: how many are ready, and the total. Safe to read from any thread."""
        return self.executor.programs.awaited

    def run_between_steps(self, post: Callable[[Callable[[], object]], None]) -> None:
        """See SteppedCore."""
        self._background.post = post

    def finish_compiling(self) -> None:
        """Wait until the programs that compile in the background are ready."""
        if self.config.compile.warmup in ("background", "idle"):
            self.executor.programs.finish()
            if self._background.post is None:  # this is the thread of the steps
                while self._run_new_program():
                    pass

    def _run_new_program(self) -> bool:
        """While nothing else runs, run a program that was made after the start. Returns whether there was one."""
        if self._dead is not None or self._sleep.level or self.loop.has_work:
            return False
        self.loop.working_on = None
        try:
            return self.executor.run_new_program()
        except Exception as error:
            self._outputs += self._recover(error)
            return False

    def shutdown(self) -> None:
        """Drop all requests, wait for the device and release its memory. The engine cannot be used afterwards."""
        self._store_rest()
        if self._dead is None:
            self._die(EngineDeadError("the engine was shut down"))
        if self._profiler.is_running:
            self._profiler.stop()
        for preparation in self.preparations:
            preparation.shutdown()
        self._close_kv_events()
        for tier in self._tiers:
            tier.close()
        self.executor.close()

    def _store_rest(self) -> None:
        """Run the steps that store what has been computed, for a while, if none are left but these."""
        deadline = time.monotonic() + STORE_SECONDS
        with contextlib.suppress(Exception):  # which says no more than that less is stored
            while self._dead is None and not self.scheduler.requests and self.loop.has_work and time.monotonic() < deadline:
                self.loop.step()

    def _vocabulary(self, eos_token_ids: tuple[int, ...]) -> "Vocabulary":
        # Imported with the first grammar only: llguidance and tokenizers take a tenth of a second to import.
        from jaxllm.structured.token_table import Vocabulary
        from jaxllm.text.tokenizer import load_tokenizer

        options = self.config.model
        directory, name = self.model_dir, options.model
        if options.tokenizer is not None:
            directory, name = text_files(options.tokenizer, download_dir=options.download_dir), options.tokenizer
        return Vocabulary.of(load_tokenizer(directory, name=name), self.model_config.padded_vocab_size, eos_token_ids)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the engine is dead: {self._dead}") from self._dead

    def _die(self, error: BaseException) -> None:
        self._dead = error
        self.loop.forget()
        self.scheduler.finish_requests(list(self.scheduler.requests), RequestStatus.FINISHED_ERROR)
