"""Measures the planned work at one tensor-parallel size, and reports each result immediately."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

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
from jaxllm.scaling.rows import DECODE, MIXED, PREFILL, AllReduce, Row, Skipped

Tell = Callable[[Any], None]
"""Receives a Row, Breakdown, AllReduce or Skipped, or a str that names the current activity."""
Lengths = Sequence[tuple[int, int]]
"""(prompt, output) tokens of each request."""
MAX_TRACED_PREFILL_STEPS = 6
MAX_EXTRA_RUNS = 2
"""Number of runs discarded because a program was compiled in them, before the row is given up."""


class _Run(NamedTuple):
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
        self.tell(f"{work} of {num_requests} request{'s' * (num_requests != 1)}" if num_requests else work)
        try:
            measure()
        except EngineDeadError:
            raise
        except (JaxLLMError, RuntimeError, ValueError) as error:  # RuntimeError: JAX's own
            self.tell(Skipped(self.size, work, num_requests, one_line(error)))
            end_all(self.llm.llm_engine)

    def decode(self, batch: int) -> None:
        """Steps in which `batch` requests get a token each, and a breakdown of some more of them."""
        plan, engine, num_steps = self.plan, self.llm.llm_engine, self.plan.output_len - 1
        traces: list[tuple[trace.Trace, int]] = []
        runs: list[DecodeTimes] = []
        reason = self._obstacle(batch, num_steps)
        for attempt in range(0 if reason else plan.repeats):
            is_last = attempt == plan.repeats - 1 and plan.trace_steps > 0
            run = time_decodes(
                engine,
                self._prompts([plan.input_len] * batch, seed=attempt),
                [greedy(engine.max_model_len - plan.input_len)] * batch,
                num_steps=num_steps,
                then=partial(self._trace_steps, traces) if is_last else None,
            )
            if run is None:
                reason = "the engine cannot run so many requests at once for so long; lower --output-len"
                break
            runs.append(run)
        if reason:
            self.tell(Skipped(self.size, DECODE, batch, reason))
            return
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

    def _obstacle(self, batch: int, num_steps: int) -> str | None:
        """Why the engine cannot decode so many requests at once."""
        plan, longest, max_rows = self.plan, self.llm.llm_engine.max_model_len, self.core.config.scheduler.max_num_seqs
        counted = num_steps + SETTLING_STEPS + plan.trace_steps + SPARE_STEPS
        needed, there = batch * (plan.input_len + counted), self.core.memory_plan.num_cache_tokens
        if batch > max_rows:
            return f"max_num_seqs is {max_rows}; raise --max-num-seqs"
        if longest - plan.input_len < counted:
            needs = f"max_model_len is {longest}, a prompt of {plan.input_len} and {counted} decode steps need more"
            return f"{needs}; lower --input-len or --output-len, or raise --max-model-len"
        return f"needs {needed} tokens of KV cache, {there} are there" if needed > there else None

    def _trace_steps(self, traces: list[tuple[trace.Trace, int]], step: Callable[[], bool]) -> None:
        """Trace some more decode steps of the running requests. A failure here loses only the breakdown."""
        runner = self.core.runner
        try:
            with trace.record() as (recording, stretch):
                for _ in range(5):  # the device goes idle while the profiler starts
                    step()
                # Steps in flight must not be counted with the stretch, and the stretch's own must not be omitted.
                runner.wait()
                before = runner.num_steps
                with stretch:
                    for _ in range(self.plan.trace_steps):
                        step()
                    runner.wait()
        except (RuntimeError, ValueError, OSError) as error:
            num_requests = self.llm.llm_engine.get_num_unfinished_requests()
            self.tell(Skipped(self.size, "breakdown of decode", num_requests, one_line(error)))
            return
        if recording.trace is not None:
            # Not always as many as were read: the loop may have changed how many are in flight.
            traces.append((recording.trace, runner.num_steps - before))

    def prefill(self) -> None:
        """Prompts that get one token each, and a breakdown of some of them."""
        plan = self.plan
        lengths = [(plan.input_len, 1)] * plan.prefill_prompts
        self._measure(PREFILL, lengths, sum(prompt for prompt, _ in lengths), least_steps=1)
        if not plan.trace_steps:
            return
        num_tokens = MAX_TRACED_PREFILL_STEPS * self.core.config.scheduler.max_num_batched_tokens
        few = lengths[: max(1, num_tokens // plan.input_len)]
        untraced = self._run(few, seed=plan.repeats)
        try:
            with trace.record() as (recording, stretch):
                self._run(few[:1], seed=0)
                with stretch:
                    traced = self._run(few, seed=plan.repeats + 1)
                    self.core.runner.wait()
        except (ValueError, OSError) as error:
            self.tell(Skipped(self.size, "breakdown of prefill", len(few), one_line(error)))
            return
        if recording.trace is not None:
            self._tell_breakdown(recording.trace, PREFILL, len(few), traced.num_steps, untraced.seconds / untraced.num_steps)

    def mixed(self) -> None:
        """Requests of differing lengths, all given at once."""
        outputs = [output for _, output in self.plan.requests]
        least_steps = max(max(outputs), -(-sum(outputs) // self.core.config.scheduler.max_num_seqs))
        self._measure(MIXED, self.plan.requests, sum(outputs), least_steps=least_steps)

    def _measure(self, work: str, lengths: Lengths, num_tokens: int, *, least_steps: int) -> None:
        """Report the runs in which no program was compiled. Raises ValueError if there is none."""
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
        best = min(runs, key=lambda run: run.seconds)
        self.tell(
            Row(
                self.size,
                work,
                len(lengths),
                num_tokens=num_tokens,
                num_steps=best.num_steps,
                run_seconds=[run.seconds for run in runs],
                least_seconds=self.ceilings.seconds(self.cost.work(lengths, num_steps=least_steps)),
                num_prompt_tokens=sum(prompt for prompt, _ in lengths),
                host_ms=best.host_ms,
            )
        )

    def _run(self, lengths: Lengths, seed: int) -> _Run:
        prompts = self._prompts([prompt for prompt, _ in lengths], seed=seed)
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

    def all_reduces(self) -> None:
        """The time of an all-reduce of the hidden states of each batch size, and of a whole step of prompt tokens."""
        config, scheduler = self.core.model_config, self.core.config.scheduler
        width, dtype = config.hidden_size, jax.numpy.dtype(config.dtype)
        sizes = sorted({*self.plan.decode_batches(self.size), scheduler.max_num_batched_tokens})
        for by, rows, seconds in time_all_reduces(make_mesh(self.size), sizes, width, str(dtype)):
            num_bytes, per_step = rows * width * dtype.itemsize, 2 * config.num_layers
            self.tell(AllReduce(self.size, rows, width, str(dtype), num_bytes, seconds, per_step, implementation=by))

    def _prompts(self, lengths: Sequence[int], *, seed: int) -> list[dict[str, list[int]]]:
        return random_prompts(lengths, self.core.model_config.vocab_size, seed)

    def _tell_breakdown(self, found: trace.Trace, work: str, num_requests: int, num_steps: int, seconds: float) -> None:
        where = {"tensor_parallel_size": self.size, "work": work, "num_requests": num_requests, "num_steps": num_steps}
        nothing = Skipped(self.size, f"breakdown of {work}", num_requests, "the profiler's trace holds nothing of the device")
        self.tell(break_down(found, **where, step_seconds=seconds) or nothing)  # type: ignore[arg-type]


def one_line(error: BaseException) -> str:
    """The error in one line: the project's own messages unchanged, others with their type."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, JaxLLMError):
        return text or type(error).__name__
    if "RESOURCE_EXHAUSTED" in text:
        return f"out of memory: {text}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _host_ms(details: dict[str, float]) -> dict[str, float]:
    return {name: details[f"{name}_ms_per_step"] for name in ("dispatch", "launch", "wait")}
