"""A drafter that knows the greedy answers of a golden: for tests of what the engine makes of drafts, whoever proposes them.

`jaxllm.engine.features.DRAFTERS` can name `make` in place of the package of drafters.
"""

import dataclasses
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.cache_spec import CacheSpec
from jaxllm.config import EngineConfig
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer
from jaxllm.runner.drafter import NO_DRAFT, Drafting
from tests.helpers import goldens
from tests.helpers.fake_runner import RandomDrafts

REGISTRATION = f"{__name__}:make"


@dataclass(frozen=True)
class ScriptedDrafter:
    """See `jaxllm.runner.drafter.Drafter`."""

    followers: tuple[tuple[int, ...], ...]
    """By position and token. Where none is known, it is the token itself or NO_DRAFT."""
    num_drafts: int = 2
    num_lookahead: int = 0
    feature_layers: tuple[int, ...] = ()
    layers: tuple[Layer, ...] = ()
    cache_specs: tuple[CacheSpec, ...] = ()
    model: None = None
    synthetic_rates: tuple[float, ...] = ()
    is_drawn: bool = False
    accepts_by_ratio: bool = False
    proposes: bool = True
    needs_history: bool = False

    def load(self, mesh: Any, progress: Any) -> Any:
        raise AssertionError("there are no weights")

    def new_state(self, num_rows: int, max_model_len: int) -> None:
        """Nothing is kept."""

    def show(self, state: None, row: jax.Array, position: jax.Array, token_ids_C: jax.Array) -> None:
        raise AssertionError("no history is wanted")

    def follow(self, model: None, state: None, drafting: Drafting) -> None:
        """Nothing is kept."""

    def propose(self, model: None, state: None, drafting: Drafting) -> tuple[None, jax.Array]:
        follower_LV, drafts = jnp.asarray(self.followers, jnp.int32), [drafting.token_R]
        for index in range(drafting.num_wanted):
            position_R = jnp.minimum(drafting.position_R + index, len(self.followers) - 1)
            drafts.append(jnp.where(drafts[-1] < 0, NO_DRAFT, follower_LV[position_R, drafts[-1]]))
        return None, jnp.stack(drafts[1:], axis=1)


@dataclass(frozen=True)
class ScriptedSpeculation:
    """See `jaxllm.engine.features.Speculation`."""

    drafter: ScriptedDrafter
    drafts_forced: bool = False

    @property
    def described(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self.drafter)

    def new_control(self, policy: KernelPolicy) -> RandomDrafts:
        return RandomDrafts(random.Random(0), num_drafts=self.drafter.num_drafts, num_lookahead=self.drafter.num_lookahead)


def make(config: EngineConfig, target: ModelConfig) -> ScriptedSpeculation:
    """For an engine over a golden."""
    results = goldens.golden(Path(config.model.model).name).results
    length = max(len(result.prompt) + len(result.tokens) for result in results)
    followers = [[token if token % 2 else NO_DRAFT for token in range(target.vocab_size)] for _ in range(length)]
    for result in results:
        for position, (token, follower) in enumerate(itertools.pairwise(result.tokens), len(result.prompt)):
            followers[position][token] = follower
    return ScriptedSpeculation(ScriptedDrafter(tuple(map(tuple, followers))))


def of_engine(config: EngineConfig) -> None:
    """Any speculative_config is right."""
