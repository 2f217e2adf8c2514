"""The collectives by "peer" on CPU devices: plain JAX in the place of the kernels, with the kernels' order of sums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from pallas_kernels.collectives import peer, workspace, xla


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("devices",), axis_types=(AxisType.Auto,))


class PlainPeer:
    """What `peer` computes, and which of the host's programs ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def all_reduce(self, x: Any, *, axis: str, workspace: Any, num_shots: int | None = None) -> Any:
        parts = lax.all_gather(x, axis).astype(jnp.float32)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.astype(x.dtype)

    def all_reduce_norm(
        self, x: Any, residual: Any, weight: Any, eps: float, *, axis: str, workspace: Any, num_shots: int | None = None
    ) -> Any:
        total = self.all_reduce(x.astype(jnp.float32), axis=axis, workspace=None)
        h = (total if residual is None else total + residual.astype(jnp.float32)).astype(x.dtype)
        wide = h.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
        return h, (wide * weight.astype(jnp.float32)).astype(x.dtype)

    def run(self, program: Any, arrays: Any) -> list[Any]:
        """A program of the host: the workspace's last word is kept as the state."""
        self.ran.append(program.name)
        if program.name == "collectives_header":
            return [arrays["header"][0, -1:].astype(jnp.int32)]
        return [jnp.zeros(1, jnp.int32)]


@pytest.fixture
def plain_peer(monkeypatch) -> PlainPeer:
    found = PlainPeer()
    monkeypatch.setattr(workspace, "peers_can_access", lambda devices: True)
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 4096)
    for name in ("all_reduce", "all_reduce_norm", "run"):
        monkeypatch.setattr(peer, name, getattr(found, name))
    monkeypatch.setattr(peer, "supports", lambda op, **case: True)
    for name in ("all_gather", "all_to_all"):
        monkeypatch.setattr(peer, name, getattr(xla, name))
    return found
