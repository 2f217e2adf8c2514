"""Timed runs of an engine on random prompts: greedy tokens up to a fixed number, no text."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError, RequestFailedError
from jaxllm.http_client.datasets import PromptWriter
from jaxllm.llm import LLM
from jaxllm.llm_engine import LLMEngine
from jaxllm.lora_request import LoRARequest
from jaxllm.outputs import EngineCoreOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

SETTLING_STEPS = 12
"""Decode steps before the clock starts: those in flight with the last prompt, and those by which the loop chooses its depth."""


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of so many tokens, none of them special."""
    writer = PromptWriter(np.random.default_rng(seed), vocab_size)
    return [{"prompt_token_ids": writer.ids(length)} for length in lengths]


def greedy(num_tokens: int) -> SamplingParams:
    """Exactly so many tokens."""
    return SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=num_tokens, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def end_all(engine: LLMEngine) -> None:
    """End all requests, and wait for the steps in flight."""
    engine.abort_all()
    while engine.core.has_unfinished_requests():
        engine.core.step()


@dataclass(frozen=True)
class Run:
    """Steps of a run."""

    seconds: float
    num_steps: int
    host_ms: dict[str, float]
    """Per step: `dispatch` (planning and launching), `launch` alone, `wait` (for the device)."""
    note: str | None = None
    """Other work in it than it should time."""
    contexts: list[int] = field(default_factory=list)
    """Tokens of each request in the cache before the first of these steps; decodes only."""
    step_seconds: list[float] = field(default_factory=list)
    """Seconds from the tokens of one step to those of the next; decodes only."""

    @property
    def mean_context(self) -> float | None:
        """Mean over requests and steps."""
        return sum(self.contexts) / len(self.contexts) + (len(self.step_seconds) - 1) / 2 if self.contexts else None


class Meter:
    """Host time of an engine core from now on."""

    def __init__(self, core: Any):
        self._core = core
        self._before = self._now()

    def read(self) -> tuple[int, dict[str, float], str | None]:
        """Steps dispatched, the milliseconds of Run.host_ms, and a note if requests had to wait for programs."""
        compiled, steps, *seconds = (now - before for now, before in zip(self._now(), self._before, strict=True))
        host_ms = dict(zip(("dispatch", "launch", "wait"), (each / steps * 1e3 for each in seconds), strict=True))
        return int(steps), host_ms, f"{compiled} programs were compiled meanwhile" if compiled else None

    def _now(self) -> tuple[float, ...]:
        core, runner = self._core, self._core.runner
        is_lazy = core.config.compile.warmup == "lazy"  # no program counts as warmed up
        compiled = runner.programs.num_compiled + runner.programs.num_loaded if is_lazy else core.num_compiled_after_warmup
        return compiled, runner.num_steps, runner.dispatch_seconds, runner.launch_seconds, core.loop.wait_seconds


def time_generation(
    llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams], loras: Sequence[LoRARequest] | None = None
) -> tuple[float, list[RequestOutput]]:
    """Seconds of requests that are given at once, and their outputs. Raises ConfigError if one gets fewer tokens than its maximum."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
    seconds = time.perf_counter() - start
    for output, asked in zip(outputs, params, strict=True):
        if (num_written := len(output.outputs[0].token_ids)) != asked.max_tokens:
            raise ConfigError(f"a request wrote {num_written} tokens instead of {asked.max_tokens}; raise --max-model-len")
    return seconds, outputs


def time_requests(llm: LLM, lengths: Sequence[tuple[int, int]], seed: int) -> Run:
    """Time requests of random prompts, of (prompt, output) tokens, as `time_generation` does."""
    core: Any = llm.llm_engine.core
    prompts = random_prompts([prompt for prompt, _ in lengths], core.model_config.vocab_size, seed)
    meter = Meter(core)
    seconds, _ = time_generation(llm, prompts, [greedy(output) for _, output in lengths])
    run = Run(seconds, *meter.read())
    core.runner.wait()  # steps in flight have no part in what follows
    return run


def time_first_token(engine: LLMEngine, prompt: Any) -> float:
    """Seconds until a request has a token, alone on an idle engine; ends it afterwards."""
    began = time.perf_counter()
    engine.add_request("first token", prompt, greedy(2))
    outputs: list[EngineCoreOutput] = []
    while not any(output.new_token_ids for output in outputs):
        outputs = engine.core.step()
        engine.take(outputs)
    seconds = time.perf_counter() - began
    end_all(engine)
    return seconds


@contextlib.contextmanager
def decoding(
    engine: LLMEngine,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    adapters: Sequence[LoRARequest | None] | None = None,
) -> Iterator[Callable[[], list[EngineCoreOutput]]]:
    """Requests of an idle engine that decode: their prompts are computed, and SETTLING_STEPS steps are behind. Gives a function that
    runs a step of them; ends them afterwards.

    A request whose prompt is computed early decodes during the others' prompts: `params` must allow enough tokens for that.
    Raises ConfigError if not all run at once, e.g. for lack of cache, and RequestFailedError if the engine ends a request with an
    error.
    """
    core: Any = engine.core
    for i, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"decode {i}", prompt, its, lora_request=adapters[i] if adapters else None)
    have_token: set[str] = set()

    def step() -> list[EngineCoreOutput]:
        outputs: list[EngineCoreOutput] = core.step()
        engine.take(outputs)
        for output in outputs:
            if output.error_kind is not None:
                raise RequestFailedError(f"{output.request_id} failed: {output.stop_reason}", output.error_kind)
        have_token.update(output.request_id for output in outputs if output.new_token_ids)
        return outputs

    try:
        while len(have_token) < len(prompts) or core.stats().num_waiting:
            step()
            if engine.get_num_unfinished_requests() < len(prompts):
                break
        for _ in range(SETTLING_STEPS):
            step()
        if core.stats().num_running < len(prompts):
            raise ConfigError(
                f"the engine cannot run {len(prompts)} requests at once for so long; lower their lengths or number"
            )
        yield step
    finally:
        end_all(engine)


def time_decodes(
    engine: LLMEngine,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    *,
    num_steps: int,
    then: Callable[[Run, Callable[[], Any]], None] | None = None,
) -> Run:
    """Time decode steps alone. then: called at the end with the run and a function that runs one more step of the same requests, for
    which `params` must allow. Raises as `decoding` does."""
    core: Any = engine.core
    num_rows, num_pure = len(prompts), 0
    with decoding(engine, prompts, params) as step:
        # The latest token of a request is not in the cache yet.
        contexts = [len(request.token_ids) - 1 for request in core.scheduler.running]
        before, meter, ends = core.stats(), Meter(core), [time.perf_counter()]
        for _ in range(num_steps):
            outputs = step()
            ends.append(time.perf_counter())
            num_pure += [len(output.new_token_ids) for output in outputs] == [1] * num_rows
        after, (num_dispatched, host_ms, note) = core.stats(), meter.read()
        num_scheduled = after.num_step_tokens - before.num_step_tokens
        if num_pure < num_steps:
            note = f"{num_steps - num_pure} of {num_steps} steps were not decodes of all {num_rows} rows"
        elif num_scheduled != num_dispatched * num_rows or after.num_preemptions > before.num_preemptions:
            note = f"{num_scheduled} tokens in {num_dispatched} steps of {num_rows} rows"
        step_seconds = [end - start for start, end in itertools.pairwise(ends)]
        run = Run(ends[-1] - ends[0], num_steps, host_ms, note, contexts, step_seconds)
        if then is not None:
            then(run, step)
    return run
