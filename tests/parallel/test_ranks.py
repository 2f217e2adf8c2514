import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.parallel.mesh import meshes_of
from jaxllm.parallel.ranks import Ranks
from jaxllm.parallel.topology import Topology


@pytest.fixture
def mesh():
    """Three ranks of two devices."""
    (mesh,) = meshes_of(Topology(tensor=2, data=3))
    return mesh


def test_arrays_of_all_ranks_are_joined_and_split_again(mesh):
    ranks = Ranks(mesh)
    parts = [np.full((2, 4), rank) for rank in range(3)]
    joint = jax.device_put(ranks.joined(parts), NamedSharding(mesh, PartitionSpec(ranks.axis)))
    assert (ranks.num, ranks.own, ranks.shape((2, 4)), joint.shape) == (3, range(3), (6, 4), (6, 4))
    for rank, (found, nothing) in enumerate(ranks.split((joint, None))):
        np.testing.assert_array_equal(found, parts[rank])
        assert nothing is None and found.devices() == {mesh.devices[rank, 0]}
    assert ranks.split(()) == [(), (), ()]
    np.testing.assert_array_equal(ranks.repeated(parts[1]), np.full((6, 4), 1))


def test_ranks_with_less_to_do_do_nothing_in_later_rounds(mesh):
    """Numbers of the ranks are an array, as the program of each sees it."""
    things = [[(np.int32(1), np.array([10]))], [], [(np.int32(2), np.array([20])), (np.int32(3), np.array([30]))]]
    found = [(row.tolist(), packed.tolist()) for row, packed in Ranks(mesh).rounds(things, (np.int32(9), np.array([0])))]
    assert found == [([1, 9, 2], [10, 0, 20]), ([9, 9, 3], [0, 0, 30])]
    assert Ranks(mesh).shape(()) == (3,)


def test_arrays_of_one_rank_stay_as_they_are():
    (mesh,) = meshes_of(Topology(tensor=2))
    ranks, array = Ranks(mesh), np.arange(3)
    assert (ranks.num, ranks.axis, ranks.own, ranks.shape(())) == (1, None, range(1), ())
    assert ranks.joined([array]) is array and ranks.repeated(array) is array and ranks.split(array) == [array]
    assert list(ranks.rounds([[(array,)]], (None,))) == [(array,)]
