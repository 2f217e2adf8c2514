"""Base of all drafters with weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import Array

from jaxllm.cache_spec import CacheSpec, cache_specs
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer
from jaxllm.runner.drafter import Drafting
from jaxllm.speculative.choice import choose


@dataclass(frozen=True, kw_only=True)
class DrafterWithWeights:
    """The fields and the properties of a `Drafter` that follow from them."""

    config: ModelConfig
    """Config of its layers, split over the devices."""
    target: ModelConfig
    """Split over the devices."""
    model: Any
    directory: Path
    num_drafts: int
    is_drawn: bool = False
    """Drafts are drawn as the target draws, instead of the likeliest."""
    accepts_by_ratio: bool = False
    load_format: str = "auto"
    seed: int = 0
    """Seed of random weights."""
    synthetic_rates: tuple[float, ...] = ()
    feature_layers: tuple[int, ...] = ()
    proposes: bool = True
    needs_history: bool = False

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.config.layers

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        # A window saves no blocks: the target's layers with full attention need all of them.
        return cache_specs(self.config, disable_windows=True)  # type: ignore[return-value]

    @property
    def described(self) -> Mapping[str, Any]:
        """Properties that the programs depend on, as JSON values."""
        return {"model": self.config.described(), "feature_layers": self.feature_layers}

    def new_state(self, num_rows: int, max_model_len: int) -> tuple[()]:
        return ()

    def show(self, state: Any, row: jax.Array, position: jax.Array, token_ids_C: jax.Array) -> Any:
        raise AssertionError("what is cached of a prefix is cached for these layers too")

    def choose(self, logits_RV: Array, position_R: Array, drafting: Drafting, token_ids_V: Array | None = None) -> jax.Array:
        """A token for each row from the drafter's logits: see `choice.choose`."""
        vocabulary: dict[str, Any] = {"vocab_size": self.config.vocab_size, "token_ids_V": token_ids_V}
        return choose(logits_RV, position_R, drafting, self.target, **vocabulary, is_drawn=self.is_drawn)
