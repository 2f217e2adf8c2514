"""Measures the planned work at one tensor-parallel size, and reports each result immediately."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import msgspec

from jaxllm import log
from jaxllm.config import EngineConfig
from jaxllm.engine.resolve import resolve_sizes
from jaxllm.errors import ConfigError, EngineDeadError, JaxLLMError
from jaxllm.llm import LLM
from jaxllm.measuring import trace
from jaxllm.measuring.collective import time_all_reduces
from jaxllm.measuring.limits import Ceilings, ModelCost, measure_ceilings
from jaxllm.measuring.runs import SETTLING_STEPS, Run, end_all, greedy, random_prompts, time_decodes, time_requests
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.topology import Topology
from jaxllm.runner.memory import reserve_device_memory
from jaxllm.scaling.breakdown import break_down
from jaxllm.scaling.engine_options import SPARE_STEPS, engine_options
from jaxllm.scaling.plan import DECODE, MIXED, PREFILL, Plan
from jaxllm.scaling.results import AllReduce, Row, SizeResult, Skipped
from jaxllm.text.model_files import text_files

Lengths = Sequence[tuple[int, int]]
"""(prompt, output) tokens of each request."""
MAX_TRACED_PREFILL_STEPS = 6
MAX_EXTRA_RUNS = 2
"""Runs in addition to the plan's if other work happened in some."""


def measure(plan: Plan, size: int, log_level: str, send: Callable[[SizeResult | str], None]) -> None:
    """Start an engine and measure the plan's work. Raises errors that prevent measuring."""
    log.set_up(log_level)
    asked = EngineConfig.from_options(**{**plan.options, "model": plan.model, "tensor_parallel_size": size})
    send("starting the device")
    reserve_device_memory(asked.cache.gpu_memory_utilization, Topology.of(asked.parallel))
    on_gpu = jax.default_backend() != "cpu"
    directory = text_files(asked.model.model, revision=asked.model.revision, download_dir=asked.model.download_dir)
    # It reports an impossible engine before anything is measured.
    options = engine_options(
        plan, size, lambda options: resolve_sizes(EngineConfig.from_options(**options), directory), on_gpu=on_gpu
    )
    send("measuring the device's limits")
    ceilings = measure_ceilings(tiny=not on_gpu, dtype="bfloat16" if on_gpu else "float32")
    send(SizeResult(size, limits=msgspec.to_builtins(ceilings)))
    send("starting the engine")
    start = time.perf_counter()
    llm = LLM.from_config(EngineConfig.from_options(**options))
    core: Any = llm.llm_engine.core
    if core.config.compile.warmup == "background":
        # Rare programs are not needed here; compiling and tuning them would disturb the measurements.
        core.runner.programs.shutdown()
    measurer = Measurer(plan, llm, ceilings, send)
    devices = jax.devices()
    engine = {
        "device": devices[0].device_kind,
        "platform": devices[0].platform,
        "num_devices": len(devices),
        "jax": jax.__version__,
        "start_seconds": time.perf_counter() - start,
        "start_times": core.start_times.describe(),
        "num_programs": len(core.runner.programs),
        "weight_bytes": sum(x.nbytes for x in core.runner.params),
        "read_bytes_per_step": measurer.cost.weight_bytes,
        "cache_bytes_per_token": measurer.cost.cache_bytes_per_token,
        "num_cache_tokens": core.memory_plan.num_cache_tokens,
        "num_layers": core.model_config.num_layers,
        "hidden_size": core.model_config.hidden_size,
        "kernels": {op: f"{report.implementation} ({report.check})" for op, report in core.kernels.items()},
        "options": {name: value for name, value in core.config.flat().items() if value is not None},
    }
    send(SizeResult(size, engine=engine))
    measurer.measure_all()
    send("ending the engine")
    llm.shutdown()


class Measurer:
    """An engine of one tensor-parallel size, and the measurements in order."""

    def __init__(self, plan: Plan, llm: LLM, ceilings: Ceilings, send: Callable[[SizeResult | str], None]):
        self.plan, self.llm, self.ceilings, self.send = plan, llm, ceilings, send
        core: Any = llm.llm_engine.core
        self.core, self.scheduler = core, core.config.scheduler
        self.size = Topology.of(core.config.parallel).tensor
        self.cost = ModelCost.of_arrays(core.model_config, core.runner.params, self.size)

    def measure_all(self) -> None:
        """Measure decodes, prefill, mixed work, all-reduces. Raises errors that end the engine; skips and reports others."""
        plan = self.plan
        for batch in plan.decode_batches(self.size):
            with self._work(DECODE, batch):
                self.decode(batch)
        prompts = [(plan.input_len, 1)] * plan.prefill_prompts
        for work, lengths in ((PREFILL, prompts), (MIXED, plan.requests)):
            if work in plan.works:
                with self._work(work, len(lengths)):
                    self._measure(work, lengths, partial(time_requests, self.llm, lengths))
        if PREFILL in plan.works and plan.trace_steps:
            few = prompts[: max(1, MAX_TRACED_PREFILL_STEPS * self.scheduler.max_num_batched_tokens // plan.input_len)]
            with self._work("breakdown of prefill", len(few)):
                self.break_down_prefill(few)
        if self.size > 1:
            with self._work("all-reduce"):
                self.all_reduces()

    @contextlib.contextmanager
    def _work(self, name: str, num_requests: int = 0) -> Iterator[None]:
        """Report that a piece of work begins, and if it fails, why it is skipped."""
        self.send(f"{name} of {num_requests} request{'s' * (num_requests != 1)}" if num_requests else name)
        try:
            yield
        except EngineDeadError:
            raise
        except (JaxLLMError, RuntimeError, ValueError, OSError) as error:  # RuntimeError: JAX's own
            self._report(skipped=[Skipped(self.size, name, num_requests, one_line(error))])
            end_all(self.llm.llm_engine)

    def _report(self, **found: Any) -> None:
        self.send(SizeResult(self.size, **found))

    def _measure(self, work: str, lengths: Lengths, run: Callable[[int], Run]) -> None:
        """Report the plan's number of runs in which nothing else happened; if there are none, those that there are. `run` takes the
        number of the attempt."""
        runs: list[Run] = []
        pure: list[Run] = []
        while len(pure) < self.plan.repeats and len(runs) < self.plan.repeats + MAX_EXTRA_RUNS:
            runs.append(run(len(runs)))
            pure = [each for each in runs if each.note is None]
        runs = pure or runs
        best = min(runs, key=lambda each: each.seconds)
        prompts, outputs = zip(*lengths, strict=True)
        if work == DECODE:
            num_steps, lengths = best.num_steps, [(context, best.num_steps + 1) for context in best.contexts]
        else:
            num_steps = max(*outputs, -(-sum(outputs) // self.scheduler.max_num_seqs))
        least = self.cost.work(lengths, num_steps=num_steps, skip_prompts=work == DECODE)
        row = Row(
            self.size,
            work,
            len(prompts),
            num_tokens=sum(prompts if work == PREFILL else outputs),
            num_steps=best.num_steps,
            run_seconds=[each.seconds for each in runs],
            least_seconds=self.ceilings.seconds(least),
            num_prompt_tokens=sum(prompts),
            mean_context=best.mean_context,
            step_seconds=best.step_seconds,
            host_ms=best.host_ms,
            note=best.note,
        )
        self._report(rows=[row])

    def decode(self, batch: int) -> None:
        """Steps in which `batch` requests get a token each, and a breakdown of some more of them."""
        plan, engine, num_steps = self.plan, self.llm.llm_engine, self.plan.output_len - 1
        longest, room = engine.max_model_len, self.core.memory_plan.num_cache_tokens
        needed = plan.input_len + num_steps + SETTLING_STEPS + plan.trace_steps + SPARE_STEPS
        if batch > self.scheduler.max_num_seqs or needed > longest or batch * needed > room:
            raise ConfigError(
                f"{batch} requests of {needed} tokens are too many for max_num_seqs {self.scheduler.max_num_seqs}, max_model_len "
                f"{longest} or a KV cache of {room} tokens; raise these or lower --input-len or --output-len"
            )

        def run(attempt: int) -> Run:
            prompts = random_prompts([plan.input_len] * batch, self.core.model_config.vocab_size, seed=attempt)
            params = [greedy(longest - plan.input_len)] * batch
            is_last = attempt == plan.repeats - 1 and plan.trace_steps > 0
            return time_decodes(engine, prompts, params, num_steps=num_steps, then=self._break_down_decode if is_last else None)

        self._measure(DECODE, [(plan.input_len, num_steps)] * batch, run)

    def _break_down_decode(self, untraced: Run, step: Callable[[], Any]) -> None:
        """A breakdown of some more steps of the running requests. If it fails, the run still counts."""
        runner, batch = self.core.runner, len(untraced.contexts)

        def steps(count: int) -> int:
            """Not always as many as are read: the loop may change how many are in flight."""
            before = runner.num_steps
            for _ in range(count):
                step()
            runner.wait()  # those in flight must count with these, not with the next
            return int(runner.num_steps - before)

        with self._work("breakdown of decode", batch):
            found, num_steps = trace.record(partial(steps, 5), partial(steps, self.plan.trace_steps))
            self._break_down(found, DECODE, batch, num_steps, untraced)

    def break_down_prefill(self, few: Lengths) -> None:
        """A breakdown of some prompts, whose steps are timed without the profiler before."""
        seed = self.plan.repeats + MAX_EXTRA_RUNS  # prompts that no run had
        untraced = time_requests(self.llm, few, seed)
        found, run = trace.record(
            lambda: time_requests(self.llm, few[:1], seed + 1), lambda: time_requests(self.llm, few, seed + 2)
        )
        self._break_down(found, PREFILL, len(few), run.num_steps, untraced)

    def _break_down(self, found: trace.Trace, work: str, num_requests: int, num_steps: int, untraced: Run) -> None:
        step_seconds = untraced.seconds / untraced.num_steps
        breakdown = break_down(found, self.size, work, num_requests, num_steps=num_steps, step_seconds=step_seconds)
        self._report(breakdowns=[breakdown])

    def all_reduces(self) -> None:
        """The time of an all-reduce of the hidden states of each batch size, and of a whole step of prompt tokens."""
        config = self.core.model_config
        width, dtype = config.hidden_size, jax.numpy.dtype(config.dtype)
        sizes = sorted({*self.plan.decode_batches(self.size), self.scheduler.max_num_batched_tokens})
        for by, rows, seconds in time_all_reduces(make_mesh(self.size), sizes, width, str(dtype)):
            num_bytes, per_step = rows * width * dtype.itemsize, 2 * config.num_layers
            found = AllReduce(self.size, rows, width, str(dtype), num_bytes, seconds, per_step, implementation=by)
            self._report(all_reduces=[found])


def one_line(error: BaseException) -> str:
    """The error's first line: the project's own messages unchanged, others with their type."""
    text = next(filter(None, map(str.strip, str(error).splitlines())), "")
    return text if text and isinstance(error, JaxLLMError) else f"{type(error).__name__}: {text}".removesuffix(": ")
