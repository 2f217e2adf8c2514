"""Runs the experiment size by size, and keeps all finished results if a later size fails."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from jaxllm.scaling import report
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.results import Results, SizeResult


def run(results: Results, sizes: Sequence[int], measure: Callable[[Plan, SizeResult], None], output: Path | None) -> None:
    """Measure these sizes of the plan, and add them to `results`. Skips sizes that it already has without a failure.

    Rewrites all files under `output` after each size. A Ctrl-C ends the current size and skips the others; it sets
    `results.interrupted`. measure: fills a size's result.
    """
    for size in sorted(set(sizes) - results.complete_sizes):
        result = SizeResult(size)
        others = [other for other in results.sizes if other.tensor_parallel_size != size]
        results.sizes = sorted([*others, result], key=lambda each: each.tensor_parallel_size)
        try:
            measure(results.plan, result)
        except KeyboardInterrupt:
            result.failure = "interrupted"
            results.interrupted = True
        if output is not None:
            report.write(output, results)
        if results.interrupted:
            break


def join(paths: Sequence[Path], plan: Plan | None) -> Results:
    """The results of earlier runs as one, with a plan of all that they and `plan` measure. Raises ConfigError.

    Where two have the same size, the later file's counts.
    """
    files = [report.read(path) for path in paths]
    plans = [*([] if plan is None else [plan]), *(results.plan for results in files)]
    sizes = {size.tensor_parallel_size: size for results in files for size in results.sizes}
    return msgspec.structs.replace(
        files[0],
        plan=functools.reduce(Plan.joined, plans),
        sizes=[sizes[number] for number in sorted(sizes)],
        interrupted=False,
    )
