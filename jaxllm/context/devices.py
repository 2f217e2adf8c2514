"""Exchanges between the devices along the mesh axis `context`. They have the same weights, a share of a step's tokens each, and a part of
each row's keys and values.

    outside of attention   each computes its share of the tokens: products, norms, feed-forward
    of a layer's attention   all get all queries, keys and values; each writes the keys of its own pages, and attends to these with all
                           queries; each gets the results of its share of the tokens, of all parts, and combines them

Steps of a few tokens are not shared out: their products take as long for all tokens as for some. Each device then computes all of
them, and only the results of attention are exchanged.
"""

from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jaxllm.kernel_policy import KernelPolicy
from jaxllm.layers.attend import Projection
from jaxllm.parallel.mesh import CONTEXT, context_size
from pallas_kernels.paged_attention.parts import Part, combine

T = TypeVar("T")


@dataclass(frozen=True)
class ContextDevices:
    """`size` devices along the mesh axis `context`, as seen by one of them inside a shard_map over it."""

    size: int
    policy: KernelPolicy

    @property
    def part(self) -> Part:
        """Which part of the keys this device has."""
        return Part(lax.axis_index(CONTEXT), self.size)

    def shares_out(self, num_tokens: int) -> bool:
        """See `KernelPolicy.shares_tokens`."""
        return self.policy.shares_tokens(num_tokens)

    def share(self, x_T: T) -> T:
        """This device's share of arrays by token: ceil(T / size), missing ones zeros; all in a small step."""

        def of(x: Array) -> Array:
            return self._own(x) if self.shares_out(len(x)) else x

        return jax.tree.map(of, x_T)  # type: ignore[no-any-return]

    def whole(self, x: Array, num_tokens: int) -> Array:
        """All tokens of an array whose tokens were shared out by `share`. Identical on every device, whatever their roundings are."""
        return self._gather(x if self.shares_out(num_tokens) else self._own(x), num_tokens)

    def total(self, x: Array, num_tokens: int) -> Array:
        """Counts of all tokens, from those of the tokens that each device computes."""
        return lax.psum(x, CONTEXT) if self.shares_out(num_tokens) else x

    def of_all_tokens(self, projection: Projection, num_tokens: int) -> Projection:
        """A projection of this device's tokens as one of all tokens; its angles are those of all already."""
        if not self.shares_out(num_tokens):
            return projection
        return replace(projection, qkv_TKGH=self._gather(projection.qkv_TKGH, num_tokens))

    def own_slots(self, slot_T: Array, page_size: int) -> Array:
        """Slots of the whole cache as those of this device's part; -1 for slots of other parts, as for no slot.

        page_size: slots of a block on each device; those on the first come first.
        """
        block_T, offset_T = slot_T // (self.size * page_size), slot_T % (self.size * page_size)
        is_own_T = (slot_T >= 0) & (offset_T // page_size == lax.axis_index(CONTEXT))
        return jnp.where(is_own_T, block_T * page_size + offset_T % page_size, -1)

    def combined(self, out_TKGH: Array, lse_TKG: Array, sinks_KG: Array | None) -> Array:
        """Attention of the tokens that this device computes, over the keys of all parts, from that of all tokens over its own part."""
        packed = _packed(out_TKGH, lse_TKG)
        if self.shares_out(len(packed)):
            shares = self._padded(packed).reshape(self.size, -1, *packed.shape[1:])
            packed_C = lax.all_to_all(shares, CONTEXT, split_axis=0, concat_axis=0)
        else:
            packed_C = lax.all_gather(packed, CONTEXT)
        return combine(*_unpacked(packed_C, out_TKGH.dtype), sinks_KG)

    def _own(self, x: Array) -> Array:
        share = -(-len(x) // self.size)
        return lax.dynamic_slice_in_dim(self._padded(x), lax.axis_index(CONTEXT) * share, share)

    def _padded(self, x: Array) -> Array:
        """With as many tokens as all devices' shares have."""
        return jnp.pad(x, ((0, -len(x) % self.size), *((0, 0),) * (x.ndim - 1)))

    def _gather(self, x: Array, num_tokens: int) -> Array:
        return lax.all_gather(x, CONTEXT, tiled=True)[:num_tokens]


def _packed(out: Array, lse: Array) -> Array:
    """Both in one array of unsigned integers, [..., H + 1] or, of 16 bits, [..., H + 2]: one exchange in place of two."""
    bits = jnp.uint32 if out.dtype.itemsize == 4 else jnp.uint16
    parts = lax.bitcast_convert_type(lse, bits)
    parts = parts if bits == jnp.uint16 else parts[..., None]
    return jnp.concatenate([lax.bitcast_convert_type(out, bits), parts], axis=-1)


def _unpacked(packed: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    width = 1 if packed.dtype == jnp.uint32 else 2
    out, parts = packed[..., :-width], packed[..., -width:]
    lse = lax.bitcast_convert_type(parts if width == 2 else parts[..., 0], jnp.float32)
    return lax.bitcast_convert_type(out, dtype), lse


def make_context(mesh: Mesh, policy: KernelPolicy) -> ContextDevices | None:
    """The devices of a mesh along its axis `context`; None if it has no such axis."""
    size = context_size(mesh)
    return ContextDevices(size, policy) if size > 1 else None
