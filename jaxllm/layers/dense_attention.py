"""Causal attention without a cache: for training, and the oracle that paged attention is tested against."""

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.layers.attend import Attend, AttendToLatents, LatentProjection, Projection, TokenScores
from jaxllm.layers.linear import precision_of
from jaxllm.layers.row_states import OneSequence
from jaxllm.layers.step import Step
from pallas_kernels.mla_attention.products import absorb, values_of


def dense_attend(positions_T: Array, segment_ids_T: Array | None = None, num_later_T: Array | None = None) -> Attend:
    """An `attend` over the tokens of one call, each seeing its segment's tokens up to its own position, and so many later ones.

    Without segment ids all tokens are one sequence. Scores are [K, G, T, T] float32: for short sequences.
    """
    written: dict[int, tuple[Array, Array]] = {}

    def attend(
        layer: int,
        projection: Projection,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks_KG: Array | None = None,
        reads_layer: int | None = None,
        chunk: int | None = None,
    ) -> Array:
        q_TKGH, *own = projection.finished()
        k_TKH, v_TKH = written[layer] = (own[0], own[1]) if reads_layer is None else written[reads_layer]
        visible_TS = _visible(positions_T, segment_ids_T, window, num_later_T)
        if chunk is not None:
            visible_TS &= positions_T[:, None] // chunk == positions_T[None, :] // chunk
        return _attend(q_TKGH, k_TKH, v_TKH, visible_TS, scale, soft_cap, sinks_KG)

    return attend


def dense_attend_to_latents(positions_T: Array, segment_ids_T: Array | None = None) -> AttendToLatents:
    """As `dense_attend`, for latent attention."""
    chosen: list[Array] = []
    """Whether each token was chosen, by the layers with scores."""

    def attend(
        layer: int,
        projection: LatentProjection,
        *,
        scale: float,
        top_k: int | None = None,
        token_scores: TokenScores | None = None,
    ) -> Array:
        q_TNP, q_TNE, latent_TL, rotated_TE = projection.finished()
        q_TNC = jnp.concatenate([absorb(q_TNP, projection.key_NPL), q_TNE], axis=-1)
        vector_T1C = jnp.concatenate([latent_TL, rotated_TE], axis=-1)[:, None]
        visible_TS = _visible(positions_T, segment_ids_T, None)
        if token_scores is not None and top_k is not None:
            chosen.append(_chosen(token_scores, visible_TS, top_k))
        visible_TS = visible_TS if top_k is None else visible_TS & chosen[-1]
        sum_TNL = _attend(q_TNC[:, None], vector_T1C, latent_TL[:, None], visible_TS, scale, None)[:, 0]
        return values_of(sum_TNL, projection.value_NVL)

    return attend


def dense_step(token_ids_T: Array, positions_T: Array, segment_ids_T: Array | None = None) -> Step:
    """A step of sequences that attend to themselves, with nothing cached. Layers with a state by row take one sequence alone."""
    return Step(
        token_ids_T,
        positions_T,
        dense_attend(positions_T, segment_ids_T),
        attend_to_latents=dense_attend_to_latents(positions_T, segment_ids_T),
        states=OneSequence(len(token_ids_T)) if segment_ids_T is None else None,
    )


def _visible(positions_T: Array, segment_ids_T: Array | None, window: int | None, num_later_T: Array | None = None) -> Array:
    distance_TS = positions_T[:, None] - positions_T[None, :]
    visible_TS = distance_TS >= (0 if num_later_T is None else -num_later_T[:, None])
    if window is not None:
        visible_TS &= distance_TS < window
    if segment_ids_T is not None:
        visible_TS &= segment_ids_T[:, None] == segment_ids_T[None, :]
    return visible_TS


def _chosen(of: TokenScores, visible_TS: Array, top_k: int) -> Array:
    """Whether a token is among the visible ones with the highest scores; of equal ones the first counts."""
    products_TXS = jnp.einsum("txi,si->txs", of.q_TXI, of.key_TI, precision="highest", preferred_element_type=jnp.float32)
    score_TS = jnp.einsum("tx,txs->ts", of.weight_TX, jax.nn.relu(products_TXS), precision="highest")
    order_TS = jnp.argsort(jnp.where(visible_TS, score_TS, -jnp.inf), axis=1, descending=True, stable=True)
    place_TS = jnp.argsort(order_TS, axis=1)
    return place_TS < top_k


def _attend(
    q_TKGH: Array,
    k_TKH: Array,
    v_TKV: Array,
    visible_TS: Array,
    scale: float,
    soft_cap: float | None,
    sinks_KG: Array | None = None,
) -> Array:
    precision = precision_of(q_TKGH.dtype)
    scores_KGTS = scale * jnp.einsum("tkgh,skh->kgts", q_TKGH, k_TKH, precision=precision, preferred_element_type=jnp.float32)
    if soft_cap is not None:
        scores_KGTS = soft_cap * jnp.tanh(scores_KGTS / soft_cap)
    scores_KGTS = jnp.where(visible_TS, scores_KGTS, -jnp.inf)
    if sinks_KG is not None:
        sinks_KGT1 = jnp.broadcast_to(sinks_KG[:, :, None, None], (*scores_KGTS.shape[:-1], 1))
        scores_KGTS = jnp.concatenate([scores_KGTS, sinks_KGT1], axis=-1)
    weights_KGTS = jax.nn.softmax(scores_KGTS, axis=-1)[..., : len(k_TKH)]
    return jnp.einsum("kgts,skv->tkgv", weights_KGTS.astype(v_TKV.dtype), v_TKV, precision=precision)
