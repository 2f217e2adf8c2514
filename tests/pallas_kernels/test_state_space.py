"""Mamba-2's recurrence against its definition in float64, over steps that mix rows of all kinds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checking.state_space import COUNTS, TOLERANCE, Shapes, host_arrays, host_error, state_space_of_state
from pallas_kernels.state_space import IMPLEMENTATIONS, PLAIN, state_space
from pallas_kernels.state_space.xla import CHUNK
from tests.helpers.slow import slow_except

SHAPES = Shapes("float32", 2, 3, 8, 16)


@pytest.mark.parametrize("implementation", slow_except(PLAIN, IMPLEMENTATIONS))
def test_steps_of_chunks_and_decodes_equal_the_rows_token_by_token(implementation):
    """Rows of a token and of several chunks in one step, new rows over NaN, padding; then a token of each of the same rows."""
    run = jax.jit(functools.partial(state_space_of_state, implementation=implementation, interpret=True))
    state, constants = host_arrays(SHAPES, (*COUNTS, 2 * CHUNK))
    out, after = run(state, *constants)
    assert host_error(state, constants, (out, after)) < TOLERANCE["float32"]
    *tokens, skip, row_R, _, _ = constants
    later = (*(x[: len(row_R)] for x in tokens), skip, row_R, np.zeros(len(row_R), bool))
    assert host_error(after, later, run(after, *later)) < TOLERANCE["float32"]


def test_a_wrong_output_and_a_changed_state_of_another_row_do_not_pass():
    state, constants = host_arrays(SHAPES, None)
    out, after = map(np.array, jax.jit(state_space_of_state)(state, *constants))
    assert host_error(state, constants, (out, after)) < TOLERANCE["float32"]
    out[0, 0, 0, 0] += 1
    assert host_error(state, constants, (out, after)) > TOLERANCE["float32"]
    (other,) = np.setdiff1d(np.arange(len(state) - 1), constants[6])[:1]
    after[other, 0, 0, 0, 0] += 1
    assert host_error(state, constants, (out, after)) == np.inf


def test_shapes_that_do_not_fit_are_refused():
    tokens = [jnp.zeros(shape) for shape in ((4, 2, 3, 8), (4, 2, 5), (4, 2, 5), (4, 2, 3), (4, 2, 4))]
    others = jnp.zeros((2, 3)), jnp.zeros((3, 2, 3, 8, 5)), jnp.zeros(4, jnp.int32), jnp.zeros(4, bool), None
    with pytest.raises(ValueError, match="log_decay is .* expected"):
        state_space(*tokens, *others)
    tokens[-1] = tokens[-2]
    with pytest.raises(ValueError, match="no implementation 'cuda'"):
        state_space(*tokens, *others, implementation="cuda")
