"""Routers behind a norm against NumPy in float64."""

import jax
import numpy as np
import pytest

from pallas_kernels.checking.router_scores import Shapes, case
from pallas_kernels.router_scores import router_scores

SHAPES = (Shapes("float32", 5, 20, eps=1e-3, weight_offset=1.0), Shapes("bfloat16", 5, 64, has_bias=True))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("shapes", SHAPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_padding", [0, 2])
def test_scores_equal_the_definition_and_a_wrong_one_does_not_pass(implementation, shapes, num_padding):
    made = case(shapes, (implementation,), interpret=True, num_padding=num_padding)
    x, constants = made.make()
    got = np.array(jax.jit(made.variants[implementation])(x, *constants))
    assert made.error(x, constants, got) <= made.tolerance
    for place, wrong in (((0, 0), 0.1), ((2, 3), 0.1), *(((-1, 0), np.nan),) * bool(num_padding)):
        changed = got.copy()
        changed[place] += wrong * np.abs(got).max()
        assert not made.error(x, constants, changed) <= made.tolerance


def test_what_does_not_fit_is_refused():
    x, (weight, router, *_) = case(SHAPES[0], (), interpret=True).make()
    with pytest.raises(ValueError, match=r"weights are \[20\] and \[5, 19\] for x \[8, 20\]"):
        router_scores(x, weight, router[:, 1:], eps=1e-6)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        router_scores(x, weight, router, eps=1e-6, implementation="cuda")
    x, (weight, router, *_) = case(Shapes("float32", 1, 8200), (), interpret=True).make()
    with pytest.raises(ValueError, match="does not take vectors of 8200 values; use 'xla'"):
        router_scores(x, weight, router, eps=1e-6, implementation="triton")
