"""Exchanges between devices that split tokens, over forced CPU devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.context.devices import ContextDevices, make_context
from jaxllm.kernel_policy import CPU
from jaxllm.parallel.mesh import CONTEXT, make_mesh, meshes_of
from jaxllm.parallel.topology import Topology
from pallas_kernels.paged_attention.parts import NO_KEYS, combine

SIZE = 4
POLICY = replace(CPU, min_shared_tokens=5)
ALL = ContextDevices(SIZE, POLICY)
(MESH,) = meshes_of(Topology(tensor=2, context=SIZE))


def on_each(function, *arrays, out=None):
    mapped = jax.shard_map(function, mesh=MESH, in_specs=tuple(P() for _ in arrays), out_specs=out or P(), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*arrays))


def test_a_mesh_has_the_axis_only_where_tokens_are_split():
    assert make_context(make_mesh(2), POLICY) is None and make_mesh(2).axis_names == ("tensor",)
    assert make_context(MESH, POLICY) == ALL and MESH.shape == {"context": SIZE, "tensor": 2}


@pytest.mark.parametrize("num_tokens", [3, 5, 8])
def test_tokens_are_shared_out_and_come_back(num_tokens):
    """Of 3 tokens each device computes all; 5 are shared out two by two, the last device has none."""
    x = np.arange(1, 1 + 2 * num_tokens, dtype=np.float32).reshape(num_tokens, 2)

    def back(x):
        return ALL.whole(10 * ALL.share(x), num_tokens)

    np.testing.assert_array_equal(on_each(back, x), 10 * x)
    shares = on_each(ALL.share, x, out=P(CONTEXT))
    if num_tokens < 5:
        np.testing.assert_array_equal(shares, np.tile(x, (SIZE, 1)))
    else:
        np.testing.assert_array_equal(shares[:num_tokens], x)
        assert len(shares) == 8 and not shares[num_tokens:].any()


def test_devices_that_round_differently_get_the_same_tokens():
    def rounded(x):
        return ALL.whole(x + jax.lax.axis_index(CONTEXT), 3)[None]

    found = on_each(rounded, np.zeros((3, 1), np.float32), out=P(CONTEXT))
    np.testing.assert_array_equal(found[..., 0], [[0, 1, 2]] * SIZE)


def test_each_slot_is_of_one_device():
    slots = np.array([-1, *range(3 * SIZE * 8)], np.int32)
    own = on_each(lambda slot_T: ALL.own_slots(slot_T, 8), slots, out=P(CONTEXT)).reshape(SIZE, -1)
    assert (own[:, 0] == -1).all()
    for slot in slots[1:]:
        block, offset = divmod(int(slot), SIZE * 8)
        expected = np.full(SIZE, -1)
        expected[offset // 8] = block * 8 + offset % 8
        np.testing.assert_array_equal(own[:, 1 + slot], expected)


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "has_sinks"),
    [("float32", 3, False), ("float32", 7, True), ("bfloat16", 7, False), ("bfloat16", 3, True), ("float16", 3, True)],
)
def test_results_of_all_parts_are_combined(dtype, num_tokens, has_sinks):
    """As the op combines them, on whichever device; -0 and tiny sums come through as they are."""
    rng = np.random.default_rng(1)
    out = jnp.asarray(rng.standard_normal((SIZE, num_tokens, 2, 3, 8)), dtype)
    lse = rng.standard_normal((SIZE, num_tokens, 2, 3)).astype(np.float32)
    lse[1, 0], lse[:, 1], lse[2] = NO_KEYS, NO_KEYS, 1e-40
    sinks = jnp.asarray(rng.standard_normal((2, 3)), jnp.float32) if has_sinks else None
    expected = np.asarray(combine(out, jnp.asarray(lse), sinks), np.float32)

    def combined(out, lse):
        rank = jax.lax.axis_index(CONTEXT)
        return ALL.combined(out[rank], lse[rank], sinks)

    found = on_each(combined, out, lse, out=P(CONTEXT)).astype(np.float32)
    found = found[:num_tokens] if num_tokens >= 5 else found.reshape(SIZE, num_tokens, 2, 3, 8)
    expected = expected if num_tokens >= 5 else np.broadcast_to(expected, found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-6 if dtype == "float32" else 1e-2, atol=1e-6)
