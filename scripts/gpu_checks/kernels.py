"""Every variant of every op's check cases against its reference, and that repeated runs give the same bits."""

import collections
import concurrent.futures
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from pallas_kernels.checking.host import same_bits
from scripts.gpu_checks import Outcome, left_out
from scripts.kernels import Case, cases
from scripts.kernels.compiling import first_line

LARGE_BYTES = 128 << 20
"""Bytes of a case's arrays: cases beyond run one at a time, because references and plain XLA take several times as much."""


@dataclass(frozen=True)
class _Shaped:
    op: str
    case: Case
    shapes: tuple[Any, ...]
    num_bytes: int

    def name(self, label: str) -> str:
        """Name of a variant's outcome."""
        return f"{self.op}: {self.case.name}, {label}"

    def without(self, done: Collection[str]) -> "_Shaped":
        """The variants whose outcomes are not named."""
        variants = {label: run for label, run in self.case.variants.items() if self.name(label) not in done}
        return replace(self, case=replace(self.case, variants=variants))


def check(
    *,
    ops: Iterable[str],
    tiny: bool,
    deadline: float,
    repeats: int,
    share: tuple[int, int] = (0, 1),
    done: Collection[str] = (),
) -> Iterator[Outcome]:
    """An outcome per case and variant of this share (index, number of shares), small cases first, in the order of their ends.

    A thread takes a case from lowering to comparing, so that some compile while another runs. Cases that have not begun by the
    deadline (`time.perf_counter`) are one failed outcome per op. What is named in `done` is left out.
    """
    index, num_shares = share
    shaped = []
    for op, case in cases("check", ops, tiny=tiny):
        try:
            carry, constants = jax.eval_shape(case.make)
        except Exception as problem:
            if index == 0:
                yield Outcome(f"{op}: {case.name}", False, f"no arrays: {first_line(problem)}")
            continue
        shapes = (carry, *constants)
        num_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        shaped.append(_Shaped(op, case, shapes, num_bytes))
    shaped = sorted(shaped, key=lambda found: found.num_bytes)[index::num_shares]
    shaped = [rest for found in shaped if (rest := found.without(done)).case.variants]
    runner = _Runner(deadline, repeats)
    left: dict[str, list[str]] = {}
    with concurrent.futures.ThreadPoolExecutor(num_threads(num_shares)) as pool:
        jobs = {pool.submit(runner.outcomes, found): found for found in shaped}
        for job in concurrent.futures.as_completed(jobs):
            found = jobs[job]
            outcomes = job.result()
            if outcomes is None:
                left.setdefault(found.op, []).append(found.case.name)
            else:
                yield from outcomes
    for op, names in left.items():
        yield left_out(f"{op}: {len(names)} cases", *names)
    told = ", ".join(f"{stage} {seconds:.0f}" for stage, seconds in runner.seconds.items())
    print(f"kernels, share {index + 1} of {num_shares}, seconds of all threads: {told}", file=sys.stderr)


def num_threads(num_shares: int) -> int:
    """So many that all shares together leave two cores."""
    return max(1, ((os.cpu_count() or 2) - 2) // num_shares)


class _Runner:
    """Runs cases, in several threads at once."""

    def __init__(self, deadline: float, repeats: int):
        self.deadline, self.repeats = deadline, repeats
        self._lowering = threading.Lock()  # holds the interpreter anyway
        self._large = threading.Lock()
        self.seconds: collections.Counter[str] = collections.Counter()
        """Seconds of all threads, by activity."""

    def outcomes(self, found: _Shaped) -> list[Outcome] | None:
        """Outcomes of each variant of a case; None if there is no time for it."""
        if time.perf_counter() > self.deadline:
            return None
        with self._large if found.num_bytes > LARGE_BYTES else contextlib.nullcontext():
            return self._run(found)

    def _run(self, found: _Shaped) -> list[Outcome]:
        case, arrays, outcomes = found.case, None, []
        for label, variant in case.variants.items():
            name = found.name(label)
            try:
                with self._lowering, self._timed("lowering"):
                    lowered = jax.jit(variant).lower(*found.shapes)
                with self._timed(f"compiling {label}"):
                    run = lowered.compile()
                with self._timed("making arrays"):
                    arrays = arrays or case.make()
                outcomes.append(self._compare(name, case, run, *arrays))
            except Exception as problem:
                outcomes.append(Outcome(name, False, first_line(problem)))
        return outcomes

    def _compare(self, name: str, case: Case, run: Any, carry: Any, constants: Any) -> Outcome:
        with self._timed("running and comparing"):
            got = run(carry, *constants)
            error = case.error(carry, constants, got)
        with self._timed("repeating"):
            differing = count_differing(run, carry, constants, got, self.repeats)
        detail = f"error {error:.1e}, allowed {case.tolerance:.0e}"
        if differing:
            detail += f"; {differing} of {self.repeats} repeats differ"
        return Outcome(name, error <= case.tolerance and not differing, detail)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - begun


def count_differing(run: Any, carry: Any, constants: Any, expected: Any, repeats: int) -> int:
    """How many more runs, dispatched together, give other bits than the first."""
    others = [run(carry, *constants) for _ in range(repeats)]
    # On the host: on the device each shape would need a program.
    first = [np.asarray(leaf) for leaf in jax.tree.leaves(expected)]

    def equals_first(other: Any) -> bool:
        return all(same_bits(a, np.asarray(b)) for a, b in zip(first, jax.tree.leaves(other), strict=True))

    return sum(not equals_first(other) for other in others)
