"""Encoders: decoders whose tokens see all others of their prompt. Sources: arXiv:1810.04805 (BERT), arXiv:2412.13663 (ModernBERT)."""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array

from jaxllm.layers.decoder import CausalLM, DecoderBlock, Run
from jaxllm.layers.embedding import PositionEmbedding
from jaxllm.layers.norm import AnyNorm, make_norm
from jaxllm.layers.step import Step
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Positions


class Encoder(CausalLM):
    """An encoder whose layers norm their input. The embeddings are normed before the first layer."""

    norms_embeddings = True
    """Whether the norm of the embeddings comes before the first block; if not, the first block has it."""

    def __init__(self, config: ModelConfig, layers: range | None = None):
        super().__init__(config, layers)
        part = config.encoder
        assert part is not None and not self.is_stage, "an encoder is computed whole"
        has_types = part.token_types is not None
        types = Positions(part.token_types or "", part.num_token_types)
        self.token_types = PositionEmbedding(config, types) if has_types else None
        norm = part.embedding_norm if self.norms_embeddings else None
        self.embedding_norm = make_norm(norm, config.hidden_size, config.dtype)

    def embed(self, step: Step) -> list[Run]:
        """As `CausalLM.embed`, with the embeddings of token types."""
        shards = step.shards
        types_T = jnp.zeros_like(step.token_ids_T) if step.token_types_T is None else step.token_types_T
        num_runs = shards.num_runs(len(types_T))
        parts = (jnp.split(x_T, num_runs) for x_T in (step.token_ids_T, step.positions_T, types_T))
        runs = []
        for ids_T, positions_T, own_types_T in zip(*parts, strict=True):
            part_TD = self.embedding(ids_T, shards)
            for table, places_T in ((self.positions, positions_T), (self.token_types, own_types_T)):
                if table is not None:
                    learned_TD = table(places_T)
                    part_TD += learned_TD if shards.size == 1 else jnp.where(shards.index == 0, learned_TD, 0)
            _, x_TD = shards.add_and_norm(part_TD, None, self.embedding_norm)
            runs.append((x_TD, self._norm_before(0)(x_TD)))
        return runs


class PostNormBlock(DecoderBlock):
    """norm(x + attention(x)), then norm(x + mlp(x)). The last norm is the `attention_norm` of the next block, or the model's."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__(config, layer)
        assert config.encoder is not None
        make = partial(make_norm, width=config.hidden_size, dtype=config.dtype)
        if layer == 0:
            self.attention_norm = make(config.encoder.embedding_norm)
        else:
            self.attention_norm = make(self.parts.attention_norm, prefix=f"{config.layer_name(layer - 1)}.")

    def take_formats(self) -> None:
        """No norm is quantised with what it is computed of: attention and MLP are added to it."""

    def __call__(self, runs: Sequence[Run], next_norm: AnyNorm, step: Step, kept_R: Array | None = None) -> list[Run]:
        """From attention_norm(x), to which attention is added, to the new x and next_norm of it."""
        assert kept_R is None, "an encoder keeps nothing of other tokens"
        assert self.attention is not None, "all have it"
        attended = self.attention([normed_TD for _, normed_TD in runs], step)
        runs = self._joined(attended, _normed(runs), self.attention_post_norm, self.mlp_norm, step)
        return self._joined(self._fed_forward(runs, step), _normed(runs), self.mlp_post_norm, next_norm, step)


class PostNormEncoder(Encoder):
    """An encoder whose layers norm their sums."""

    make_block = PostNormBlock
    norms_embeddings = False


def _normed(runs: Sequence[Run]) -> list[Run]:
    """Runs whose x is its norm."""
    return [(normed_TD, normed_TD) for _, normed_TD in runs]
