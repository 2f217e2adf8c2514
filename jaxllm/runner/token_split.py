"""The interface between a step and devices that split its tokens, and the KV cache by tokens."""

from typing import Protocol, TypeVar

from jax import Array

from jaxllm.layers.attend import Projection
from pallas_kernels.paged_attention.parts import Part

T = TypeVar("T")


class TokenSplit(Protocol):
    """Devices that split tokens, as seen by one of them inside a shard_map over them. They have the same weights."""

    @property
    def part(self) -> Part:
        """Which part of the keys this device has."""

    def share(self, x_T: T) -> T:
        """The tokens of arrays by token that this device computes; all in a step that is not shared out."""

    def whole(self, x: Array, num_tokens: int) -> Array:
        """All tokens of an array whose tokens `share` has shared out. Identical on every device."""

    def total(self, x: Array, num_tokens: int) -> Array:
        """Counts of all tokens, from those of the tokens that each device computes."""

    def of_all_tokens(self, projection: Projection, num_tokens: int) -> Projection:
        """A projection of this device's tokens as one of all tokens; its angles are those of all already."""

    def own_slots(self, slot_T: Array, page_size: int) -> Array:
        """Slots of the whole cache as those of this device's part; -1 for slots of other parts, as for no slot.

        page_size: slots of a block on each device.
        """

    def combined(self, out_TKGH: Array, lse_TKG: Array, sinks_KG: Array | None) -> Array:
        """Attention of the tokens that this device computes, over the keys of all parts, from that of all tokens over its own part."""
