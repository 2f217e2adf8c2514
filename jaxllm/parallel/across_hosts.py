"""Devices and arrays of a mesh that may span several hosts: one process of `jax.distributed` on each."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxllm.errors import ConfigError


def devices_for(num_devices: int) -> list[jax.Device]:
    """All devices of this process. With several hosts the first devices of each, as many of one host as of another.

    Raises ConfigError if a host has too few.
    """
    num_hosts = jax.process_count()
    if num_hosts == 1:
        return list(jax.devices())
    share, rest = divmod(num_devices, num_hosts)
    if rest:
        raise ConfigError(
            f"{num_devices} devices cannot be the same number on each of {num_hosts} hosts: choose a multiple of {num_hosts}"
        )
    of_hosts = [jax.local_devices(host) for host in range(num_hosts)]
    for host, devices in enumerate(of_hosts):
        if len(devices) < share:
            raise ConfigError(
                f"host {host} has {len(devices)} device{'s' * (len(devices) != 1)} ({devices[0].device_kind if devices else 'none'}), but "
                f"{num_devices} devices on {num_hosts} hosts are {share} on each; choose smaller sizes, or show it more devices"
            )
    return [device for devices in of_hosts for device in devices[:share]]


def spans_hosts(mesh: Mesh) -> bool:
    """Whether some devices of a mesh are another host's."""
    return len(mesh.local_devices) < mesh.size


def has_other_hosts() -> bool:
    """Whether processes of other hosts take part in this engine."""
    return jax.process_count() > 1


def put(array: Any, place: NamedSharding) -> jax.Array:
    """A host array on the devices of a sharding. With several hosts each sends its own devices their parts of its copy."""
    if place.is_fully_addressable:
        return jax.device_put(array, place)
    # A device_put would have all hosts compare their arrays first.
    whole = np.asarray(array)
    return jax.make_array_from_callback(whole.shape, place, whole.__getitem__)
