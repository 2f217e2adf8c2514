from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.parallel.across_hosts import put
from jaxllm.parallel.mesh import meshes_of
from jaxllm.parallel.topology import Topology
from jaxllm.runner.small_places import NUM_SMALL_PLACES, SMALL_PLACE_BYTES, reserve_small_places


def test_small_arrays_stay_on_every_device_and_the_places_between_them_are_free():
    (mesh,) = meshes_of(Topology(data=2))
    made = []

    def note(array):
        made.append(put(array, NamedSharding(mesh, PartitionSpec())))
        return made[-1]

    spacers = reserve_small_places(note)
    assert len(spacers) == NUM_SMALL_PLACES
    assert all([shard.data.shape for shard in spacer.addressable_shards] == [(1,), (1,)] for spacer in spacers)
    places = made[::2]
    assert all(place.nbytes == SMALL_PLACE_BYTES and place.is_deleted() for place in places)
