"""The mesh of devices that one engine computes on."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxllm import gpus
from jaxllm.errors import ConfigError
from jaxllm.parallel.across_hosts import devices_for
from jaxllm.parallel.topology import Topology

TENSOR = "tensor"
"""The mesh axis that heads, feed-forward columns and vocabulary are split over."""
CONTEXT = "context"
"""The mesh axis that tokens, and the slots of each block of the cache, are split over; a mesh of one such device has no such axis."""

DATA = "data"
"""The mesh axis of data-parallel ranks: each has its own requests, and all that is split over `TENSOR`; experts are split over both."""


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The first `tensor_parallel_size` devices in a row. Raises ConfigError if there are fewer."""
    return meshes_of(Topology(tensor_parallel_size), devices)[0]


def meshes_of(topology: Topology, devices: Sequence[jax.Device] | None = None) -> tuple[Mesh, ...]:
    """The devices of a topology, the first of this machine, in a row for each stage, or in `context` or `data` rows. Of stages on several
    hosts the last one has the first devices.

    Raises ConfigError if there are fewer.
    """
    devices = devices_for(topology.num_devices) if devices is None else list(devices)
    if not 1 <= topology.num_devices <= len(devices):
        count = len(devices)
        kind = f" ({devices[0].device_kind})" if devices else ""
        hidden = gpus.hidden_gpus(sum(device.platform in ("gpu", "cuda") for device in devices))
        raise ConfigError(
            f"{topology.describe()}, this machine has {count} device{'s' * (count != 1)}{kind}; "
            + _way_out(topology, count)
            + (f", or show it more ({hidden})" if hidden else "")
        )
    rows = {name: size for name, size in ((DATA, topology.data), (CONTEXT, topology.context)) if size > 1}
    axes, shape = (*rows, TENSOR), (*rows.values(), topology.tensor)
    stages = np.array(devices[: topology.num_devices]).reshape(topology.stage, *shape)
    if len({device.process_index for device in stages.flat}) > 1:
        stages = stages[::-1]  # host 0, which reads what a step gives, has the last stage
    return tuple(Mesh(stage, axes, axis_types=(AxisType.Auto,) * len(axes)) for stage in stages)


def _way_out(topology: Topology, count: int) -> str:
    """Sizes that a machine with `count` devices allows."""
    is_one_size = topology.num_devices == topology.tensor
    if count <= 1:
        return "leave it out" if is_one_size else "leave both out"
    return f"choose 1 to {count}" if is_one_size else f"choose sizes whose product is {count} or less"


def tensor_size(mesh: Mesh) -> int:
    """Devices of a mesh that each layer is split over."""
    return mesh.shape[TENSOR]


def context_size(mesh: Mesh) -> int:
    """Devices of a mesh, or groups of those that each layer is split over, that tokens are split over."""
    return mesh.shape.get(CONTEXT, 1)


def on_cpu(mesh: Mesh) -> bool:
    """Whether the mesh's memory is the host's."""
    device: jax.Device = mesh.devices.flat[0]
    return device.platform == "cpu"
