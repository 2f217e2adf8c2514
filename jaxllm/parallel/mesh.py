"""The mesh of devices that one engine computes on."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxllm import gpus
from jaxllm.errors import ConfigError

TENSOR = "tensor"
"""The mesh axis that heads, feed-forward columns and vocabulary are split over."""


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The first `tensor_parallel_size` devices in a row. Raises ConfigError if there are fewer."""
    devices = list(jax.devices() if devices is None else devices)
    if not 1 <= tensor_parallel_size <= len(devices):
        count = len(devices)
        kind = f" ({devices[0].device_kind})" if devices else ""
        hidden = gpus.hidden_gpus(sum(device.platform in ("gpu", "cuda") for device in devices))
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, this machine has {count} device{'s' * (count != 1)}{kind}; "
            + (f"choose 1 to {count}" if count > 1 else "leave it out")
            + (f", or show it more ({hidden})" if hidden else "")
        )
    return Mesh(np.array(devices[:tensor_parallel_size]), (TENSOR,), axis_types=(AxisType.Auto,))
