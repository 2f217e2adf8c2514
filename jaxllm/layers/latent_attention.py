"""Multi-head latent attention: keys and values of all heads are made of one vector per token. Source: arXiv:2405.04434, section 2.1.

The cache holds the latent and the rotated part of the key, which is common to all heads; how attention uses the weights that make
keys and values of latents is left to `pallas_kernels.mla_attention`.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.attend import LatentProjection
from jaxllm.layers.attention import GATES, query_factors
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.norm import Normalization
from jaxllm.layers.rope import head_order
from jaxllm.layers.runs import joined, products, products_by_run, starts
from jaxllm.layers.source import Module, Source, Tensor
from jaxllm.layers.step import Step
from jaxllm.layers.token_indexer import TokenIndexer
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import LatentAttention
from pallas_kernels.quantize import Sums


class MultiHeadLatentAttention(nnx.Module):
    """Attention of N heads over one vector per token: a latent of R values, then a rotated key of E values.

    Heads are split over devices; latents are computed on each of them. The values of rotated keys and queries are ordered so that
    value i turns with value i + E/2.
    """

    quantizes_inputs = False
    """Whether all products with what it takes do."""

    def __init__(self, config: ModelConfig, part: LatentAttention, layer: int, prefix: str):
        D, N, R, dtype = config.hidden_size, part.num_heads, part.latent_dim, config.dtype
        P, E, V = part.plain_dim, part.rotated_dim, part.value_dim
        self.layer, self.part = layer, part
        rotated = head_order(part.rope, E)
        names = {key: [f"{prefix}{name}" for name in found] for key, found in part.linears.items()}
        widths = [R + E] if part.query_dim is None else [part.query_dim, R + E]
        orders = [None] * (len(widths) - 1) + [_behind(R, rotated)]
        self.latents = Linear(
            "td,dc->tc",
            (D, sum(widths)),
            ("embed", "latent"),
            dtype,
            modules=[
                Module(name, (width,), order) for name, width, order in zip(names["latents"], widths, orders, strict=True)
            ],
            bias=part.bias,
        )
        self.latent_norm = Normalization(part.latent_norm, R, "latent", dtype, prefix=prefix)
        assert self.latent_norm.is_plain, "one kernel norms latents, rotates, and writes the cache"
        self.query_norm = nnx.data(None)
        inputs, axis = D, "embed"
        if part.query_norm is not None and part.query_dim is not None:
            inputs, axis = part.query_dim, "latent"
            self.query_norm = Normalization(part.query_norm, inputs, axis, dtype, prefix=prefix)
        self.query = Linear(
            "td,dnh->tnh",
            (inputs, N, P + E),
            (axis, "heads", "head"),
            dtype,
            modules=[Module(names["query"][0], (N, P + E), _behind(P, rotated))],
        )
        self.indexer = None if part.index is None else TokenIndexer(config, part, part.index, prefix)
        # Not a product of x: a checkpoint's quantised weights are widened.
        (key_value,) = names["key_value"]

        def of_heads(start: int, stop: int) -> nnx.Param:
            view = (N, stop - start, R)
            tensor = Tensor(f"{key_value}.weight", (N * (P + V), R), view, columns=(start, stop, P + V))
            return abstract_param(view, ("heads", "head", "latent"), dtype, source=Source((tensor,), 0, (0, 1, 2)))

        self.key, self.value = of_heads(0, P), of_heads(P, P + V)
        self.gate = nnx.data(None)
        if part.gate is not None:
            width = 1 if part.gate.by_head else V
            gate = [Module(name, (N, width)) for name in names["gate"]]
            self.gate = Linear("td,dnv->tnv", (D, N, width), ("embed", "heads", "head"), dtype, modules=gate)
        self.out = Linear(
            "tnv,nvd->td",
            (N, V, D),
            ("heads", "head", "embed"),
            dtype,
            modules=[Module(name, (D,)) for name in names["out"]],
            bias=part.bias,
        )

    def __call__(self, runs: Sequence[Array], step: Step) -> list[Array | Sums]:
        """The output of each of these consecutive runs of tokens [T, D]; of several devices, this one's part of the sum."""
        assert step.attend_to_latents is not None, "the step has no attention over latents"
        part = self.part
        projected = (self._projected(x_TD, step, start) for x_TD, start in zip(runs, starts(runs), strict=True))
        queries, vectors, query_latents = zip(*projected, strict=True)
        cos_TE, sin_TE = step.angles(part.rope, part.rotated_dim)
        q_TNH = joined(queries)
        if part.query_scale is not None:
            q_TNH = (q_TNH * query_factors(part.query_scale, step.positions_T)[:, None, None]).astype(q_TNH.dtype)
        projection = LatentProjection(
            q_TNH=q_TNH,
            vector_TC=joined(vectors),
            cos_TE=cos_TE,
            sin_TE=sin_TE,
            norm_L=self.latent_norm.factor,
            key_NPL=self.key[...],
            value_NVL=self.value[...],
            eps=self.latent_norm.eps,
        )
        choice: dict[str, Any] = {} if part.top_k is None else {"top_k": part.top_k}
        if self.indexer is not None:
            choice["token_scores"] = self.indexer(runs, query_latents, step, (cos_TE, sin_TE))
        out_TNV = step.attend_to_latents(self.layer, projection, scale=part.score_scale, **choice)
        if self.gate is not None and part.gate is not None:
            gate_TNV = GATES[part.gate.activation](products(self.gate, runs, step).astype(jnp.float32))
            out_TNV = out_TNV * gate_TNV.astype(out_TNV.dtype)
        return products_by_run(self.out, out_TNV, runs, step)

    def _projected(self, x_TD: Array, step: Step, start: int) -> tuple[Array, Array, Array]:
        """Queries [T, N, P + E], latents with rotated keys behind them [T, R + E], neither normed nor rotated, and what queries are
        made of."""
        c_TC = step.product(self.latents, x_TD, start)
        if self.query_norm is None:
            return step.product(self.query, x_TD, start), c_TC, x_TD
        assert self.part.query_dim is not None
        query_TQ, c_TC = jnp.split(c_TC, [self.part.query_dim], axis=-1)
        query_TQ = self.query_norm(query_TQ)
        return step.product(self.query, query_TQ, start), c_TC, query_TQ


def _behind(start: int, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """An order of the values from `start` on; those before stay in place."""
    return None if order is None else (*range(start), *(start + i for i in order))
