"""Runs cases: every program compiled at once, each run twice, the results compared with what is right and with each other."""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.compiling import Compiler, first_line
from pallas_kernels.checking.host import same_bits

COMPILE_SECONDS = 300.0
RUN_SECONDS = 60.0
"""A run of any case takes milliseconds."""


@dataclass(frozen=True)
class Fault:
    """Fault of a case."""

    text: str
    error: BaseException | None = None
    """The exception that was raised, if any."""
    hangs: bool = False
    """The program did not end: the device may never answer again."""


def check(cases: Sequence[Case], is_fatal: Callable[[BaseException], bool] = lambda error: False) -> list[Fault | None]:
    """A fault or None for each case, in their order, of its only variant.

    After a program that hangs, or an error after which the device is of no use (`is_fatal`), nothing more is run: the list ends there.
    A program that hangs is given up after RUN_SECONDS, but it cannot be stopped: it holds the device until the process ends.
    """
    compiler = Compiler()
    try:
        pending = []
        for case in cases:
            carry, constants = case.make()
            (function,) = case.variants.values()
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (carry, *constants))
            pending.append((case, carry, constants, compiler.submit(function, *shapes)))
        faults: list[concurrent.futures.Future[Fault | None]] = []
        for case, carry, constants, program in pending:
            try:
                first, second = _run_twice(program.result(timeout=COMPILE_SECONDS), (carry, *constants))
            except Exception as error:  # compilers and drivers raise many types
                faults.append(_done(Fault(first_line(error), error, hangs=isinstance(error, HangError))))
                if isinstance(error, HangError) or is_fatal(error):
                    break
            else:  # compared while the next one runs
                faults.append(compiler.pool.submit(_fault, case, carry, constants, first, second))
        return [fault.result() for fault in faults]
    finally:
        compiler.close()


def _done(fault: Fault) -> "concurrent.futures.Future[Fault | None]":
    future: concurrent.futures.Future[Fault | None] = concurrent.futures.Future()
    future.set_result(fault)
    return future


def _fault(case: Case, carry: Any, constants: tuple[Any, ...], first: Any, second: Any) -> Fault | None:
    try:
        error = case.error(carry, constants, first)
    except Exception as problem:  # results of another shape than is right
        return Fault(first_line(problem), problem)
    if not error <= case.tolerance:
        return Fault(f"error {error:.2g}, allowed {case.tolerance:.2g}")
    if not all(same_bits(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)):
        return Fault("two runs give different bits")
    return None


class HangError(Exception):
    """A program did not end in time."""


def _run_twice(run: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """Two results on the host. In a thread of its own, which is left behind if the program hangs."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            arrays = jax.device_put(arguments)
            both = [run(*arrays), run(*arrays)]  # both alive: the second cannot lie where the first does
            results.extend(jax.tree.map(np.asarray, both))
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=work, name="kernel-check", daemon=True)
    worker.start()
    worker.join(RUN_SECONDS)
    if worker.is_alive():
        raise HangError(f"it does not end within {RUN_SECONDS:g} s")
    if errors:
        raise errors[0]
    return results[0], results[1]
