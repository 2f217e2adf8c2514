"""Every variant of every op's check cases against its reference, and that repeated runs give the same bits."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from scripts.gpu_checks import Outcome
from scripts.kernels import cases
from scripts.kernels.compiling import Compiler, first_line


def check(*, ops: Iterable[str], tiny: bool, deadline: float, repeats: int) -> Iterator[Outcome]:
    """An outcome per case and variant. What there is no time for is one failed outcome at the end."""
    compiler = Compiler()
    found = cases("check", ops, tiny=tiny)
    programs = []
    for op, case in found:
        try:
            carry, constants = jax.eval_shape(case.make)
        except Exception as problem:
            yield Outcome(f"{op}: {case.name}", False, f"no arrays: {first_line(problem)}")
            continue
        programs.append((op, case, {label: compiler.submit(call, carry, *constants) for label, call in case.variants.items()}))
    left_out = []
    for op, case, variants in programs:
        if time.perf_counter() > deadline:
            left_out.append(f"{op}: {case.name}")
            continue
        carry, constants = case.make()
        for label, program in variants.items():
            name = f"{op}: {case.name}, {label}"
            try:
                run = program.result(timeout=60)
                got = run(carry, *constants)
                error = case.error(carry, constants, got)
                differing = count_differing(run, carry, constants, got, repeats)
                detail = (
                    f"error {error:.1e}, allowed {case.tolerance:.0e}"
                    + f"; {differing} of {repeats} repeats differ" * bool(differing)
                )
                yield Outcome(name, error <= case.tolerance and not differing, detail)
            except Exception as problem:
                yield Outcome(name, False, first_line(problem))
    compiler.close()
    if left_out:
        yield Outcome(f"{len(left_out)} cases", False, f"not run for lack of time (--seconds): {', '.join(left_out)}")


def count_differing(run: Any, carry: Any, constants: Any, expected: Any, repeats: int) -> int:
    """How many more runs, dispatched together, give other bits than the first."""
    others = [_equal(expected, run(carry, *constants)) for _ in range(repeats)]
    return sum(not bool(equal) for equal in others)


@jax.jit
def _equal(a: Any, b: Any) -> jax.Array:
    """Whether all bits are equal, NaN too."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jnp.all(jnp.stack([jnp.all(_bits(x) == _bits(y)) for x, y in pairs]))


def _bits(x: jax.Array) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
    return jax.lax.bitcast_convert_type(x, unsigned[x.dtype.itemsize])
