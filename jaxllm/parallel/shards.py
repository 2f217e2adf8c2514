"""Exchanges between the devices that share every layer: sums of partial results, and a few numbers per row of split logits.

The model and the sampler call these methods inside the one `shard_map` around a step, where each device sees its own
part of every split array. `OneDevice` is the same code with nothing to exchange.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from jaxllm.kernel_policy import KernelPolicy
from jaxllm.parallel.mesh import TENSOR, tensor_size
from pallas_kernels import collectives
from pallas_kernels.collectives.exchange import FAILED

T = TypeVar("T")

PEERS_LOST = -2
"""In place of every token: a device timed out waiting for another's part, so the step's results are wrong."""


class Norm(Protocol):
    """A normalisation over the last dimension."""

    @property
    def is_plain(self) -> bool:
        """Whether it is x / rms(x) * weight, with `eps` added under the root."""

    def __call__(self, x: Array, /) -> Array: ...


class Shards(Protocol):
    """The devices that each layer is split over, as seen by one of them.

    T tokens, D model width, R rows, V vocabulary; `size` devices in the order of their ranks.
    """

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> Array | int:
        """The rank of this device."""

    def through(self, workspace: Array | None) -> "Shards":
        """These devices, exchanging through each other's memory: see `pallas_kernels.collectives`."""

    def of_first(self, x_1M: Array) -> Array:
        """The first device's values, [M], on every device. Without a workspace x is [M] and already equal on every device."""

    def max(self, x: Array) -> Array:
        """The elementwise maximum over all devices."""

    def sum(self, x: Array) -> Array:
        """The elementwise sum over all devices, of a few float32 values per token."""

    def add_and_norm(self, part_TD: Array, residual_TD: Array | None, norm: Norm) -> tuple[Array, Array]:
        """(residual + sum of the parts, its norm), computed between any two products of a decoder. Identical on every device."""

    def num_runs(self, num_tokens: int) -> int:
        """See `KernelPolicy.num_runs`."""

    def likeliest(self, ids_R: Array, values_R: Array, num_columns: int) -> tuple[Array, Array]:
        """The vocabulary id, int32[R], of the largest value over all devices, the lowest id among equals, and that value,
        float32[R]; NaN counts as +inf.

        ids_R and values_R are this device's own winner of each row, out of its `num_columns` columns.
        """

    def all_columns(self, x_RV: Array) -> Array:
        """[R, V] whole on every device, from each device's columns."""

    def to_rows(self, x_RV: Array) -> Array:
        """[ceil(R / size), V]: this device's share of the rows with all columns, from all rows with its share of columns.

        Missing rows are filled with zeros.
        """

    def own_rows(self, x_R: T) -> T:
        """This device's share of the rows of replicated arrays, as in `to_rows`."""

    def from_rows(self, x_R: T, num_rows: int) -> T:
        """The first `num_rows` rows of all devices' shares, whole on every device. Arrays are int32 or float32."""

    def check(self, x: Array, otherwise: float) -> Array:
        """x, or `otherwise` in place of each value if an earlier exchange failed."""


@dataclass(frozen=True)
class OneDevice:
    """A device that has each layer to itself."""

    size = 1
    index = 0

    def through(self, workspace: Array | None) -> "OneDevice":
        return self

    def of_first(self, x_1M: Array) -> Array:
        return x_1M

    def max(self, x: Array) -> Array:
        return x

    def sum(self, x: Array) -> Array:
        return x

    def add_and_norm(self, part_TD: Array, residual_TD: Array | None, norm: Norm) -> tuple[Array, Array]:
        x_TD = part_TD if residual_TD is None else residual_TD + part_TD
        return x_TD, norm(x_TD)

    def num_runs(self, num_tokens: int) -> int:
        return 1

    def likeliest(self, ids_R: Array, values_R: Array, num_columns: int) -> tuple[Array, Array]:
        return ids_R, values_R

    def all_columns(self, x_RV: Array) -> Array:
        return x_RV

    def to_rows(self, x_RV: Array) -> Array:
        return x_RV

    def own_rows(self, x_R: T) -> T:
        return x_R

    def from_rows(self, x_R: T, num_rows: int) -> T:
        return x_R

    def check(self, x: Array, otherwise: float) -> Array:
        return x


ONE_DEVICE = OneDevice()


@dataclass(frozen=True)
class TensorShards:
    """Devices along the mesh axis `tensor`, inside a shard_map over it."""

    size: int
    policy: KernelPolicy
    workspace: Array | None = None
    """This device's part of `Communicator.workspace`: the devices exchange what is small through each other's memory.
    None: by XLA's collectives alone."""

    @property
    def index(self) -> Array:
        return jax.lax.axis_index(TENSOR)

    def through(self, workspace: Array | None) -> "TensorShards":
        return replace(self, workspace=workspace)

    def of_first(self, x_1M: Array) -> Array:
        return x_1M if self.workspace is None else self._gather(x_1M)[0, 0]

    def max(self, x: Array) -> Array:
        return jnp.max(self._gather(x), axis=0)

    def sum(self, x: Array) -> Array:
        return jnp.sum(self._gather(x), axis=0)

    def add_and_norm(self, part_TD: Array, residual_TD: Array | None, norm: Norm) -> tuple[Array, Array]:
        by = self._by("all_reduce_norm", part_TD)
        if by["implementation"] == "xla" or not norm.is_plain:
            sum_TD = collectives.all_reduce(part_TD, **self._by("all_reduce", part_TD))
            return ONE_DEVICE.add_and_norm(sum_TD, residual_TD, norm)
        return collectives.all_reduce_norm(part_TD, residual_TD, norm.weight[...], norm.eps, **by)  # type: ignore[attr-defined]

    def num_runs(self, num_tokens: int) -> int:
        return self.policy.num_runs(num_tokens)

    def likeliest(self, ids_R: Array, values_R: Array, num_columns: int) -> tuple[Array, Array]:
        ids_R = self.index * num_columns + ids_R
        own_R2 = jnp.stack([ids_R, jax.lax.bitcast_convert_type(values_R, jnp.int32)], axis=1)
        all_SR2 = self._gather(own_R2)
        ids_SR, values_SR = all_SR2[..., 0], jax.lax.bitcast_convert_type(all_SR2[..., 1], jnp.float32)
        # Ranks are in the order of ids, and argmax takes the first of equals.
        rank_1R = jnp.argmax(jnp.where(jnp.isnan(values_SR), jnp.inf, values_SR), axis=0)[None]
        return tuple(jnp.take_along_axis(x_SR, rank_1R, axis=0)[0] for x_SR in (ids_SR, values_SR))  # type: ignore[return-value]

    def all_columns(self, x_RV: Array) -> Array:
        return jax.lax.all_gather(x_RV, TENSOR, axis=1, tiled=True)

    def to_rows(self, x_RV: Array) -> Array:
        num_rows, num_columns = x_RV.shape
        share = -(-num_rows // self.size)
        x_SRV = jnp.pad(x_RV, ((0, share * self.size - num_rows), (0, 0))).reshape(self.size, share, num_columns)
        x_SRV = collectives.all_to_all(x_SRV, **self._by("all_to_all", x_SRV))
        return x_SRV.transpose(1, 0, 2).reshape(share, -1)

    def own_rows(self, x_R: T) -> T:
        def own(x: Array) -> Array:
            share = -(-x.shape[0] // self.size)
            padding = ((0, share * self.size - x.shape[0]), *((0, 0),) * (x.ndim - 1))
            return jax.lax.dynamic_slice_in_dim(jnp.pad(x, padding), self.index * share, share)

        return jax.tree.map(own, x_R)  # type: ignore[no-any-return]

    def from_rows(self, x_R: T, num_rows: int) -> T:
        def whole(x: Array) -> Array:
            return self._gather(x).reshape(-1, *x.shape[1:])[:num_rows]

        return jax.tree.map(whole, x_R)  # type: ignore[no-any-return]

    def check(self, x: Array, otherwise: float) -> Array:
        if self.workspace is None:
            return x
        status = collectives.status(x, axis=TENSOR, implementation="peer", workspace=self.workspace)
        return jnp.where(status[0] != FAILED, x, otherwise)

    def _gather(self, x: Array) -> Array:
        """Every device's x along a new first dimension, whole on every device."""
        return collectives.all_gather(x, **self._by("all_gather", x))

    def _by(self, op: str, x: Array) -> dict[str, Any]:
        """How to compute a collective of x: through the peers' memory up to the size where that is faster."""
        implementation = "xla"
        if self.workspace is not None:
            implementation = collectives.choose(op, shape=x.shape, dtype=x.dtype, num_devices=self.size)
        return {"axis": TENSOR, "implementation": implementation, "workspace": self.workspace}


def make_shards(mesh: Mesh, policy: KernelPolicy) -> Shards:
    """The shards of a mesh."""
    size = tensor_size(mesh)
    return ONE_DEVICE if size == 1 else TensorShards(size, policy)
