"""Scores by which latent attention chooses the tokens that a query sees. Source: arXiv:2512.02556, section 2.1.

The release also turns queries and keys by a Hadamard matrix before it rounds them to 8 bits. Products do not depend on it, and are of
queries and keys in the type of the model here. Factors that all scores have in common are left out: they change no order.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.attend import TokenScores
from jaxllm.layers.linear import Linear, abstract_param, precision_of
from jaxllm.layers.norm import Normalization
from jaxllm.layers.rope import head_order
from jaxllm.layers.runs import joined, products, starts
from jaxllm.layers.source import Module
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import LatentAttention, TokenIndex
from pallas_kernels.rope_cache_write.xla import apply_rope


class TokenIndexer(nnx.Module):
    """X heads of I values, of which the first turn. Every device has all heads: each needs the tokens that all of them choose."""

    def __init__(self, config: ModelConfig, part: LatentAttention, index: TokenIndex, prefix: str):
        D, X, I, dtype = config.hidden_size, index.num_heads, index.head_dim, config.dtype  # noqa: E741
        assert part.query_dim is not None and part.rope is not None, "its queries are made of the latents of queries, and turn"
        self.rotated_dim = part.rotated_dim
        order = head_order(replace(part.rope, interleaved=index.interleaved), part.rotated_dim)
        self.order = None if order is None else (*order, *range(part.rotated_dim, I))
        (query,), (key,) = ((f"{prefix}{name}" for name in part.linears[each]) for each in ("index_query", "index_key"))
        self.query = Linear(
            "tq,qxi->txi", (part.query_dim, X, I), ("latent", "index", "head"), dtype, modules=[Module(query, (X, I))]
        )
        self.key = Linear("td,di->ti", (D, I), ("embed", "head"), dtype, modules=[Module(key, (I,))])
        self.key_norm = Normalization(index.key_norm, I, "head", dtype, prefix=prefix)
        source = f"{prefix}{index.name}.weights_proj.weight"
        self.weight = abstract_param((X, D), ("index", "embed"), "float32", source=source)

    def __call__(
        self, runs: Sequence[Array], query_latents: Sequence[Array], step: Step, angles: tuple[Array, Array]
    ) -> TokenScores:
        """The factors of the scores of all tokens of the runs x [T, D], whose queries have these latents [T, Q]."""
        x_TD = joined(runs)
        keys = [self.key_norm(step.product(self.key, x, start)) for x, start in zip(runs, starts(runs), strict=True)]
        return TokenScores(
            q_TXI=self._rotated(products(self.query, query_latents, step), angles),
            key_TI=self._rotated(joined(keys), angles),
            weight_TX=jnp.einsum(
                "td,xd->tx", x_TD.astype(jnp.float32), self.weight[...], precision=precision_of(jnp.dtype("float32"))
            ),
        )

    def _rotated(self, x: Array, angles: tuple[Array, Array]) -> Array:
        """With the values that turn together in two halves, whose order does not matter as queries and keys have the same, and turned."""
        x = x if self.order is None else x[..., np.array(self.order)]
        turned, others = jnp.split(x, [self.rotated_dim], axis=-1)
        return jnp.concatenate([apply_rope(turned, angles), others], axis=-1)
