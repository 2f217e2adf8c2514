"""The share of a row's time in which the device runs no kernel, from a trace of such work."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.llm_engine import LLMEngine
from jaxllm.measuring import trace
from jaxllm.measuring.runs import end_all
from jaxllm.sampling_params import SamplingParams
from scripts.measuring.rows import Row


def devices(found: trace.Trace) -> list[str]:
    """The devices that ran kernels, by name."""
    return sorted({kernel.device for kernel in found.kernels})


def busy(found: trace.Trace) -> float:
    """Time in which a kernel ran, mean over the devices."""
    spans = [[(k.start, k.end) for k in found.kernels if k.device == device] for device in devices(found)]
    return sum(end - start for span in spans for start, end in merged(span)) / max(1, len(spans))


def idle_share(found: trace.Trace) -> float:
    """Share of the stretch in which the device ran no kernel."""
    return 1 - busy(found) / found.wall


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans as spans that do not touch, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def trace_idle_share(
    engine: LLMEngine,
    row: Row,
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    *,
    skip: int | None,
    num_steps: int | None,
) -> None:
    """Set `row.idle`: record `num_steps` steps after `skip` others, or the whole from the first request's arrival."""

    def add() -> None:
        for i, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(f"{row.name} {i}", prompt, its)

    def run(count: int | None) -> None:
        while engine.has_unfinished_requests() and count != 0:
            engine.step()
            count = None if count is None else count - 1

    def traced() -> None:
        if skip is None:
            add()
        run(num_steps)

    try:
        if skip is not None:
            add()
            run(skip)
        found, _ = trace.record(lambda: run(5 if skip is not None else 0), traced)
        if found.kernels:
            row.idle = share = idle_share(found)
            untraced = None
            if skip is None:
                untraced = min(row.seconds)
            elif row.unit == "ms" and num_steps:
                untraced = row.value / 1e3 * num_steps
            if untraced is not None:
                # Recording slows the host, not the kernels: what they took there, of the time that the same work takes without.
                row.idle = max(0.0, 1 - found.wall / 1e6 * (1 - share) / untraced)
            print(
                f"{row.name}: idle {row.idle:.1%}; traced {share:.1%} of {found.wall / 1e3:.1f} ms, {len(found.kernels)} launches",
                flush=True,
            )
        else:
            print(f"{row.name}: the trace holds no GPU kernels", flush=True)
    except Exception as problem:  # the figures stand without it
        print(f"{row.name}: no idle share: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
    end_all(engine)
