"""Linear layers of runs: the tokens of a step in parts, one after the other, as `Shards.num_runs` wants them."""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from jaxllm.layers.linear import Linear
from jaxllm.layers.step import Step
from pallas_kernels.quantize import Quantized, Sums


def starts(runs: Sequence[Array | Quantized]) -> list[int]:
    """The index in the step of the first token of each run."""
    return list(itertools.accumulate((len(x) for x in runs[:-1]), initial=0))


def joined(runs: Sequence[Array]) -> Array:
    """All tokens in one array."""
    return runs[0] if len(runs) == 1 else jnp.concatenate(runs)


def products(linear: Linear, runs: Sequence[Array | Quantized], step: Step) -> Array:
    """The products of all tokens, in one array."""
    return joined([step.product(linear, x, start) for x, start in zip(runs, starts(runs), strict=True)])


def products_by_run(linear: Linear, x: Array, runs: Sequence[Array | Quantized], step: Step) -> list[Array | Sums]:
    """The products of x, which holds all tokens, run by run, as `Step.sums`."""
    return [step.sums(linear, x[start : start + len(run)], start) for run, start in zip(runs, starts(runs), strict=True)]
