"""Runs the experiment size by size, and keeps all finished results if a later size fails."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from jaxllm.scaling import report
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.processes import Hear, Interrupted, measure_size
from jaxllm.scaling.rows import Results, SizeResult, to_json


def run(
    plan: Plan,
    results: Results,
    sizes: Sequence[int],
    *,
    variables: Mapping[str, str],
    timeout_seconds: float | None,
    logs: Path,
    log_level: str,
    output: Path | None,
    hear: Callable[[SizeResult], Hear],
) -> None:
    """Measure these sizes of the plan, and add them to `results`. Skips sizes that it already has without a failure.

    Rewrites all files under `output` after each size. A Ctrl-C ends the current size and skips the others; it sets
    `results.interrupted`. `hear` is called before each size, and returns the receiver of its results.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for size in sorted(set(sizes) - results.complete_sizes):
        results.sizes = [of for of in results.sizes if of.tensor_parallel_size != size]
        try:
            result = measure_size(
                plan,
                size,
                variables=variables,
                timeout_seconds=timeout_seconds,
                log_path=logs / f"tp{size}.log",
                log_level=log_level,
                hear=hear(SizeResult(size)),
            )
        except Interrupted as interrupt:
            result = interrupt.result
            results.interrupted = True
        results.sizes.append(result)
        results.sizes.sort(key=lambda of: of.tensor_parallel_size)
        if output is not None:
            report.write(output, plan, results)
        if results.interrupted:
            break


def earlier(paths: list[Path], plan: Plan | None) -> tuple[Plan, Results]:
    """The results of earlier runs as one, with a plan of all that they and `plan` measure. Raises ConfigError.

    Where two have the same size, the later file's counts.
    """
    merged: Results | None = None
    for path in paths:
        its_plan, results = report.read(path)
        plan = its_plan if plan is None else plan.joined(its_plan)
        if merged is None:
            merged = msgspec.structs.replace(results, sizes=[])
        kept = {size.tensor_parallel_size: size for size in (*merged.sizes, *results.sizes)}
        merged.sizes = [kept[size] for size in sorted(kept)]
        merged.interrupted = False
    assert merged is not None and plan is not None, "there is at least one path"
    merged.plan = to_json(plan)
    return plan, merged
