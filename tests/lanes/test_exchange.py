"""Both ways of tokens to experts give what NumPy computes in float64, whatever is chosen."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm.parallel.exchange import LaneExchange, make_exchange
from jaxllm.parallel.mesh import DATA, TENSOR, meshes_of
from jaxllm.parallel.topology import Topology
from pallas_kernels.grouped_matmul import experts

NUM_TOKENS, NUM_CHOICES, WIDTH, HIDDEN, OF_DEVICE = 24, 3, 16, 8, 2
SIZES = [(2, 1), (4, 1), (2, 2), (8, 1)]


def problem(num_lanes, num_devices, seed=0):
    """Tokens of all lanes, some of them padding, and experts of all devices."""
    rng = np.random.default_rng(seed)
    T, E = num_lanes * NUM_TOKENS, num_devices * OF_DEVICE
    expert_Tk = np.argsort(rng.random((T, E)))[:, :NUM_CHOICES].astype(np.int32)
    expert_Tk[rng.random(T) < 0.2] = -1
    weight_Tk = rng.random((T, NUM_CHOICES), np.float32)
    weight_Tk[expert_Tk == -1] = np.nan  # of padding anything
    x_TD = rng.standard_normal((T, WIDTH), np.float32)
    gate_up_E2FD = rng.standard_normal((E, 2, HIDDEN, WIDTH), np.float32)
    return x_TD, expert_Tk, weight_Tk, gate_up_E2FD, rng.standard_normal((E, WIDTH, HIDDEN), np.float32)


def expected(x_TD, expert_Tk, weight_Tk, gate_up_E2FD, down_EDF):
    out_TD = np.zeros(x_TD.shape)
    for t, (choices, weights) in enumerate(zip(expert_Tk, weight_Tk.astype(float), strict=True)):
        for e, weight in zip(choices, weights, strict=True):
            if e >= 0:
                gate, up = gate_up_E2FD[e].astype(float) @ x_TD[t]
                out_TD[t] += weight * (down_EDF[e].astype(float) @ (gate / (1 + np.exp(-gate)) * up))
    return out_TD


def on_devices(way, size, *arrays):
    """The sums of all lanes; `way`: a function of an exchange and what it takes."""
    (mesh,) = meshes_of(Topology(size[1], has_expert_parallel=True, data=size[0]))

    def each(x_TD, expert_Tk, weight_Tk, gate_up_E2FD, down_EDF):
        exchange = make_exchange(mesh)

        def of_device(x_TD, expert_Tk, weight_Tk):
            first = exchange.rank * OF_DEVICE
            return experts(x_TD, expert_Tk, weight_Tk, gate_up_E2FD, down_EDF, first_expert=first, implementation="xla")

        return jax.lax.psum(way(exchange, of_device, x_TD, expert_Tk, weight_Tk), TENSOR)

    by_lane, by_device = PartitionSpec(DATA), PartitionSpec((DATA, TENSOR))
    specs = (by_lane, by_lane, by_lane, by_device, by_device)
    return np.asarray(jax.jit(jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=by_lane, check_vma=False))(*arrays))


def send(exchange, *arguments, capacity):
    return exchange.send(*arguments, OF_DEVICE, capacity)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_both_ways(size):
    arrays = problem(size[0], size[0] * size[1])
    wanted = expected(*arrays)
    np.testing.assert_allclose(on_devices(LaneExchange.gather, size, *arrays), wanted, atol=1e-4)
    for capacity in (24, 16, 1):  # every token fits, most do, none does
        found = on_devices(partial(send, capacity=capacity), size, *arrays)
        np.testing.assert_allclose(found, wanted, atol=1e-4, err_msg=f"capacity {capacity}")


def test_what_overflows_on_one_device_is_gathered_on_all():
    x_TD, expert_Tk, weight_Tk, *weights = problem(4, 4)
    expert_Tk[:NUM_TOKENS] = [0, 1, 7]  # all tokens of the first lane choose the same devices
    weight_Tk[:NUM_TOKENS] = 0.5
    arrays = (x_TD, expert_Tk, weight_Tk, *weights)
    found = on_devices(partial(send, capacity=20), (4, 1), *arrays)
    np.testing.assert_allclose(found, expected(*arrays), atol=1e-4)


def test_sums_of_a_token_do_not_depend_on_other_lanes():
    arrays = problem(4, 4)
    others = problem(4, 4, seed=1)
    mixed = tuple(np.concatenate([a[:NUM_TOKENS], b[NUM_TOKENS:]]) for a, b in zip(arrays[:3], others[:3], strict=True))
    for way in (LaneExchange.gather, partial(send, capacity=24)):
        alone, beside = on_devices(way, (4, 1), *arrays), on_devices(way, (4, 1), *mixed, *arrays[3:])
        np.testing.assert_array_equal(alone[:NUM_TOKENS], beside[:NUM_TOKENS])


def test_the_way_follows_from_shapes():
    few, many = LaneExchange(2, 1), LaneExchange(8, 8)
    assert few.capacity(2048, 8) is None  # nearly every token goes to every device
    assert many.capacity(2048, 8) == 512
    assert many.capacity(128, 8) is None  # a decode
