"""Layers are compiled in groups that recur."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxllm.runner import split_program
from jaxllm.runner.shared_layers import LAYER


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("aaaaaaaaaaaa", ["aaaaa", "aaaaa", "aa"]),
        ("aaaaaaaaab", ["aaaaa", "aaaab"]),
        ("daaaaaaaaaaa", ["d", "aaaaa", "aaaaa", "a"]),
        ("ababababab", ["abab", "abab", "ab"]),
        ("aaaaabaaaaabaaaaab", ["aaaaab", "aaaaab", "aaaaab"]),
        ("ab", ["ab"]),
        ("a", ["a"]),
    ],
)
def test_groups_of_layers(kinds, groups):
    layers = [SimpleNamespace(params={"jaxpr": kind}) for kind in kinds]
    found = ["".join(layer.params["jaxpr"] for layer in group) for group in split_program._groups(layers)]
    assert found == groups


def test_caches_that_layers_share_are_updated_in_place():
    """Two caches, each of every second layer, in groups with odd numbers of both."""

    def layer(x, cache):
        return x + 1, cache.at[x[0].astype(int)].set(x)

    def program(x, caches):
        for index in range(7):
            call = jax.jit(layer)
            x, caches[index % 2] = call(x, caches[index % 2])
        return x, caches

    layer.__name__ = LAYER
    device = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.ShapeDtypeStruct((4,), "float32"), [jax.ShapeDtypeStruct((1000, 4), "float32")] * 2
    traced = jax.jit(program, donate_argnums=1).trace(*shapes)
    found = split_program.split(traced, [False, True, True], device, split_program.Pieces()).compile()

    arrays = [jnp.zeros(each.shape) for each in jax.tree.leaves(shapes)]
    expected = jax.jit(program)(arrays[0], arrays[1:])
    copied = [piece.as_text().count("f32[1000,4]{1,0} copy(") for piece in found.pieces.values()]
    assert copied == [0] * len(found.pieces) and len(found.wiring.calls) > 1
    jax.tree.map(np.testing.assert_allclose, found(arrays[0], [array.copy() for array in arrays[1:]]), expected)
