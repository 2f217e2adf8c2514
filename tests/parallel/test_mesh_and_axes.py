import jax
import pytest
from jax.sharding import PartitionSpec

from jaxllm.errors import ConfigError
from jaxllm.parallel.axes import partition_spec
from jaxllm.parallel.mesh import make_mesh


def test_mesh_takes_the_first_devices():
    mesh = make_mesh(4)
    assert mesh.axis_names == ("tensor",)
    assert list(mesh.devices) == jax.devices()[:4]


@pytest.mark.parametrize("size", [0, 9])
def test_more_devices_than_exist_are_refused_with_both_numbers(size):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}, this machine has 8 .*choose 1 to 8"):
        make_mesh(size)


def test_heads_vocabulary_and_feed_forward_are_split():
    assert partition_spec(("embed", "heads", "qkv", "head")) == PartitionSpec(None, "tensor", None, None)
    assert partition_spec(("vocab", "embed")) == PartitionSpec("tensor", None)
    assert partition_spec(("embed", "gate_up", "mlp")) == PartitionSpec(None, None, "tensor")


def test_unknown_axis_is_a_mistake():
    with pytest.raises(KeyError):
        partition_spec(("emmbed",))
