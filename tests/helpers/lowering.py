"""Lowers programs for a GPU where there is none."""

import contextlib

import jax


def a_gpu_to_lower_for() -> contextlib.AbstractContextManager[object]:
    """JAX >= 0.11 requires the GPU target of a Triton kernel."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
