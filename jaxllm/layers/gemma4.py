"""Gemma 4's decoder: layers with an MLP in addition to experts, and a second embedding of each token with a part for each layer. Source:
the Gemma 4 release, 2026.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.decoder import AnyNorm, CausalLM, DecoderBlock, Run, keep_features
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear, abstract_param
from jaxllm.layers.mlp import ACTIVATIONS, FeedForward
from jaxllm.layers.moe import MixtureOfExperts
from jaxllm.layers.norm import NoNorm, Normalization, make_norm, normed
from jaxllm.layers.runs import starts
from jaxllm.layers.source import Module
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Gemma4Layer, PerLayerEmbedding
from pallas_kernels.quantize import scaled


class PerLayerInputs(nnx.Module):
    """The second embedding of tokens: the mean of a row of a table and a product of x as it enters the first layer, scaled to keep its
    size."""

    def __init__(self, config: ModelConfig, part: PerLayerEmbedding):
        D, L, P = config.hidden_size, part.num_layers, part.width
        stem = config.names.embedding.removesuffix("embed_tokens")
        self.embedding = Embedding(replace(config, hidden_size=L * P), f"{stem}embed_tokens_per_layer")
        modules = [Module(f"{stem}per_layer_model_projection", (L * P,))]
        self.projection = Linear("td,dp->tp", (D, L * P), ("embed", "latent"), config.dtype, modules=modules)
        self.norm = Normalization(part.input_norm, P, "latent", config.dtype, prefix=stem)
        self.width, self.scale = P, D**-0.5

    def __call__(self, runs: Sequence[Run], step: Step) -> list[Array]:
        """[T, L, P] of each run, whole on every device."""
        return [self._of(x_TD, step, start) for (x_TD, _), start in zip(runs, starts([x for x, _ in runs]), strict=True)]

    def _of(self, x_TD: Array, step: Step, start: int) -> Array:
        ids_T = step.token_ids_T[start : start + len(x_TD)]
        looked_up = step.shards.sum(self.embedding(ids_T, step.shards)) * math.sqrt(self.width)
        computed = step.product(self.projection, x_TD, start) * self.scale
        looked_up, computed = (y.reshape(len(x_TD), -1, self.width) for y in (looked_up, computed))
        return ((self.norm(computed) + looked_up) * math.sqrt(0.5)).astype(x_TD.dtype)


class PerLayerGate(nnx.Module):
    """norm(projection(activation(gate(x)) * e)) of a layer's part e. Every device computes it whole."""

    def __init__(self, config: ModelConfig, part: PerLayerEmbedding, prefix: str):
        D, P = config.hidden_size, part.width

        def linear(subscripts: str, shape: tuple[int, int], axes: tuple[str, str], name: str) -> Linear:
            return Linear(subscripts, shape, axes, config.dtype, modules=[Module(f"{prefix}{name}", shape[1:])])

        self.gate = linear("td,dp->tp", (D, P), ("embed", "latent"), part.gate)
        self.projection = linear("tp,pd->td", (P, D), ("latent", "embed"), part.projection)
        self.norm = make_norm(part.norm, D, config.dtype, prefix)
        self.activation = ACTIVATIONS[part.activation]

    def __call__(self, x_TD: Array, input_TP: Array, step: Step, start: int) -> Array:
        """The change of the tokens from `start` on."""
        gated_TP = self.activation(step.product(self.gate, x_TD, start)) * input_TP
        return self.norm(step.product(self.projection, gated_TP, start))


class Gemma4Block(DecoderBlock):
    """x + attention(norm(x)), then x + mlp(norm(x)), in which the MLP may be a sum of one and experts. `ended` does what follows."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        assert isinstance(self.parts, Gemma4Layer)
        parts, prefix, D = self.parts, f"{config.layer_name(layer)}.", config.hidden_size
        norm = partial(make_norm, width=D, dtype=config.dtype, prefix=prefix)
        self.scalar = abstract_param((1,), ("activation",), config.dtype, source=f"{prefix}{parts.scalar}", init="ones")
        self.per_layer = None if parts.per_layer is None else PerLayerGate(config, parts.per_layer, prefix)
        self.beside = None if parts.beside is None else FeedForward(config, parts.beside, prefix)
        self.beside_post_norm = norm(parts.beside_post_norm)
        self.experts_norm = norm(parts.experts_norm)
        self.experts_post_norm = norm(parts.experts_post_norm)
        source = f"{prefix}{parts.router_scale}"
        has_router = parts.router_norm is not None
        self.router_scale = abstract_param((D,), ("embed",), config.dtype, source=source, init="ones") if has_router else None

    def __call__(self, runs: Sequence[Run], next_norm: AnyNorm, step: Step, kept_R: Array | None = None) -> list[Run]:
        """See DecoderBlock."""
        if self.beside is None:
            return super().__call__(runs, next_norm, step, kept_R)
        assert kept_R is None, "no drafter has such layers"
        assert self.attention is not None, "all have it"
        attended = self.attention([normed_TD for _, normed_TD in runs], step)
        runs = self._joined(attended, runs, self.attention_post_norm, self.mlp_norm, step)
        sums = [
            x_TD + self.mlp_post_norm(self._of_both(x_TD, normed_TD, step, start))  # type: ignore[arg-type]
            for (x_TD, normed_TD), start in zip(runs, starts([x_TD for x_TD, _ in runs]), strict=True)
        ]
        return [(x_TD, next_norm(x_TD)) for x_TD in sums]

    def ended(
        self, runs: Sequence[Run], inputs: Sequence[Array] | None, layer: int, next_norm: AnyNorm, step: Step
    ) -> list[Run]:
        """The tokens with what the layer's part of their second embedding adds, times the layer's number. Not a part of `__call__`, which
        layers that are alike may share. inputs: of `PerLayerInputs`."""
        sums = [x_TD for x_TD, _ in runs]
        if self.per_layer is not None and inputs is not None:
            of_runs = zip(sums, inputs, starts(sums), strict=True)
            sums = [x_TD + self.per_layer(x_TD, input_TLP[:, layer], step, start) for x_TD, input_TLP, start in of_runs]
        sums = [x_TD * self.scalar[...].astype(x_TD.dtype) for x_TD in sums]
        return [(x_TD, next_norm(x_TD)) for x_TD in sums]

    def _of_both(self, x_TD: Array, normed_TD: Array, step: Step, start: int) -> Array:
        """The sum of what the MLP and the experts give, each with its norm, whole on every device."""
        assert isinstance(self.mlp, MixtureOfExperts) and self.beside is not None
        of_mlp_TD = scaled(self.beside(normed_TD, step, start))
        of_experts_TD = scaled(self.mlp(self.experts_norm(x_TD), step, start, self._of_router(x_TD)))
        whole = step.shards.add_and_norm
        return whole(of_mlp_TD, None, self.beside_post_norm)[1] + whole(of_experts_TD, None, self.experts_post_norm)[1]

    def _of_router(self, x_TD: Array) -> Array:
        """The input of the router."""
        assert isinstance(self.parts, Gemma4Layer) and self.parts.router_norm is not None and self.router_scale is not None
        plain_TD = normed(self.parts.router_norm, x_TD, jnp.ones(())).astype(x_TD.dtype)
        return plain_TD * self.router_scale[...].astype(x_TD.dtype) * x_TD.shape[1] ** -0.5


class Gemma4LM(CausalLM):
    """A decoder of such layers."""

    make_block = Gemma4Block

    def __init__(self, config: ModelConfig, layers: range | None = None):
        super().__init__(config, layers)
        part = config.layers[0].per_layer  # type: ignore[attr-defined]
        self.per_layer = None if part is None else PerLayerInputs(config, part)
        self.nothing = NoNorm()

    def run(self, runs: list[Run], step: Step, layers: range) -> list[Run]:
        """See CausalLM."""
        inputs = None if self.per_layer is None else self.per_layer(runs, step)
        for layer in layers:
            block = self.blocks[layer]
            runs = step.call_layer(block, self.nothing, runs, step)
            runs = block.ended(runs, inputs, layer, self._norm_before(layer + 1), step)  # type: ignore[attr-defined]
            keep_features(runs, step, layer + 1)
        return runs
