"""Real engines over the tiny checkpoints: few programs, quick to compile, and several schedulers over one runner."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.engine.failures import FailurePolicy
from jaxllm.engine.grammars import Grammars
from jaxllm.engine.loop import StepLoop
from jaxllm.engine.parallel_backends import make_scheduler
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.outputs import EngineCoreOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.progress import Progress
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason, RequestStatus
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.rows import Rows
from jaxllm.sampling.processors import Processor
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler_output import TokenLogprobs
from tests.helpers import goldens

SMALL = {
    "skip_tokenizer_init": True,
    "compilation_cache": False,
    "use_progress_bar": False,
    "max_model_len": 112,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 112,
    "decode_buckets": (4,),
    "token_buckets": (112,),
}
"""A program of each kind: steps of any size are padded to the same few shapes."""


_PROGRAMS: dict[str, dict[Any, Any]] = {}
"""Compiled programs by the options of engines that share theirs."""
_NOT_OF_PROGRAMS = {
    "kv_offloading_size",
    "kv_offloading_disk",
    "kv_offloading_disk_size",
    "kv_offloading_write",
    "kv_role",
    "kv_port",
    "kv_pull_timeout",
    "kv_load_failure_policy",
}


def make_core(
    name: str,
    *,
    processors: tuple[Processor, ...] = (),
    kernel_policy: KernelPolicy | None = None,
    shares_programs: bool = False,
    **options: Any,
) -> EngineCore:
    """An engine over a golden's checkpoint; options added to SMALL or replacing it.

    With warmup "lazy", a program is compiled when it is first needed; else those that almost all tests need are compiled now.
    shares_programs: with the engines of the same options that were made so before. For tests that replace nothing of what programs compute.
    """
    model = str(goldens.golden(name).directory)
    options = {**SMALL, "model": model, **options}
    core = EngineCore(EngineConfig.from_options(**options), processors=processors, kernel_policy=kernel_policy)
    if shares_programs:
        shared = _PROGRAMS.setdefault(repr(sorted((k, v) for k, v in options.items() if k not in _NOT_OF_PROGRAMS)), {})
        shared.update(core.runner.programs._compiled)
        core.runner.programs._compiled = shared
    for runner in getattr(core.runner, "stages", (core.runner,)) if options.get("warmup") != "lazy" else ():
        buckets = runner.buckets
        largest = [ProgramKey("forward", buckets.tokens[-1])]
        if core.model_config.generates and core.scheduler.drafts is None:  # with drafts, steps have as many widths as tests use
            largest.append(ProgramKey("decode", buckets.decode_rows[-1]))
        runner.programs.compile_all(largest, Progress())  # at the same time
    return core


class SharedPrograms:
    """Makes engines that compile when a program is first needed, those of the same options with the programs of the engines before."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Any, Any]] = {}

    @contextmanager
    def engines(self, defaults: dict[str, Any]) -> Iterator[Callable[..., EngineCore]]:
        """A maker of engines that live as long as the block; the options are added to `defaults` or replace them."""
        made = []

        def make(**options: Any) -> EngineCore:
            options = {**defaults, **options}
            core = EngineCore(EngineConfig.from_options(**options))
            programs = self._of.setdefault(repr(sorted(options.items())), {})
            core.runner.programs._compiled.update(programs)
            made.append((core, programs))
            return core

        yield make
        for core, programs in made:
            programs.update(core.runner.programs._compiled)
            core.shutdown()


def reschedule(core: EngineCore, *, num_blocks: int | None = None, max_in_flight: int = 2, **options: Any) -> EngineCore:
    """The engine with a new scheduler, empty prefix cache included, and NaN in its cache; its programs stay compiled.

    The options are the scheduler's and the cache's; a pool smaller than the device's arrays is as good as a small device.
    `max_in_flight`: steps, with async scheduling (2 is what a CPU has, 3 what a GPU has).
    """
    assert not core.has_unfinished_requests()
    for rows in all_rows(core):
        rows.clear()
    poison(core)
    if "max_num_batched_tokens" in options:
        options = {"max_num_prefill_tokens": None, **options}
    config = core.config.replace(**options)
    new_scheduler = partial(
        Scheduler,
        config.scheduler,
        config.cache,
        num_blocks=num_blocks or core.memory_plan.num_blocks,
        max_model_len=core.max_model_len,
        policies=core.memory_plan.cache.policies,
        drafts=core.scheduler.drafts,
        num_stages=core.scheduler.num_stages,
        block_size=core.memory_plan.block_size,
        num_state_blocks=core.memory_plan.cache.state_blocks if config.cache.enable_prefix_caching else 0,
    )
    core.scheduler = make_scheduler(config.parallel, lambda: new_scheduler(rooms=core.new_rooms()))
    depth = max_in_flight if config.scheduler.async_scheduling else 1
    core.loop = StepLoop(core.scheduler, core.runner, max_in_flight=depth, ops=core.ops, wait=core.wait_for_preparations)
    return core


def poison(core: EngineCore) -> None:
    """Fill the cache, states included, with NaN: nothing may be read before it is written."""
    for runner in getattr(core.runner, "stages", [core.runner]):
        runner.caches = tuple(jax.device_put(np.full(x.shape, np.nan, x.dtype), x.sharding) for x in runner.caches)


def all_rows(core: EngineCore) -> list[Rows]:
    """Rows of each data-parallel rank of the runner."""
    return list(core.runner.rows)


def renew(core: EngineCore) -> EngineCore:
    """An engine in which anything may have happened as it was at the start, but for its programs. As many steps in flight as on a GPU."""
    core._dead = None
    core.scheduler.finish_requests(list(core.scheduler.requests), RequestStatus.FINISHED_ABORTED)
    core.loop.forget()
    core.grammars.shutdown()
    core.grammars = Grammars(core._vocabulary, core.model_config.padded_vocab_size)
    reschedule(core, max_in_flight=3)
    core.runner.start_over()
    core._failures = FailurePolicy()
    return core


def request(request_id: str, prompt: list[int], **params: Any) -> EngineCoreRequest:
    """Greedy and without an end before max_tokens, unless the parameters say otherwise; seeded, as input processing does."""
    params = {"temperature": 0.0, "ignore_eos": True, "seed": 0, **params}
    return EngineCoreRequest(request_id=request_id, prompt_token_ids=prompt, sampling_params=SamplingParams(**params))


def pooling_request(request_id: str, prompt: list[int], **params: Any) -> EngineCoreRequest:
    """One vector, not normalised, unless the parameters say otherwise; concrete, as input processing makes them."""
    nothing = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    params = {"task": "embed", "use_activation": False, "skip_reading_prefix_cache": False, **params}
    return EngineCoreRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=nothing, pooling_params=PoolingParams(**params)
    )


@dataclass
class Answer:
    """The complete output of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    pooled: np.ndarray | None = None
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None

    def take(self, output: EngineCoreOutput) -> None:
        """Add the outputs of a step."""
        assert self.finish_reason is None, "outputs of a request that has ended"
        self.tokens += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)
        if output.new_prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt logprobs come once"
            self.prompt_logprobs = output.new_prompt_logprobs
        self.finish_reason, self.stop_reason, self.error_kind = output.finish_reason, output.stop_reason, output.error_kind
        self.pooled = output.pooled
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions

    @property
    def token_logprobs(self) -> TokenLogprobs:
        """The logprobs of all tokens as one."""
        return TokenLogprobs(
            *(np.concatenate([getattr(part, name) for part in self.logprobs]) for name in ("token_ids", "logprobs", "ranks"))
        )


def run(
    core: EngineCore,
    requests: Iterable[EngineCoreRequest],
    *,
    after_step: Callable[[int, dict[str, Answer]], None] = lambda step, answers: None,
    max_steps: int = 3000,
) -> dict[str, Answer]:
    """The answers to requests that are all there from the start. `after_step` may add and abort others."""
    answers: dict[str, Answer] = {}
    for each in requests:
        core.add_request(each)
        answers[each.request_id] = Answer()
    for step in range(max_steps):
        if not core.has_unfinished_requests():
            check_idle(core)
            return answers
        for output in core.step():
            answers.setdefault(output.request_id, Answer()).take(output)
        core.scheduler.check_integrity()
        for rows in all_rows(core):
            rows.check_integrity()
        after_step(step, answers)
    raise AssertionError(f"not done after {max_steps} steps")


def check_idle(core: EngineCore) -> None:
    """Nothing runs and no block is held."""
    assert not core.scheduler.holds_blocks, "blocks are held by nobody"
    assert not core.scheduler.requests


def twin(
    core: EngineCore,
    *,
    processors: tuple[Processor, ...] = (),
    config: EngineConfig | None = None,
    kinds: Collection[str] | None = None,
) -> EngineCore:
    """Another engine of the same options, with the programs of the first: for tests that break theirs.

    config: other options, which the programs of `kinds` do not depend on.
    """
    other = EngineCore(config or core.config, processors=processors)
    compiled = core.runner.programs._compiled
    other.runner.programs._compiled.update({key: compiled[key] for key in compiled if kinds is None or key.kind in kinds})
    return other
