"""Steps whose tokens devices split, as a feature of the step."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jax import Array

from jaxllm.runner.paged_context import PagedContext
from jaxllm.runner.step_feature import StepFeature, StepRun
from jaxllm.runner.token_split import TokenSplit


@dataclass(frozen=True)
class SplitTokens(StepFeature):
    """The layers run over this device's share of a step's tokens; everything before and behind them has all tokens. It comes before all
    features that look at the tokens of the layers."""

    devices: TokenSplit

    def before(self, run: StepRun) -> None:
        step, devices = run.step, self.devices
        context = step.attend
        assert isinstance(context, PagedContext)
        page_size = context.caches[0].shape[2]
        context.tables = tuple(table._replace(slot_T=devices.own_slots(table.slot_T, page_size)) for table in run.places.tables)
        context.devices = devices
        tokens = (run.token_ids_T, run.places.position_T, run.places.is_real_T)
        step.token_ids_T, step.positions_T, step.is_real_T = devices.share(tokens)
        step.attended_positions_T = run.places.position_T
        run.share = devices.share
        run.count = partial(self._count, len(run.token_ids_T))

    def _count(self, num_tokens: int, add: Callable[[Array], Array], counts: Array) -> Array:
        return counts + self.devices.total(add(jnp.zeros_like(counts)), num_tokens)

    def after(self, run: StepRun) -> None:
        run.hidden_TD = self.devices.whole(run.hidden_TD, len(run.token_ids_T))
