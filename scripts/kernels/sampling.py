"""Tokens from logits, by the kernels and by plain JAX: argmax, and the likeliest values with rank and logsumexp. Exact ids."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import sampling
from pallas_kernels.checking import sampling as checking
from pallas_kernels.checking.case import Case
from pallas_kernels.checking.compiling import UNTUNED
from pallas_kernels.checking.sampling import TOLERANCE, plain_argmax, plain_top_values, top_values

TOP = 20


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Llama 3's vocabulary at a decode's numbers of rows."""
    if tiny:
        return [_case("argmax", 2, 300)]
    return [_case(kind, rows, 128256) for kind in ("argmax", "top_values") for rows in (1, 64, 256)]


def check_cases(tiny: bool) -> list[Case]:
    """Odd widths, equal values, rows that are all -inf but one; draws with and without filters and adjustments."""
    if tiny:
        return [*(_case(kind, 3, 300) for kind in ("argmax", "top_values")), *_draws(300)]
    return [
        *(
            _case(kind, rows, size)
            for kind in ("argmax", "top_values")
            for rows, size in ((1, 1000), (7, 32003), (512, 128256))
        ),
        *(case for size in (1000, 32003, 128256) for case in _draws(size)),
    ]


def _draws(size: int) -> list[Case]:
    """The draws of an engine's start, by every implementation that takes them."""
    interpret = jax.default_backend() != "gpu"
    takes = [n for n in sampling.IMPLEMENTATIONS if sampling.supports(n, vocab_size=size, interpret=interpret)]
    found = [case for name in takes for case in checking.cases(checking.Shapes(size), name, interpret=interpret)]
    return [replace(case, name=f"{case.name} {size}") for case in found if case.name.startswith("draw")]


def _case(kind: str, rows: int, size: int) -> Case:
    @jax.jit
    def make() -> tuple[Any, tuple[Any, ...]]:
        logits = jax.random.normal(jax.random.key(0), (rows, size)) * 3
        logits = jnp.round(logits * 64) / 64  # equal values
        return (logits.at[-1, 1:].set(-jnp.inf) if rows > 1 else logits), ()

    on_gpu = jax.default_backend() == "gpu"

    def kernel(name: str, logits: Any) -> Any:
        options: dict[str, Any] = {"implementation": name, "interpret": not on_gpu}
        if kind == "argmax":
            return sampling.argmax(logits, **options)
        return top_values(logits, logits[:, 0], k=TOP, **options)

    takes = [n for n in sampling.IMPLEMENTATIONS if sampling.supports(n, vocab_size=size, interpret=not on_gpu)]
    variants: dict[str, Any] = {name: (lambda *args, name=name: kernel(name, *args)) for name in takes}
    return Case(
        f"{kind} {rows}x{size}",
        make,
        variants | {"xla": lambda logits: _plain(kind, logits)},
        lambda logits, _, got: float(_error(kind, logits, got)),
        tolerance=TOLERANCE,
        bytes=4.0 * rows * size,
        feed=_depend,
    )


def _depend(logits: Any, result: Any) -> Any:
    """The logits with one changed, which depends on the results: else equal calls would be made once."""
    return logits.at[0, 0].add(sum(leaf.sum().astype(jnp.float32) for leaf in jax.tree.leaves(result)) * 1e-20)


def _plain(kind: str, logits: Any) -> Any:
    return plain_argmax(logits) if kind == "argmax" else plain_top_values(logits, logits[:, 0], k=TOP)


@functools.partial(jax.jit, static_argnums=0, compiler_options=UNTUNED)
def _error(kind: str, logits: jax.Array, result: Any) -> jax.Array:
    """The largest difference; infinite where an integer differs. Ids of values of -inf are ignored."""
    expected, got = jax.tree.leaves(_plain(kind, logits)), jax.tree.leaves(result)
    finite = jnp.isfinite(expected[1]) if len(expected) > 1 else True
    errors = []
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        if jnp.issubdtype(a.dtype, jnp.integer):
            errors.append(jnp.where(jnp.any((a != b) & (finite if i == 0 else True)), jnp.inf, 0.0))
        else:
            errors.append(jnp.abs(jnp.where(jnp.isfinite(a), a - b, 0.0)).max())
    return jnp.stack(errors).max()
