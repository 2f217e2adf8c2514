"""What layers keep between steps, while a model runs: `attend` over the paged cache, and the states of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax

from jaxllm.cache_spec import LayerPlace
from jaxllm.layers.attend import Projection
from jaxllm.layers.row_states import StateRows
from jaxllm.runner.kernels import Kernels
from pallas_kernels.mla_attention import latent_attention, latent_decode, write_latents
from pallas_kernels.paged_attention import paged_attention, paged_decode
from pallas_kernels.rope_cache_write import rope_and_write


class GroupTable(NamedTuple):
    """Where the rows and tokens of a step are in the blocks of one group of layers."""

    page_table_RB: jax.Array
    slot_T: jax.Array
    """Slot in the cache; -1 for tokens that must not be written."""


@dataclass
class PagedContext:
    """One step's attention and states. `caches` is replaced layer by layer as the model is traced."""

    caches: list[jax.Array]
    """The arrays of a `CacheLayout`, then its states."""
    places: Sequence[LayerPlace]
    tables: Sequence[GroupTable]
    query_start_R1: jax.Array
    kv_length_R: jax.Array
    rows: StateRows
    is_decode: bool
    """Token i is the only token of row i."""
    kernels: Kernels

    def __call__(
        self,
        layer: int,
        projection: Projection,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_KG: jax.Array | None = None,
    ) -> jax.Array:
        """Attention output [T, K, G, H]. A cache of a wide type takes keys and values as they are."""
        place, table = self._find(layer)
        k_pages, v_pages = (self.caches[index] for index in place.arrays)
        if k_pages.dtype.itemsize > 1:
            projection = replace(projection, kv_scale_2=None)
        out, k_pages, v_pages = _write_and_attend(
            projection,
            k_pages,
            v_pages,
            table.page_table_RB,
            self.query_start_R1,
            self.kv_length_R,
            table.slot_T,
            sinks_KG,
            is_decode=self.is_decode,
            kernels=self.kernels,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
        for index, pages in zip(place.arrays, (k_pages, v_pages), strict=True):
            self.caches[index] = pages
        return out

    def attend_to_latents(
        self, layer: int, q_TNC: jax.Array, latent_TC: jax.Array, *, value_dim: int, scale: float
    ) -> jax.Array:
        """Attention output [T, N, value_dim] of a layer whose cache is one array."""
        place, table = self._find(layer)
        (index,) = place.arrays
        out, self.caches[index] = _write_and_attend_to_latents(
            q_TNC,
            latent_TC,
            self.caches[index],
            table.page_table_RB,
            self.query_start_R1,
            self.kv_length_R,
            table.slot_T,
            is_decode=self.is_decode,
            kernels=self.kernels,
            value_dim=value_dim,
            scale=scale,
        )
        return out

    def read(self, layer: int) -> tuple[jax.Array, ...]:
        """The states of all rows that a layer keeps."""
        return tuple(self.caches[index] for index in self.places[layer].arrays)

    def write(self, layer: int, arrays: Sequence[jax.Array]) -> None:
        """Replace them."""
        for index, array in zip(self.places[layer].arrays, arrays, strict=True):
            self.caches[index] = array

    def _find(self, layer: int) -> tuple[LayerPlace, GroupTable]:
        place = self.places[layer]
        assert place.group is not None, f"layer {layer} keeps a state by row, no blocks"
        return place, self.tables[place.group]


@partial(jax.jit, static_argnames=("is_decode", "kernels", "scale", "window", "soft_cap"))
def _write_and_attend(
    projection: Projection,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    slot_T: jax.Array,
    sinks_KG: jax.Array | None,
    *,
    is_decode: bool,
    kernels: Kernels,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer, over the heads of this device. Returns outputs and caches.

    A jit of its own, though always inside a step's program: layers that are alike share one trace and one lowering of the kernels.
    """
    scale_2 = projection.kv_scale_2
    k_scale, v_scale = (None, None) if scale_2 is None else (scale_2[0], scale_2[1])
    q_TKGH, k_pages, v_pages = rope_and_write(
        projection.qkv_TKGH,
        projection.cos_TH,
        projection.sin_TH,
        k_pages_PKSH,
        v_pages_PKSH,
        slot_T,
        q_norm_H=projection.q_norm_H,
        k_norm_H=projection.k_norm_H,
        eps=projection.eps,
        norm_offset=projection.norm_offset,
        k_scale=k_scale,
        v_scale=v_scale,
        implementation=kernels.rope_cache_write,
        interpret=kernels.interpret,
    )
    if is_decode:
        attention = partial(paged_decode, q_TKGH, k_pages, v_pages, page_table_RB, kv_length_R)
    else:
        attention = partial(paged_attention, q_TKGH, k_pages, v_pages, page_table_RB, query_start_R1, kv_length_R)
    out = attention(
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks_KG=sinks_KG,
        implementation=kernels.paged_attention,
        interpret=kernels.interpret,
    )
    return out, k_pages, v_pages


@partial(jax.jit, static_argnames=("is_decode", "kernels", "value_dim", "scale"))
def _write_and_attend_to_latents(
    q_TNC: jax.Array,
    latent_TC: jax.Array,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    slot_T: jax.Array,
    *,
    is_decode: bool,
    kernels: Kernels,
    value_dim: int,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """The same of a layer of latent attention. Returns outputs and cache."""
    pages_P1SC = write_latents(pages_P1SC, latent_TC, slot_T)
    if is_decode:
        attention = partial(latent_decode, q_TNC, pages_P1SC, page_table_RB, kv_length_R)
    else:
        attention = partial(latent_attention, q_TNC, pages_P1SC, page_table_RB, query_start_R1, kv_length_R)
    out_TNV = attention(value_dim=value_dim, scale=scale, implementation=kernels.mla_attention, interpret=kernels.interpret)
    return out_TNV, pages_P1SC
