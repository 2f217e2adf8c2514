"""The demo model over several devices answers requests of every kind as over one: mixed, preempted, after failures and after sleep."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxllm import LLM
from jaxllm.engine.fault_points import injected
from scripts.gpu_checks import Outcome, failures, left_out, traffic
from scripts.gpu_checks.traffic import Answer
from scripts.kernels.compiling import first_line

LINE_SECONDS = 90.0
"""A line that takes longer has failed. One in which a device fails alone takes 40 s: the others wait for it for 30."""
PLAIN = ("greedy", "seeded", "long")
"""Kinds with few programs."""
SCORED = "prompt logprobs"
MAX_TIES_OF = 25
"""One in so many requests may have another token that is as likely."""
FP8_FACTOR = 0.7
"""Largest factor of the distance between fp8 and float32."""
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
ONE_LAYER = {"hf_overrides": {"num_hidden_layers": 1}, "load_format": "dummy"}
"""For a machine without a GPU."""
Answers = dict[str, list[Answer]]


def check(*, tiny: bool, deadline: float, sizes: Sequence[int]) -> Iterator[Outcome]:
    """All kinds of requests over the largest number of devices, the plain ones over the others; nothing begins after the deadline.
    tiny: without fp8, which needs two more engines."""
    largest, run = sizes[-1], _Run(tiny, deadline)
    yield from run.all_kinds(1)
    yield from run.all_kinds(largest)
    for size in sizes[:-1]:
        yield from run.plain_kinds(size)
    if not tiny:
        yield from run.fp8(largest)


class _Run:
    """Engines one after the other; those over one device say what is right."""

    def __init__(self, tiny: bool, deadline: float):
        self._tiny, self._deadline = tiny, deadline
        self._size = traffic.TINY if tiny else traffic.FULL
        self._expected: Answers = {}
        self._vectors: list[Any] = []

    def all_kinds(self, num_devices: int) -> Iterator[Outcome]:
        """One engine, and everything that happens to it."""
        title = f"{num_devices} devices, the demo model"
        with full_precision(), contextlib.ExitStack() as stack:
            opened: list[LLM] = []

            def first() -> tuple[bool, str]:
                opened.append(stack.enter_context(self._engine(num_devices)))
                found = traffic.answers(opened[0], self._size)
                if num_devices == 1:
                    self._expected, self._vectors = found, traffic.vectors(opened[0], self._size)
                    return True, "what is right"
                passed, detail = self._compare(opened[0], found)
                num_preemptions = _stats(opened[0]).num_preemptions
                return passed and num_preemptions > 0, f"{detail}; {num_preemptions} preemptions, at least 1 is needed"

            outcome = guarded(f"{title}: requests of every kind", self._deadline, first)
            if num_devices > 1 or outcome.failed:
                yield outcome
            if num_devices == 1 or not opened:
                return
            for name, line in self._lines(opened[0], num_devices).items():
                yield guarded(f"{title}: {name}", self._deadline, line)

    def plain_kinds(self, num_devices: int) -> Iterator[Outcome]:
        """An engine for the requests that need few programs."""

        def line() -> tuple[bool, str]:
            with full_precision(), self._engine(num_devices) as llm:
                return self._compare(llm, traffic.answers(llm, self._size, PLAIN))

        yield guarded(f"{num_devices} devices, the demo model: {', '.join(PLAIN)} requests", self._deadline, line)

    def fp8(self, num_devices: int) -> Iterator[Outcome]:
        """Fp8 weights and cache: where a sum's last bit decides how a value is rounded, all that follows moves, so tokens may differ. The
        scores of given tokens must be nearer to one device's than those are to float32's."""
        found: list[Answers] = []

        def line() -> tuple[bool, str]:
            for size in (1, num_devices):
                with full_precision(), self._engine(size, **FP8) as llm:
                    found.append(traffic.answers(llm, self._size, (*PLAIN, SCORED)))
            off = traffic.off_in_scores(found[1][SCORED], found[0][SCORED])
            noise = traffic.off_in_scores(found[0][SCORED], self._expected[SCORED])
            count = sum(map(len, found[0].values()))
            num_equal = count - len(traffic.differing(found[1], found[0]))
            limit = FP8_FACTOR * noise
            return (
                off < limit,
                f"scores off by {off:.1e}, at most {limit:.1e}; {num_equal} of {count} requests answered as by one device",
            )

        yield guarded(f"{num_devices} devices, the demo model, fp8 weights and cache", self._deadline, line)

    def _lines(self, llm: LLM, num_devices: int) -> dict[str, Callable[[], tuple[bool, str]]]:
        """Steps of an engine's test, in this order, by the name of the line."""

        def again() -> tuple[bool, str]:
            before = _stats(llm).prefix_cache_hits
            passed, detail = self._compare(llm, traffic.answers(llm, self._size))
            num_hits = _stats(llm).prefix_cache_hits - before
            return passed and num_hits > 0, f"{detail}; {num_hits} tokens from the cache, at least 1 is needed"

        def vectors() -> tuple[bool, str]:
            off = traffic.off_by(traffic.vectors(llm, self._size), self._vectors)
            return off < traffic.TOLERANCE, f"off by {off:.1e}, at most {traffic.TOLERANCE:.0e}"

        def injected_failures() -> tuple[bool, str]:
            before = _stats(llm).num_retried_steps
            with injected("step:3:oom,result:7:oom,draw:2:oom"):
                passed, detail = self._compare(llm, traffic.answers(llm, self._size))
            num_failed = _stats(llm).num_retried_steps - before
            return passed and num_failed > 0, f"{detail} after {num_failed} failed steps"

        def real_failure() -> tuple[bool, str]:
            core: Any = llm.llm_engine.core
            with failures.no_memory(core, jax.devices()[num_devices - 1]) as errors:
                passed, detail = self._compare(llm, traffic.answers(llm, self._size, PLAIN))
            return passed and failures.is_out_of_memory(errors), f"{detail} after {len(errors)} failed steps"

        def sleep(level: int) -> tuple[bool, str]:
            llm.sleep(level)
            llm.wake_up()
            return self._compare(llm, traffic.answers(llm, self._size, PLAIN))

        lines = {
            "the same from cached prefixes": again,
            "vectors": vectors,
            "injected out of memory": injected_failures,
            f"real out of memory on device {num_devices - 1} alone": real_failure,
            "after sleep at level 1": lambda: sleep(1),
            "after sleep at level 2": lambda: sleep(2),
        }
        if jax.default_backend() == "cpu":  # whose memory is not a pool that could be full
            lines = {name: line for name, line in lines.items() if line is not real_failure}

        def checked(line: Callable[[], tuple[bool, str]]) -> Callable[[], tuple[bool, str]]:
            def run() -> tuple[bool, str]:
                found = line()
                llm.llm_engine.check_integrity()
                return found

            return run

        return {name: checked(line) for name, line in lines.items()}

    def _compare(self, llm: LLM, found: Answers) -> tuple[bool, str]:
        """Against one device's answers: equal, or parted where two tokens are as likely as each other."""
        if not self._expected:
            return False, "one device has no answers to compare with"
        parted = traffic.differing(found, self._expected)
        count, most = sum(map(len, found.values())), max(1, sum(map(len, found.values())) // MAX_TIES_OF)
        told = f"{count - len(parted)} of {count} requests answered as by one device"
        if len(parted) > most:
            return False, f"{told}, all but {most} must be; differing: {', '.join(f'{kind} {i}' for kind, i in parted)}"
        wrong = [f"{kind} {i}" for kind, i in parted if not traffic.is_tie(llm, self._size, kind, i, self._expected[kind][i])]
        told += f", {len(parted) - len(wrong)} another token that is as likely (within {traffic.NUDGE:.0e})" * bool(parted)
        return not wrong, f"{told}, all must be" + f"; wrong: {', '.join(wrong)}" * bool(wrong)

    @contextlib.contextmanager
    def _engine(self, num_devices: int, **options: Any) -> Iterator[LLM]:
        llm = LLM(
            "demo", tensor_parallel_size=num_devices, **(ONE_LAYER if self._tiny else {}), **self._size.options(**options)
        )
        try:
            yield llm
        finally:
            llm.shutdown()


def guarded(
    name: str,
    deadline: float,
    function: Callable[..., tuple[bool, str]],
    *args: Any,
    most_seconds: float = LINE_SECONDS,
    **options: Any,
) -> Outcome:
    """Result of a function (passed, detail); an exception has failed, and so has what there is no time for or took too long."""
    begun = time.perf_counter()
    if begun > deadline:
        return left_out(name)
    try:
        passed, detail = function(*args, **options)
    except Exception as problem:
        return Outcome(name, False, first_line(problem, limit=1000))
    seconds = time.perf_counter() - begun
    return Outcome(name, passed and seconds < most_seconds, f"{detail} ({seconds:.0f} s of at most {most_seconds:.0f})")


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Float32 products in full: sums over devices are made in another order, and TF32 would let that show in tokens."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def _stats(llm: LLM) -> Any:
    core: Any = llm.llm_engine.core
    return core.stats()
