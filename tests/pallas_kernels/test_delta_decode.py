"""Decodes of linear attention against their definition in float64."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels.checking.delta_decode import Shapes, case
from pallas_kernels.delta_decode import IMPLEMENTATIONS, delta_decode

SHAPES = (Shapes("float32", 2, 3, 12, 20, kernel_size=3, gate="sigmoid"), Shapes("bfloat16", 1, 1, 16, 8, eps=1e-3))


@functools.cache
def run(implementation, shapes):
    """A case, its arrays, and what an implementation makes of them."""
    made = case(shapes, (implementation,), interpret=True, num_rows=4, num_padding=2)
    state, constants = made.make()
    got = jax.jit(made.variants[implementation])(state, *constants)
    return made, state, constants, tuple(map(np.array, got))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("shapes", SHAPES, ids=["float32", "bfloat16"])
def test_rows_equal_the_definition_whatever_new_rows_and_padding_hold(implementation, shapes):
    made, state, constants, got = run(implementation, shapes)
    assert made.error(state, constants, got) <= made.tolerance
    assert not got[1][-1].any()  # all rows of padding write there, in any order


def test_a_wrong_output_or_state_or_one_of_another_row_does_not_pass():
    made, state, constants, got = run("reference", SHAPES[0])
    row_R = constants[-2]
    other = np.setdiff1d(np.arange(len(state) - 1), row_R)[0]
    for index, row in ((0, 0), (0, len(row_R) - 1), *((index, row) for index in (1, 2) for row in (row_R[1], other))):
        wrong = [array.copy() for array in got]
        wrong[index][row] += 1 if row != len(row_R) - 1 or index else np.nan
        assert not made.error(state, constants, wrong) <= made.tolerance, (index, row)


def test_what_does_not_fit_is_refused():
    _, state, constants, _ = run("reference", SHAPES[0])
    conv_state, *arrays, row, is_new = constants
    call = functools.partial(delta_decode, gate="silu", eps=1e-6)
    with pytest.raises(ValueError, match="conv_state is .* expected"):
        call(*arrays, conv_state[:, :, :1], state, row, is_new)
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        call(*arrays, conv_state, state, row, is_new, implementation="cuda")
    wide = dataclasses.replace(SHAPES[0], num_key_heads=1, group_size=1, key_dim=256, value_dim=72)
    state, (conv_state, *arrays, row, is_new) = case(wide, (), interpret=True, num_rows=1).make()
    with pytest.raises(ValueError, match="does not take states of 256 × 72 values; use 'xla'"):
        call(*arrays, conv_state, state, row, is_new, implementation="triton")
    assert set(IMPLEMENTATIONS) == {"triton", "reference", "xla"}
