"""Drafts of a smaller model of the target's vocabulary. Source: arXiv:2211.17192."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxllm.cache_spec import RowState, SharedCache, cache_specs
from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.layers.decoder import CausalLM
from jaxllm.loaders.load import load_weights
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.models.load_config import load_model_config
from jaxllm.progress import Progress, bytes_loaded
from jaxllm.runner.drafter import Drafting
from jaxllm.speculative.with_weights import DrafterWithWeights


@dataclass(frozen=True, kw_only=True)
class DraftModel(DrafterWithWeights):
    """Any model that keeps all it knows of a sequence in blocks. It computes the tokens of each step too, then draft after draft."""

    @property
    def num_lookahead(self) -> int:
        return self.num_drafts

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """Raises ModelLoadError."""
        options: dict[str, Any] = {"load_format": self.load_format, "seed": self.seed}
        return load_weights(self.config, self.model, self.directory, mesh=mesh, progress=bytes_loaded(progress), **options)

    def follow(self, model: CausalLM, state: tuple[()], drafting: Drafting) -> tuple[()]:
        """Keep up with the cache, without which no later draft would be right."""
        model(drafting.same_step(drafting.token_ids_T))
        return state

    def propose(self, model: CausalLM, state: tuple[()], drafting: Drafting) -> tuple[tuple[()], jax.Array]:
        state = self.follow(model, state, drafting)
        token_R, drafts = drafting.token_R, []
        for i in range(drafting.num_wanted):
            position_R = drafting.position_R + i
            logits_RV = model.logits(model(drafting.decode_step(token_R, position_R)), drafting.shards)
            token_R = self.choose(logits_RV, position_R + 1, drafting)
            drafts.append(token_R)
        return state, jnp.stack(drafts, axis=1)


def make(
    directory: Path,
    target: ModelConfig,
    *,
    target_directory: Path,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    on_gpu: bool = False,
    quantization: str | None = None,
    **fields: Any,
) -> DraftModel:
    """The drafter of a model directory, with these fields.

    target: split over the devices. max_model_len: the longest sequence served. quantization: as the engine's option.
    Raises ConfigError and ModelLoadError.
    """
    types: dict[str, Any] = {"dtype": target.dtype, "kv_cache_dtype": target.kv_cache_dtype, "quantization": quantization}
    config = load_model_config(directory, on_gpu=on_gpu, runner="generate", max_model_len=max_model_len, **types)
    if any(isinstance(spec, RowState) for spec in cache_specs(config)):
        raise ConfigError(
            f"the draft model {directory} ({config.architecture}) has layers with states by row, which cannot be taken back when a "
            "draft proves wrong; choose one with attention in all layers"
        )
    if any(isinstance(spec, SharedCache) for spec in cache_specs(config)):
        raise ConfigError(
            f"the draft model {directory} ({config.architecture}) has layers that read the keys of others, which only a target may have; "
            "choose one without, or method ngram"
        )
    _check_vocabulary(directory, config, target_directory, target)
    try:
        config = config.for_tensor_parallel(tensor_parallel_size)
    except ConfigError as error:
        raise ConfigError(f"the draft model {directory}: {error}") from error
    if target.has_tiles:
        config = config.in_tiles()
    elif on_gpu:
        config = config.without_kernels()
    if max_model_len is not None and config.max_position < max_model_len:
        logger.warning(
            "the draft model %s knows sequences of %d tokens, max_model_len is %d: fewer drafts behind its limit will prove right",
            *(directory, config.max_position, max_model_len),
        )
    return DraftModel(config=config, target=target, model=build_model(config), directory=directory, **fields)


def _check_vocabulary(directory: Path, config: ModelConfig, target_directory: Path, target: ModelConfig) -> None:
    """Raise ConfigError if vocabularies of different sizes differ in more than padding, by their tokenizers."""
    if config.vocab_size == target.vocab_size:
        return
    from jaxllm.text.tokenizer import load_tokenizer

    try:
        is_same = load_tokenizer(directory).get_vocab() == load_tokenizer(target_directory).get_vocab()
    except ModelLoadError:
        is_same = False
    if not is_same:
        raise ConfigError(
            f"the draft model {directory} has {config.vocab_size} tokens, the target {target.vocab_size}: both must have the same "
            "vocabulary; choose a draft model of the target's family"
        )
