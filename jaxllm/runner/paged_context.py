"""State of layers between steps, while a model runs: `attend` over the paged cache, and the states of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import CacheView, LayerPlace
from jaxllm.layers.attend import LatentProjection, Projection, TokenScores
from jaxllm.layers.prompt_attention import attend_in_prompts
from jaxllm.layers.row_states import StateRows
from jaxllm.runner.chunks import Rows, in_chunks
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.token_split import TokenSplit
from pallas_kernels import mla_attention, sparse_attention
from pallas_kernels.paged_attention.parts import Part, combine
from pallas_kernels.rope_cache_write import rope_and_write
from pallas_kernels.span_attention import Later, span_attention


class GroupTable(NamedTuple):
    """Where the rows and tokens of a step are in the blocks of one group of layers."""

    page_table_RB: jax.Array
    slot_T: jax.Array
    """Slot in the cache; -1 for tokens that must not be written."""


@dataclass
class PagedContext:
    """One step's attention and states. `caches` is replaced layer by layer as the model is traced."""

    caches: list[jax.Array] | dict[int, jax.Array]
    """The arrays of a `CacheLayout`, then its states; in the trace of one layer, those of this layer by index."""
    places: Sequence[LayerPlace]
    tables: Sequence[GroupTable] | Mapping[int, GroupTable]
    """By group; in the trace of one layer, that of its group."""
    query_start_R1: jax.Array
    kv_length_R: jax.Array
    rows: StateRows
    num_queries: int | None
    """Tokens of each row, in a step where every row has as many; None: any mix."""
    kernels: Kernels
    devices: TokenSplit | None = None
    """Devices that split tokens: the caches are this one's parts, projections and outputs are of its share of the tokens."""
    later: Later | None = None
    """The later tokens of the step that tokens see too; None: attention is causal."""
    segment_T: jax.Array | None = None
    """In a step of an encoder: the prompt of each token, as `attend_in_prompts` takes it; None: attention is over the cache."""
    chosen_TK: jax.Array | None = None
    """Slots of the tokens that the latest layer with scores chose; None: there was none. Replaced as `caches` is."""

    def __call__(
        self,
        layer: int,
        projection: Projection,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_KG: jax.Array | None = None,
        reads_layer: int | None = None,
        chunk: int | None = None,
    ) -> jax.Array:
        """Attention output [T, K, G, H]. A cache of a wide type takes keys and values as they are."""
        if self.segment_T is not None:
            assert soft_cap is None and sinks_KG is None, "no encoder has them"
            kernel: dict[str, Any] = {
                "implementation": self.kernels.segment_attention or "xla",
                "interpret": self.kernels.interpret,
            }
            return attend_in_prompts(projection, self.segment_T, scale=scale, window=window, **kernel)
        place, table = self._find(layer)
        writes = reads_layer is None
        assert writes or self.later is None, "the keys of later tokens are not those of the projection"
        k_pages, v_pages = (_seen(self.caches[index], place.view) for index in place.arrays)
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
            self.later,
            num_queries=self.num_queries,
            kernels=self.kernels,
            devices=self.devices,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            writes=writes,
            chunk=chunk,
        )
        if not writes:
            return out
        for index, pages in zip(place.arrays, (k_pages, v_pages), strict=True):
            self.caches[index] = pages if place.view is None else pages.reshape(self.caches[index].shape)
        return out

    def attend_to_latents(
        self,
        layer: int,
        projection: LatentProjection,
        *,
        scale: float,
        top_k: int | None = None,
        token_scores: TokenScores | None = None,
    ) -> jax.Array:
        """Attention output [T, N, V] of a layer whose cache is an array of latents, and of keys that `token_scores` are made with."""
        place, table = self._find(layer)
        index = place.arrays[0]
        if top_k is not None:
            if token_scores is not None:
                of_keys = place.arrays[1]
                self.chosen_TK, self.caches[of_keys] = _write_and_choose(
                    token_scores,
                    self.caches[of_keys],
                    table.page_table_RB,
                    self.query_start_R1,
                    self.kv_length_R,
                    table.slot_T,
                    num_queries=self.num_queries,
                    top_k=top_k,
                )
            out, self.caches[index] = _write_and_attend_to_chosen(
                projection, self.caches[index], self.chosen_TK, table.slot_T, kernels=self.kernels, scale=scale
            )
            return out
        out, self.caches[index] = _write_and_attend_to_latents(
            projection,
            self.caches[index],
            table.page_table_RB,
            self.query_start_R1,
            self.kv_length_R,
            table.slot_T,
            num_queries=self.num_queries,
            kernels=self.kernels,
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
        table = self.tables[place.group]
        return place, table if place.view is None else _table_of_view(table, place.view, self.page_size(place))

    def page_size(self, place: LayerPlace) -> int:
        """Slots of a page of a layer's arrays on this device."""
        return self.caches[place.arrays[0]].shape[2]


def _seen(pages_PKSH: jax.Array, view: CacheView | None) -> jax.Array:
    """An array as a layer sees it, on each device with its share of the heads."""
    if view is None:
        return pages_PKSH
    num_pages, num_heads, page_size, width = pages_PKSH.shape
    own_heads = num_heads * width // (view.num_layers * view.width)
    return pages_PKSH.reshape(num_pages * view.num_layers, own_heads, page_size, view.width)


def _table_of_view(table: GroupTable, view: CacheView, page_size: int) -> GroupTable:
    """The table of one of several layers in each page."""
    page_T = table.slot_T // page_size
    slot_T = (page_T * view.num_layers + view.index) * page_size + table.slot_T % page_size
    return GroupTable(table.page_table_RB * view.num_layers + view.index, jnp.where(table.slot_T < 0, -1, slot_T))


@partial(jax.jit, static_argnames=("num_queries", "kernels", "devices", "scale", "window", "soft_cap", "writes", "chunk"))
def _write_and_attend(
    projection: Projection,
    k_pages_PKSH: jax.Array,
    v_pages_PKSH: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    slot_T: jax.Array,
    sinks_KG: jax.Array | None,
    later: Later | None,
    *,
    num_queries: int | None,
    kernels: Kernels,
    devices: TokenSplit | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    writes: bool,
    chunk: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer, over the heads of this device, and over its part of the keys if `devices` split them. Returns outputs and caches.
    writes: whether the projection has keys and values to write. chunk: see `Attention.chunk`.

    A jit of its own, though always inside a step's program: layers that are alike share one trace and one lowering of the kernels.
    """
    scale_2 = projection.kv_scale_2
    k_scale, v_scale = (None, None) if scale_2 is None else (scale_2[0], scale_2[1])
    if devices is not None:
        projection = devices.of_all_tokens(projection, len(slot_T))
    if writes:
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
    else:  # a kernel that writes nothing would still be a new version of the caches, which XLA may copy them for
        (q_TKGH, _, _), k_pages, v_pages = projection.finished(), k_pages_PKSH, v_pages_PKSH
    if chunk is not None:
        assert (devices, later) == (None, None), "refused before"
        rows = Rows(page_table_RB, query_start_R1, kv_length_R, num_queries)
        rows = in_chunks(rows, len(slot_T), chunk=chunk, page_size=k_pages.shape[2])
        page_table_RB, query_start_R1, kv_length_R, num_queries = rows
    op, implementation = kernels.attention_of(q_TKGH.shape[-1])
    if num_queries is not None:
        attention = partial(op.paged_decode, q_TKGH, k_pages, v_pages, page_table_RB, kv_length_R, num_queries=num_queries)
    else:
        attention = partial(op.paged_attention, q_TKGH, k_pages, v_pages, page_table_RB, query_start_R1, kv_length_R)
    own: dict[str, Any] = {"sinks_KG": sinks_KG}
    if devices is not None or later is not None:
        own = {"sinks_KG": None, "part": Part(0, 1) if devices is None else devices.part}
    out: Any = attention(
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        **own,
        implementation=implementation,
        interpret=kernels.interpret,
    )
    if devices is not None:
        out_TKGH, lse_TKG = out
        out = devices.combined(out_TKGH, lse_TKG, sinks_KG)
    elif later is not None:
        _, k_TKH, v_TKH = projection.finished()
        of_later = span_attention(q_TKGH, k_TKH, v_TKH, later, scale=scale, soft_cap=soft_cap)
        out_C, lse_C = (jnp.stack(both) for both in zip(out, of_later, strict=True))
        out = combine(out_C, lse_C, sinks_KG)
    return out, k_pages, v_pages


@partial(jax.jit, static_argnames=("num_queries", "kernels", "scale"))
def _write_and_attend_to_latents(
    projection: LatentProjection,
    pages_P1SC: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    slot_T: jax.Array,
    *,
    num_queries: int | None,
    kernels: Kernels,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """One layer of latent attention. Returns outputs and cache."""
    kernel: dict[str, Any] = {"implementation": kernels.mla_attention, "interpret": kernels.interpret}
    tokens, pages_P1SC = _written(projection, pages_P1SC, slot_T, kernel)
    key_NPL, value_NVL = projection.key_NPL, projection.value_NVL
    if num_queries is None:
        out_TNV = mla_attention.latent_attention(
            tokens, pages_P1SC, page_table_RB, query_start_R1, kv_length_R, key_NPL, value_NVL, scale=scale, **kernel
        )
        return out_TNV, pages_P1SC
    q_TNL = mla_attention.absorb(tokens.q_TNP, key_NPL)
    sum_TNL = mla_attention.latent_decode(
        q_TNL, tokens.q_TNE, pages_P1SC, page_table_RB, kv_length_R, num_queries=num_queries, scale=scale, **kernel
    )
    return mla_attention.values_of(sum_TNL, value_NVL), pages_P1SC


@partial(jax.jit, static_argnames=("num_queries", "top_k"))
def _write_and_choose(
    scores: TokenScores,
    pages_P1SI: jax.Array,
    page_table_RB: jax.Array,
    query_start_R1: jax.Array,
    kv_length_R: jax.Array,
    slot_T: jax.Array,
    *,
    num_queries: int | None,
    top_k: int,
) -> tuple[jax.Array, jax.Array]:
    """The tokens that one layer attends to. Returns their slots and the cache of the keys."""
    pages_P1SI = sparse_attention.write_keys(pages_P1SI, scores.key_TI, slot_T)
    rows = (page_table_RB, query_start_R1, kv_length_R)
    options: dict[str, Any] = {"top_k": top_k, "num_queries": num_queries}
    return sparse_attention.choose_tokens(scores.q_TXI, scores.weight_TX, pages_P1SI, *rows, **options), pages_P1SI


@partial(jax.jit, static_argnames=("kernels", "scale"))
def _write_and_attend_to_chosen(
    projection: LatentProjection,
    pages_P1SC: jax.Array,
    chosen_TK: jax.Array,
    slot_T: jax.Array,
    *,
    kernels: Kernels,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """One layer of latent attention to the tokens in these slots. Returns outputs and cache."""
    kernel: dict[str, Any] = {"implementation": kernels.mla_attention, "interpret": kernels.interpret}
    tokens, pages_P1SC = _written(projection, pages_P1SC, slot_T, kernel)
    q_TNC = jnp.concatenate([mla_attention.absorb(tokens.q_TNP, projection.key_NPL), tokens.q_TNE], axis=-1)
    sum_TNL = sparse_attention.attend_to_slots(
        q_TNC, pages_P1SC, chosen_TK, latent_dim=projection.key_NPL.shape[2], scale=scale
    )
    return mla_attention.values_of(sum_TNL, projection.value_NVL), pages_P1SC


def _written(
    projection: LatentProjection, pages_P1SC: jax.Array, slot_T: jax.Array, kernel: Mapping[str, Any]
) -> tuple[mla_attention.Tokens, jax.Array]:
    """The tokens as attention takes them, and the cache with them."""
    return mla_attention.rope_and_write(
        projection.q_TNH,
        projection.vector_TC,
        projection.cos_TE,
        projection.sin_TE,
        projection.norm_L,
        pages_P1SC,
        slot_T,
        eps=projection.eps,
        **kernel,
    )
