"""The decoder that a `ModelConfig` describes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxllm.layers.attention import GroupedQueryAttention
from jaxllm.layers.classifier import ClassifierHead
from jaxllm.layers.embedding import Embedding, PositionEmbedding
from jaxllm.layers.gated_delta_net import GatedDelta
from jaxllm.layers.kimi_delta import KimiDelta
from jaxllm.layers.latent_attention import MultiHeadLatentAttention
from jaxllm.layers.lightning import LightningMixer
from jaxllm.layers.mamba2 import Mamba2Mixer
from jaxllm.layers.mlp import FeedForward
from jaxllm.layers.moe import MixtureOfExperts, Unnormed
from jaxllm.layers.norm import AnyNorm, NoNorm, make_norm
from jaxllm.layers.runs import starts
from jaxllm.layers.short_conv import GatedShortConv
from jaxllm.layers.step import Adapt, Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import (
    Attention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    LightningAttention,
    Mamba2,
    MoE,
    ShortConv,
)
from jaxllm.parallel.shards import ONE_DEVICE, Shards
from pallas_kernels.quantize import Sums, scaled

Run = tuple[Array, Any]
"""Some of a step's tokens, one after the other: their x [T, D] and its norm, which is what the next layer takes: an array, or `Quantized`
as `Step.add_and_norm` makes it."""


AnyMixer = (
    GroupedQueryAttention | MultiHeadLatentAttention | GatedDelta | KimiDelta | LightningMixer | Mamba2Mixer | GatedShortConv
)
_ATTENTION: dict[type, Callable[..., AnyMixer]] = {
    Attention: GroupedQueryAttention,
    LatentAttention: MultiHeadLatentAttention,
    GatedDeltaNet: GatedDelta,
    KimiDeltaAttention: KimiDelta,
    LightningAttention: LightningMixer,
    Mamba2: Mamba2Mixer,
    ShortConv: GatedShortConv,
}


class DecoderBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or one of these alone."""

    def __init__(self, config: ModelConfig, layer: int):
        self.parts = parts = config.layers[layer]
        prefix = f"{config.layer_name(layer)}."
        norm = partial(make_norm, width=config.hidden_size, dtype=config.dtype, prefix=prefix)
        self.attention_norm = norm(parts.attention_norm)
        self.layer = layer
        mixer = parts.attention
        self.attention = None if mixer is None else _ATTENTION[type(mixer)](config, mixer, layer, prefix)
        self.attention_post_norm = norm(parts.attention_post_norm)
        self.mlp_norm = norm(parts.mlp_norm)
        make_mlp = MixtureOfExperts if isinstance(parts.mlp, MoE) else FeedForward
        self.mlp = None if parts.mlp is None else make_mlp(config, parts.mlp, prefix)  # type: ignore[arg-type]
        self.mlp_post_norm = norm(parts.mlp_post_norm)

    def take_formats(self) -> None:
        """Note which norms only linear layers take that quantise them, by the formats of these."""
        attends = self.attention is not None and self.attention.quantizes_inputs
        feeds = self.mlp is not None and self.mlp.quantizes_inputs
        self.attention_norm.before_quantized = attends and (feeds or not self.parts.parallel)
        self.mlp_norm.before_quantized = feeds

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Where `cache_specs` has what it keeps between steps."""
        return (self.layer,)

    @property
    def first_norm(self) -> AnyNorm:
        """The norm that it takes of x."""
        return self.mlp_norm if self.attention is None else self.attention_norm

    def __call__(self, runs: Sequence[Run], next_norm: AnyNorm, step: Step, kept_R: Array | None = None) -> list[Run]:
        """From x and first_norm(x) to the new x and next_norm of it: each sum of partial products ends in a norm.

        kept_R: indices in the only run of the tokens whose result is wanted; of the others, the cache gets what it keeps.
        """
        attended = None if self.attention is None else self.attention([normed_TD for _, normed_TD in runs], step)
        if kept_R is not None:
            attended = None if attended is None else [attended[0][kept_R]]
            runs = [(runs[0][0][kept_R], runs[0][1][kept_R])]
            step = replace(step, is_real_T=None)
        if attended is None:
            return self._joined(self._fed_forward(runs, step), runs, self.mlp_post_norm, next_norm, step)
        if self.mlp is None:
            return self._joined(attended, runs, self.attention_post_norm, next_norm, step)
        if self.parts.parallel:
            fed = self._fed_forward(runs, step)
            added = [scaled(part_TD) + scaled(fed_TD) for part_TD, fed_TD in zip(attended, fed, strict=True)]
            return self._joined(added, runs, self.mlp_post_norm, next_norm, step)
        runs = self._joined(attended, runs, self.attention_post_norm, self.mlp_norm, step)
        return self._joined(self._fed_forward(runs, step), runs, self.mlp_post_norm, next_norm, step)

    def _fed_forward(self, runs: Sequence[Run], step: Step) -> list[Array | Sums]:
        assert self.mlp is not None
        normed = [normed_TD for _, normed_TD in runs]
        if isinstance(self.mlp, MixtureOfExperts) and not self.parts.parallel:
            sums = [Unnormed(x_TD, self.mlp_norm) for x_TD, _ in runs]
            of_runs = zip(normed, starts(normed), sums, strict=True)
            return [self.mlp(normed_TD, step, start, unnormed=each) for normed_TD, start, each in of_runs]
        return [self.mlp(normed_TD, step, start) for normed_TD, start in zip(normed, starts(normed), strict=True)]

    def _joined(
        self, parts: Sequence[Array | Sums], runs: Sequence[Run], post_norm: AnyNorm, next_norm: AnyNorm, step: Step
    ) -> list[Run]:
        """The runs with these partial products, summed up, normed by post_norm and scaled, added to x."""
        joined = []
        for part_TD, (x_TD, _) in zip(parts, runs, strict=True):
            scale = self.parts.residual_scale
            if isinstance(post_norm, NoNorm):
                part_TD = part_TD if scale == 1.0 else scaled(part_TD) * scale
                joined.append(step.add_and_norm(part_TD, x_TD, next_norm))
            else:
                added_TD = step.shards.add_and_norm(scaled(part_TD), None, post_norm)[1]
                x_TD = x_TD + (added_TD if scale == 1.0 else added_TD * scale)
                joined.append((x_TD, next_norm(x_TD)))
        return joined


class CausalLM(nnx.Module):
    """Token ids to hidden states, and hidden states to logits. Built without values: a loader gives them.

    The blocks are unrolled: scanning over stacked weights would copy the KV cache in every step.

    One stage of a pipeline is the same with the parts that it computes: parameters keep their names, other parts are None.
    """

    make_block: type[DecoderBlock] = DecoderBlock

    def __init__(self, config: ModelConfig, layers: range | None = None):
        """layers: of one stage; None: all."""
        self.config = config
        self.layers = layers = range(config.num_layers) if layers is None else layers
        is_first, is_last = layers.start == 0, layers.stop == config.num_layers
        has_logits = config.generates and is_last
        embedding = (
            Embedding(config, config.names.embedding) if is_first or (has_logits and config.tie_word_embeddings) else None
        )
        self.embedding: Embedding = embedding  # type: ignore[assignment]  # no stage without one computes with it
        self.embedding_norm = make_norm(config.embedding_norm, config.hidden_size, config.dtype)
        has_positions = config.positions is not None and is_first
        self.positions = PositionEmbedding(config, config.positions) if has_positions else None  # type: ignore[arg-type]
        blocks = [self.make_block(config, i) if i in layers else None for i in range(config.num_layers)]
        self.blocks: nnx.List[DecoderBlock] = nnx.List(blocks)  # type: ignore[arg-type]
        self.norm = make_norm(config.norm if is_last else None, config.hidden_size, config.dtype)
        has_head = has_logits and not config.tie_word_embeddings
        self.head = Embedding(config, config.names.head, bias=config.head.bias) if has_head else None
        has_classes = config.classifier is not None and is_last
        self.classifier = ClassifierHead(config, config.classifier) if has_classes else None  # type: ignore[arg-type]

    @property
    def is_stage(self) -> bool:
        """Whether other stages have layers of the model."""
        return len(self.layers) < self.config.num_layers

    @property
    def output_head(self) -> Embedding | None:
        """The head, or the embedding that it is tied to; None for models without logits."""
        is_tied = self.config.generates and self.config.tie_word_embeddings
        return self.embedding if self.head is None and is_tied else self.head

    def __call__(self, step: Step) -> Array:
        """Hidden states [T, D] after the last norm, whole on every device; of a stage that others follow what enters the next one."""
        runs = self.run(self.embed(step) if step.entering_TD is None else self.enter(step), step, self.layers)
        return runs[0][1] if len(runs) == 1 else jnp.concatenate([normed_TD for _, normed_TD in runs])

    def embed(self, step: Step) -> list[Run]:
        """The tokens before the first layer, in as many runs as the devices compute."""
        shards = step.shards
        num_runs = shards.num_runs(len(step.token_ids_T))
        runs = []
        parts = [jnp.split(x_T, num_runs) for x_T in (step.token_ids_T, step.positions_T)]
        for ids_T, positions_T, start in zip(*parts, starts(parts[0]), strict=True):
            part_TD = self.embedding(ids_T, shards)
            if step.adapt is not None:
                part_TD = step.adapt.embedded(ids_T, part_TD, start, shards)
            if self.config.embedding_scale != 1.0:
                part_TD = part_TD * jnp.asarray(self.config.embedding_scale, part_TD.dtype)
            part_TD = step.with_given(part_TD, start)
            if self.positions is not None:
                learned_TD = self.positions(positions_T)
                part_TD += learned_TD if shards.size == 1 else jnp.where(shards.index == 0, learned_TD, 0)
            runs.append(self._entered(part_TD, step))
        keep_features(runs, step, 0)
        return runs

    def _entered(self, part_TD: Array, step: Step) -> Run:
        """Embeddings, of which this is the device's part of the sum, before the first layer."""
        norm = self._norm_before(0)
        if isinstance(self.embedding_norm, NoNorm):
            return step.add_and_norm(part_TD, None, norm)
        normed_TD = step.shards.add_and_norm(part_TD, None, self.embedding_norm)[1]
        return normed_TD, norm(normed_TD)

    def enter(self, step: Step) -> list[Run]:
        """The tokens before the first layer of a later stage."""
        assert step.entering_TD is not None
        x_TD, norm = step.entering_TD, self._norm_before(self.layers.start)
        return [(part_TD, norm(part_TD)) for part_TD in jnp.split(x_TD, step.shards.num_runs(len(x_TD)))]

    def run(self, runs: list[Run], step: Step, layers: range) -> list[Run]:
        """The tokens after these layers."""
        for layer in layers:
            norm = self._norm_before(layer + 1)
            runs = step.call_layer(self.blocks[layer], norm, runs, step)
            if step.deepstack is not None and layer < len(step.deepstack):
                runs = _with_added(step.deepstack[layer], runs, norm)
            keep_features(runs, step, layer + 1)
        return runs

    def logits(self, hidden_TD: Array, shards: Shards = ONE_DEVICE, adapt: Adapt | None = None) -> Array:
        """Float32 [T, V] of this device's part of the vocabulary, of a model that generates; columns that pad it are -inf.

        adapt: of these tokens; None: none has an adapter.
        """
        head = self.output_head
        assert head is not None
        change = None if adapt is None else partial(adapt.scores, self.config.names.head)
        return head.logits(hidden_TD, shards, self.config.head, change)

    def _norm_before(self, layer: int) -> AnyNorm:
        """The norm that a layer takes; behind the last layer, the model's own; behind the last of an earlier stage, none."""
        return self.blocks[layer].first_norm if layer < self.layers.stop else self.norm


def _with_added(added_TD: Array, runs: Sequence[Run], norm: AnyNorm) -> list[Run]:
    """The tokens with what is added to each, and the norm of the sum. A few layers have something: the norm before it is of no use."""
    sums = [
        x_TD + added_TD[start : start + len(x_TD)].astype(x_TD.dtype)
        for (x_TD, _), start in zip(runs, starts([x_TD for x_TD, _ in runs]), strict=True)
    ]
    return [(x_TD, norm(x_TD)) for x_TD in sums]


def keep_features(runs: Sequence[Run], step: Step, layer: int) -> None:
    """Keep the tokens that enter a layer, if the step wants them."""
    if layer in step.wanted_features:
        step.features[layer] = runs[0][0] if len(runs) == 1 else jnp.concatenate([x_TD for x_TD, _ in runs])
