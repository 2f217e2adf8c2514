"""Products of adapters, by every implementation, against NumPy in float64."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checking.host import same_bits
from pallas_kernels.checking.lora import TOLERANCE, Shapes, cases, host_arrays, host_error, plain, run
from pallas_kernels.lora import IMPLEMENTATIONS, Parts, add, candidates, choose, group
from tests.helpers.slow import slow_except

ONE, FUSED = Parts(1, (1,), 100), Parts(2, (3, 1, 1), 24)
CASES = {
    # (product, tokens): one token and few slots, few tokens, more than are one tile, many slots, a rank above one tile
    "a token": (Shapes("float32", 3, 8, 72, FUSED), 1),
    "a token, one slot": (Shapes("bfloat16", 1, 16, 300, ONE), 1),
    "few tokens": (Shapes("bfloat16", 4, 16, 600, FUSED), 13),
    "more slots than tokens": (Shapes("float16", 9, 8, 72, ONE), 5),
    "many tokens": (Shapes("float32", 3, 8, 72, FUSED), 150),
    "large rank": (Shapes("float32", 2, 128, 72, ONE), 5),
    "adapters in another type": (replace(Shapes("bfloat16", 2, 8, 72, FUSED), adapter_dtype="float32"), 70),
}


def call(arrays, parts, implementation):
    def function(y, x, a, b, slot):
        return run(y, x, a, b, slot, parts=parts, implementation=implementation, interpret=True)

    return np.asarray(jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})(*arrays))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", slow_except(["a token", "few tokens"], CASES))
def test_every_implementation_against_numpy(name, implementation):
    shapes, num_tokens = CASES[name]
    y, constants = host_arrays(shapes, num_tokens, shapes.num_slots)
    got = call((y, *constants), shapes.parts, implementation)
    assert got.dtype == y.dtype
    assert host_error(y, constants, got, parts=shapes.parts) <= TOLERANCE[shapes.dtype]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", slow_except([6], [6, 80]))
def test_a_token_depends_on_its_own_slot_alone_and_keeps_its_bits_without_one(implementation, num_tokens):
    shapes = Shapes("bfloat16", 3, 8, 64, ONE)
    y, (x, a, b, slot) = host_arrays(shapes, num_tokens, 3)
    x, y = np.nan_to_num(x), np.where(y < 0, np.asarray(-0.0, y.dtype), y)
    slot[:2] = 1, -1
    first = call((y, x, a, b, slot), ONE, implementation)
    assert same_bits(first[slot < 0], y[slot < 0])
    second = call((y, x, a, b, np.where(np.arange(num_tokens) < 2, slot, (slot + 1) % 3).astype(np.int32)), ONE, implementation)
    assert same_bits(first[:2], second[:2]) and not same_bits(first[2:], second[2:])


def test_wrong_results_are_found():
    shapes = Shapes("bfloat16", 3, 8, 72, FUSED)
    y, constants = host_arrays(shapes, 13, 3)
    right = plain(y, *constants, parts=FUSED)
    slot = constants[3]
    assert host_error(y, constants, right.astype(y.dtype), parts=FUSED) < TOLERANCE["bfloat16"]
    other_slot = plain(y, *constants[:3], np.where(slot < 0, slot, (slot + 1) % 3), parts=FUSED)
    other_parts = plain(y, *constants, parts=Parts(1, (6, 2, 2), 24))
    lost, changed = right.copy(), right.astype(y.dtype)
    lost[np.argmax(slot >= 0), 7] = np.nan
    changed[np.argmin(slot), 3] += 1
    for wrong in (y, other_slot, other_parts, lost):
        assert not host_error(y, constants, np.asarray(wrong).astype(y.dtype), parts=FUSED) <= TOLERANCE["bfloat16"]
    assert host_error(y, constants, changed, parts=FUSED) == math.inf


def test_the_cases_at_a_start_are_of_few_slots():
    found = cases(Shapes("float32", 64, 8, 72, ONE), "xla", interpret=True)
    assert [case.name for case in found] == [f"72 to 100, {count} tokens" for count in (1, 13, 150)]
    assert all(case.make()[1][1].shape == (3, 8, 72) for case in found)


def test_choice_and_refusals():
    assert candidates(platform="gpu", dtype="bfloat16") == ("triton", "xla")
    assert candidates(platform="cpu", dtype="bfloat16") == ("xla",) and choose(platform="cpu", dtype="float32") == "xla"
    x, y = jnp.zeros((2, 4)), jnp.zeros((2, 6))
    a, b, groups = jnp.zeros((1, 8, 4)), jnp.zeros((1, 8, 6)), group(jnp.zeros(2, jnp.int32), 1)
    with pytest.raises(ValueError, match=r"a_SQD is \[1, 8, 4\], expected \[1, 16, 4\]"):
        add(y, x, a, b, groups, parts=Parts(1, (2, 1), 2), implementation="xla")
    with pytest.raises(ValueError, match="no implementation 'none' of LoRA"):
        add(y, x, a, b, groups, parts=Parts(1, (1,), 6), implementation="none")
    with pytest.raises(ValueError, match="does not take activations in int32"):
        add(y, x.astype(jnp.int32), a, b, groups, parts=Parts(1, (1,), 6), implementation="triton", interpret=True)
