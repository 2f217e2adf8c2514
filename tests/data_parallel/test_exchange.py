"""Both ways of tokens to experts give what NumPy computes in float64, whatever is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm.kernel_policy import CPU
from jaxllm.layers.step import Step
from jaxllm.parallel.exchange import RankExchange, make_exchange
from jaxllm.parallel.mesh import DATA, TENSOR, meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.runner.features.expert_slots import slots_of
from pallas_kernels.grouped_matmul import experts
from tests.helpers.slow import slow_except

NUM_TOKENS, NUM_CHOICES, WIDTH, HIDDEN, OF_DEVICE = 24, 3, 16, 8, 2
SIZES = [(2, 1), (4, 1), (2, 2)]


def problem(num_ranks, num_devices, seed=0):
    """Tokens of all data-parallel ranks, some of them padding, and experts of all devices."""
    rng = np.random.default_rng(seed)
    T, E = num_ranks * NUM_TOKENS, num_devices * OF_DEVICE
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


@functools.cache
def program(size, capacity):
    """The sums of all data-parallel ranks; capacity: of a send, None: by a gather."""
    (mesh,) = meshes_of(Topology(size[1], has_expert_parallel=True, data=size[0]))
    exchange = make_exchange(mesh, CPU)

    def each(x_TD, expert_Tk, weight_Tk, gate_up_E2FD, down_EDF):
        def of_device(x_TD, expert_Tk, weight_Tk):
            first = exchange.device * OF_DEVICE
            return experts(x_TD, expert_Tk, weight_Tk, gate_up_E2FD, down_EDF, first_expert=first, implementation="xla")

        tokens = x_TD, expert_Tk, weight_Tk
        if capacity is None:
            return jax.lax.psum(exchange.gather(of_device, *tokens), TENSOR)
        return jax.lax.psum(exchange.send(of_device, *tokens, OF_DEVICE, capacity), TENSOR)

    by_rank, by_device = PartitionSpec(DATA), PartitionSpec((DATA, TENSOR))
    specs = (by_rank, by_rank, by_rank, by_device, by_device)
    return jax.jit(jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=by_rank, check_vma=False))


@pytest.mark.parametrize(("num_ranks", "num_devices"), slow_except([(2, 1)], SIZES))
def test_both_ways(num_ranks, num_devices):
    size = num_ranks, num_devices
    arrays = problem(num_ranks, num_ranks * num_devices)
    wanted = expected(*arrays)
    for capacity in (None, 24, 1):  # gathered; sent, and every token fits; or nearly none does
        found = np.asarray(program(size, capacity)(*arrays))
        np.testing.assert_allclose(found, wanted, atol=1e-4, err_msg=f"capacity {capacity}")


@pytest.mark.slow
def test_what_overflows_on_one_device_is_gathered_on_all():
    x_TD, expert_Tk, weight_Tk, *weights = problem(4, 4)
    expert_Tk[:NUM_TOKENS] = [0, 1, 7]  # all tokens of the first data-parallel rank choose the same devices
    weight_Tk[:NUM_TOKENS] = 0.5
    arrays = (x_TD, expert_Tk, weight_Tk, *weights)
    found = np.asarray(program((4, 1), 20)(*arrays))
    np.testing.assert_allclose(found, expected(*arrays), atol=1e-4)
    gathered = np.asarray(program((4, 1), None)(*arrays))
    np.testing.assert_array_equal(found, gathered)


@pytest.mark.slow
def test_sums_of_a_token_do_not_depend_on_other_ranks():
    arrays = problem(4, 4)
    others = problem(4, 4, seed=1)
    mixed = tuple(np.concatenate([a[:NUM_TOKENS], b[NUM_TOKENS:]]) for a, b in zip(arrays[:3], others[:3], strict=True))
    for capacity in (None, 24):
        compute = program((4, 1), capacity)
        alone, beside = np.asarray(compute(*arrays)), np.asarray(compute(*mixed, *arrays[3:]))
        np.testing.assert_array_equal(alone[:NUM_TOKENS], beside[:NUM_TOKENS])


def test_each_rank_begins_with_another_copy():
    """Its only token in a decode would else always be computed by the first."""
    (mesh,) = meshes_of(Topology(2, has_expert_parallel=True, data=2))
    table_EC = jnp.array([[1, 4, 0], [2, 5, 7]], jnp.int32)

    def slots(expert_Tk):
        step = Step(expert_Tk, expert_Tk, attend=None, exchange=make_exchange(mesh, CPU))
        step.slots = lambda name, expert_Tk, start: slots_of(table_EC, expert_Tk, start)
        return step.slots_of("", expert_Tk, 2)

    by_rank = PartitionSpec(DATA)
    each = jax.shard_map(slots, mesh=mesh, in_specs=by_rank, out_specs=by_rank, check_vma=False)
    expert_Tk = np.tile(np.array([[1, 0], [-1, 1]], np.int32), (2, 1))
    np.testing.assert_array_equal(jax.jit(each)(expert_Tk), [[5, 4], [-1, 7], [7, 4], [-1, 5]])


def test_the_way_follows_from_shapes():
    few, many = RankExchange(2, 1, CPU), RankExchange(8, 8, CPU)
    assert few.capacity(2048, 8) is None  # nearly every token goes to every device
    assert many.capacity(2048, 8) == 512
    assert many.capacity(128, 8) is None  # a decode
