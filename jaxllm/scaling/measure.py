"""Measures the planned work at one tensor-parallel size, and reports each result immediately."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax

from jaxllm.errors import EngineDeadError, JaxLLMError
from jaxllm.llm import LLM
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.topology import Topology
from jaxllm.scaling import trace
from jaxllm.scaling.breakdown import break_down
from jaxllm.scaling.collective import time_all_reduces
from jaxllm.scaling.decodes import SETTLING_STEPS, DecodeTimes, time_decodes
from jaxllm.scaling.engine_options import SPARE_STEPS
from jaxllm.scaling.host_times import HostTimes, num_compiled
from jaxllm.scaling.limits import Ceilings, ModelCost
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.requests import end_all, greedy, random_prompts
from jaxllm.scaling.rows import DECODE, MIXED, PREFILL, AllReduce, Breakdown, Row, Skipped

Tell = Callable[[Any], None]
"""Takes a Row, Breakdown, AllReduce or Skipped, or a str that names the current activity."""
MAX_TRACED_PREFILL_STEPS = 6
MAX_EXTRA_RUNS = 2
"""Number of runs discarded because a program was compiled in them, before the row is given up."""


@dataclass(frozen=True)
class _Run:
    """One run of requests from the first one's arrival to the last one's end."""

    seconds: float
    num_steps: int
    host_ms: dict[str, float]


class Measurer:
    """An engine of one tensor-parallel size, and the measurements in order."""

    def __init__(self, plan: Plan, llm: LLM, ceilings: Ceilings, tell: Tell):
        self.plan, self.llm, self.ceilings, self.tell = plan, llm, ceilings, tell
        core: Any = llm.llm_engine.core
        self.core: Any = core
        self.size: int = Topology.of(core.config.parallel).tensor
        self.cost = ModelCost.of_arrays(core.model_config, core.runner.params, self.size)

    def measure_all(self) -> None:
        """Measure decodes, prefill, mixed work, all-reduces. Raises errors that end the engine; skips and reports others."""
        for batch in self.plan.decode_batches(self.size):
            self._guarded(DECODE, batch, partial(self.decode, batch))
        if PREFILL in self.plan.works:
            self._guarded(PREFILL, self.plan.prefill_prompts, self.prefill)
        if MIXED in self.plan.works:
            self._guarded(MIXED, len(self.plan.requests), self.mixed)
        if self.size > 1:
            self._guarded("all-reduce", 0, self.all_reduces)

    def _guarded(self, work: str, num_requests: int, measure: Callable[[], None]) -> None:
        count = f" of {num_requests} request{'s' * (num_requests != 1)}" if num_requests else ""
        self.tell(f"{work}{count}")
        try:
            measure()
        except EngineDeadError:
            raise
        except (JaxLLMError, RuntimeError, ValueError) as error:  # RuntimeError: JAX's own
            self.skip(work, num_requests, one_line(error))
            end_all(self.llm.llm_engine)

    def skip(self, work: str, num_requests: int, reason: str) -> None:
        self.tell(Skipped(self.size, work, num_requests, reason))

    # Decode

    def decode(self, batch: int) -> None:
        """Steps in which `batch` requests get a token each, and a breakdown of some more of them."""
        plan, engine = self.plan, self.llm.llm_engine
        num_steps = plan.output_len - 1
        if batch > self.core.config.scheduler.max_num_seqs:
            self.skip(DECODE, batch, f"max_num_seqs is {self.core.config.scheduler.max_num_seqs}; raise --max-num-seqs")
            return
        counted = num_steps + SETTLING_STEPS + plan.trace_steps + SPARE_STEPS
        room = engine.max_model_len - plan.input_len
        if room < counted:
            self.skip(
                DECODE,
                batch,
                f"max_model_len is {engine.max_model_len}, a prompt of {plan.input_len} and {counted} decode steps need more; "
                "lower --input-len or --output-len, or raise --max-model-len",
            )
            return
        needed, there = batch * (plan.input_len + counted), self.core.memory_plan.num_cache_tokens
        if needed > there:
            self.skip(DECODE, batch, f"needs {needed} tokens of KV cache, {there} are there")
            return
        traces: list[tuple[trace.Trace, int]] = []
        runs: list[DecodeTimes] = []
        for attempt in range(plan.repeats):
            is_last = attempt == plan.repeats - 1 and plan.trace_steps > 0
            run = time_decodes(
                engine,
                self.prompts([plan.input_len] * batch, seed=attempt),
                [greedy(room)] * batch,
                num_steps=num_steps,
                then=partial(self._trace_steps, traces) if is_last else None,
            )
            if run is None:
                self.skip(DECODE, batch, "the engine cannot run so many requests at once for so long; lower --output-len")
                return
            runs.append(run)
        best = min(runs, key=lambda run: (run.impurity is not None, run.seconds))
        work = self.cost.work([(n, num_steps + 1) for n in best.contexts], num_steps=num_steps, skip_prompts=True)
        row = Row(
            self.size,
            DECODE,
            batch,
            num_tokens=batch * num_steps,
            num_steps=num_steps,
            run_seconds=[run.seconds for run in runs if run.impurity == best.impurity],
            least_seconds=self.ceilings.seconds(work),
            num_prompt_tokens=batch * plan.input_len,
            mean_context=best.details["context"],
            step_seconds=best.step_seconds,
            host_ms=_host_ms(best.details),
            note=best.impurity,
        )
        self.tell(row)
        for found, num_traced in traces:
            self._tell_breakdown(found, DECODE, batch, num_traced, row.seconds / num_steps)

    def _trace_steps(self, traces: list[tuple[trace.Trace, int]], step: Callable[[], bool]) -> None:
        """Trace some more decode steps of the running requests. A failure here loses only the breakdown."""
        try:
            with trace.record() as (recording, stretch):
                for _ in range(5):  # the device goes idle while the profiler starts
                    step()
                # Steps in flight must not be counted with the stretch, and the stretch's own must not be omitted.
                self.core.runner.wait()
                before = self.core.runner.num_steps
                with stretch:
                    for _ in range(self.plan.trace_steps):
                        step()
                    self.core.runner.wait()
        except (RuntimeError, ValueError, OSError) as error:
            num_requests = self.llm.llm_engine.get_num_unfinished_requests()
            self.skip("breakdown of decode", num_requests, one_line(error))
            return
        if recording.trace is not None:
            # Not always as many as were read: the loop may have changed how many are in flight.
            traces.append((recording.trace, self.core.runner.num_steps - before))

    # Prefill and mixed work

    def prefill(self) -> None:
        """Prompts that get one token each, and a breakdown of some of them."""
        plan = self.plan
        lengths = [(plan.input_len, 1)] * plan.prefill_prompts
        runs = self._runs(lengths)
        work = self.cost.work(lengths, num_steps=1)
        self._tell_row(PREFILL, lengths, runs, sum(prompt for prompt, _ in lengths), self.ceilings.seconds(work))
        if plan.trace_steps:
            step_tokens = self.core.config.scheduler.max_num_batched_tokens
            few = lengths[: max(1, MAX_TRACED_PREFILL_STEPS * step_tokens // plan.input_len)]
            untraced = self._run(few, seed=plan.repeats)
            try:
                with trace.record() as (recording, stretch):
                    self._run(few[:1], seed=0)
                    with stretch:
                        traced = self._run(few, seed=plan.repeats + 1)
                        self.core.runner.wait()
            except (ValueError, OSError) as error:
                self.skip("breakdown of prefill", len(few), one_line(error))
                return
            if recording.trace is not None:
                seconds = untraced.seconds / untraced.num_steps
                self._tell_breakdown(recording.trace, PREFILL, len(few), traced.num_steps, seconds)

    def mixed(self) -> None:
        """Requests of differing lengths, all given at once."""
        lengths = list(self.plan.requests)
        runs = self._runs(lengths)
        num_output = sum(output for _, output in lengths)
        max_rows = self.core.config.scheduler.max_num_seqs
        num_steps = max(max(output for _, output in lengths), -(-num_output // max_rows))
        self._tell_row(MIXED, lengths, runs, num_output, self.ceilings.seconds(self.cost.work(lengths, num_steps=num_steps)))

    def _runs(self, lengths: Sequence[tuple[int, int]]) -> list[_Run]:
        """The valid runs: those in which no program was compiled. Raises ValueError if there is none."""
        runs: list[_Run] = []
        for attempt in range(self.plan.repeats + MAX_EXTRA_RUNS):
            before = num_compiled(self.core)
            run = self._run(lengths, seed=attempt)
            if num_compiled(self.core) == before:
                runs.append(run)
            if len(runs) == self.plan.repeats:
                break
        if not runs:
            raise ValueError("programs were compiled in every run; give --warmup all")
        return runs

    def _run(self, lengths: Sequence[tuple[int, int]], seed: int) -> _Run:
        prompts = self.prompts([prompt for prompt, _ in lengths], seed=seed)
        params = [greedy(output) for _, output in lengths]
        host = HostTimes(self.core)
        start = time.perf_counter()
        outputs = self.llm.generate(cast(Any, prompts), params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_written = sum(len(output.outputs[0].token_ids) for output in outputs)
        if num_written != (wanted := sum(output for _, output in lengths)):
            raise ValueError(f"{num_written} tokens were written instead of {wanted}; raise --max-model-len")
        details = host.per_step()
        return _Run(seconds, int(details["steps"]), _host_ms(details))

    def _tell_row(
        self, work: str, lengths: Sequence[tuple[int, int]], runs: Sequence[_Run], num_tokens: int, least_seconds: float
    ) -> None:
        best = min(runs, key=lambda run: run.seconds)
        self.tell(
            Row(
                self.size,
                work,
                len(lengths),
                num_tokens=num_tokens,
                num_steps=best.num_steps,
                run_seconds=[run.seconds for run in runs],
                least_seconds=least_seconds,
                num_prompt_tokens=sum(prompt for prompt, _ in lengths),
                host_ms=best.host_ms,
            )
        )

    # Communication, and shared helpers

    def all_reduces(self) -> None:
        """The time of an all-reduce of the hidden states of each batch size, and of a whole step of prompt tokens."""
        config, scheduler = self.core.model_config, self.core.config.scheduler
        dtype = jax.numpy.dtype(config.dtype)
        sizes = sorted({*self.plan.decode_batches(self.size), scheduler.max_num_batched_tokens})
        for implementation, rows, seconds in time_all_reduces(make_mesh(self.size), sizes, config.hidden_size, str(dtype)):
            num_bytes, per_step = rows * config.hidden_size * dtype.itemsize, 2 * config.num_layers
            self.tell(
                AllReduce(
                    self.size, rows, config.hidden_size, str(dtype), num_bytes, seconds, per_step, implementation=implementation
                )
            )

    def prompts(self, lengths: Sequence[int], *, seed: int) -> list[dict[str, list[int]]]:
        return random_prompts(lengths, self.core.model_config.vocab_size, seed)

    def _tell_breakdown(self, found: trace.Trace, work: str, num_requests: int, num_steps: int, seconds: float) -> None:
        breakdown: Breakdown | None = break_down(
            found,
            tensor_parallel_size=self.size,
            work=work,
            num_requests=num_requests,
            num_steps=num_steps,
            step_seconds=seconds,
        )
        if breakdown is None:
            self.skip(f"breakdown of {work}", num_requests, "the profiler's trace holds nothing of the device")
        else:
            self.tell(breakdown)


def one_line(error: BaseException) -> str:
    """The error in one line: the project's own messages unchanged, others with their type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if isinstance(error, JaxLLMError):
        return text or type(error).__name__
    if "RESOURCE_EXHAUSTED" in text:
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _host_ms(details: dict[str, float]) -> dict[str, float]:
    return {name: details[f"{name}_ms_per_step"] for name in ("dispatch", "launch", "wait")}
