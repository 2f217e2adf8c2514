"""Times decode steps alone: all prompts are computed before, and no request arrives or ends during the measurement."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import RequestFailedError
from jaxllm.llm_engine import LLMEngine
from jaxllm.outputs import EngineCoreOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.scaling.host_times import HostTimes, num_compiled
from jaxllm.scaling.requests import end_all

SETTLING_STEPS = 12
"""Decode steps before the clock starts: those in flight with the last prompt, and those by which the loop chooses its depth."""


@dataclass(frozen=True)
class DecodeTimes:
    """One stretch of steps, from the tokens of one step to those of `num_steps` later."""

    seconds: float
    num_steps: int
    contexts: list[int]
    """Tokens of each request in the cache before the first of these steps."""
    details: dict[str, float]
    impurity: str | None
    """Other work in the stretch; None if every step was a decode of all requests."""
    step_seconds: list[float]
    """From the tokens of one step to those of the next: `num_steps` of them, `seconds` together."""


def time_decodes(
    engine: LLMEngine,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    *,
    num_steps: int,
    then: Callable[[Callable[[], bool]], None] | None = None,
) -> DecodeTimes | None:
    """Time steps of an idle engine on these prompts. None if it cannot run all at once that long, e.g. for lack of cache.

    A request whose prompt is computed early decodes during the others' prompts: `params` must allow enough tokens for that,
    and for `then`, which is called after the stretch with a function that runs one more step of the same requests.
    Raises RequestFailedError if the engine ends a request with an error.
    """
    core: Any = engine.core
    for i, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"decode {i}", prompt, its)
    num_rows = len(prompts)
    have_token: set[str] = set()

    def step() -> bool:
        """Whether it gave each request one token."""
        outputs: list[EngineCoreOutput] = core.step()
        engine.take(outputs)
        for output in outputs:
            if output.error_kind is not None:
                raise RequestFailedError(f"{output.request_id} failed: {output.stop_reason}", output.error_kind)
        have_token.update(output.request_id for output in outputs if output.new_token_ids)
        return len(outputs) == num_rows and all(len(output.new_token_ids) == 1 for output in outputs)

    try:
        while len(have_token) < num_rows or core.scheduler.waiting:
            if engine.get_num_unfinished_requests() < num_rows:
                return None
            step()
        for _ in range(SETTLING_STEPS):
            step()
        if len(core.scheduler.running) < num_rows:
            return None
        # The latest token of a request is not in the cache yet.
        contexts = [len(request.token_ids) - 1 for request in core.scheduler.running]
        before, host, compiled, pure = core.stats(), HostTimes(core), num_compiled(core), 0
        ends = [time.perf_counter()]
        for _ in range(num_steps):
            pure += step()
            ends.append(time.perf_counter())
        after, details, compiled = core.stats(), host.per_step(), num_compiled(core) - compiled
        if then is not None:
            then(step)
    finally:
        end_all(engine)
    details["context"] = sum(contexts) / num_rows + (num_steps - 1) / 2
    impurity = None
    num_scheduled = after.num_step_tokens - before.num_step_tokens
    if pure < num_steps:
        impurity = f"{num_steps - pure} of {num_steps} steps were not decodes of all {num_rows} rows"
    elif num_scheduled != details["steps"] * num_rows or after.num_preemptions > before.num_preemptions:
        impurity = f"{num_scheduled} tokens in {details['steps']:.0f} steps of {num_rows} rows"
    elif compiled:
        impurity = f"{compiled} programs were compiled meanwhile"
    step_seconds = [end - start for start, end in itertools.pairwise(ends)]
    return DecodeTimes(ends[-1] - ends[0], num_steps, contexts, details, impurity, step_seconds)
