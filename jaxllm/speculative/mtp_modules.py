"""Drafts of several modules for multi-token prediction in turn: draft k is of module k. Source: arXiv:2412.19437, section 2.2.

Module k takes the hidden state of a token with the embedding of the token k places behind it. So the cache of a later module ends some
positions before that of the first: it lags behind by k - 1, once a row has as many tokens. What would stand at these positions depends on
drafts, and is computed anew with each of them.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.formats import open_checkpoint
from jaxllm.loaders.load import load_checkpoint
from jaxllm.model_config import ModelConfig
from jaxllm.progress import Progress, bytes_loaded
from jaxllm.runner.drafter import Drafting
from jaxllm.speculative import mtp
from jaxllm.speculative.mtp import MultiTokenPrediction, NextTokenModule
from jaxllm.speculative.predictor import HiddenStateDrafter

_NEVER = 2**30
"""A position behind those of any row."""


class Passed(NamedTuple):
    """Hidden states and tokens of each row, kept between steps."""

    position_N: Array
    """The position behind its latest tokens; 0: it has none."""
    hidden_NMD: Array
    """Vectors that each module but the last passes on, of the latest token that it took."""


class NextTokenModules(nnx.Module):
    """The modules. config: with the layers of all, in their order. first: number of the model's layers."""

    def __init__(self, config: ModelConfig, *, count: int, first: int):
        size = config.num_layers // count
        self.each = nnx.List(
            [
                NextTokenModule(_of_module(config, module, first, size), range(module * size, (module + 1) * size))
                for module in range(count)
            ]
        )


def _of_module(config: ModelConfig, module: int, first: int, size: int) -> ModelConfig:
    part = config.next_token
    layer = part.layer or config.layer_name(first + module)
    return replace(
        config,
        names=replace(config.names, layer=layer),
        next_token=part.named(layer.format(module * size), module),
    )


@dataclass(frozen=True, kw_only=True)
class SeveralModules(HiddenStateDrafter):
    """Proposes with one module after the other; drafts beyond their number are the last one's, which goes on from its own results."""

    num_modules: int

    @property
    def described(self) -> Mapping[str, Any]:
        return {**super().described, "num_modules": self.num_modules}

    @property
    def build(self) -> Any:
        """Makes the modules of a config."""
        return partial(NextTokenModules, count=self.num_modules, first=self.target.num_layers)

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """Raises ModelLoadError."""
        report = bytes_loaded(progress)
        if self.load_format == "dummy":
            return dummy_weights(self.config, self.model, mesh, seed=self.seed, progress=report, build=self.build)
        return load_checkpoint(
            self.config, self.model, self.directory, mesh=mesh, load_format=self.load_format, progress=report
        )

    def new_state(self, num_rows: int, max_model_len: int) -> Passed:  # type: ignore[override]
        shape = num_rows, self.num_modules - 1, self.config.hidden_size
        return Passed(jnp.zeros(num_rows, jnp.int32), jnp.zeros(shape, self.config.dtype))

    def follow(self, model: NextTokenModules, state: Passed, drafting: Drafting) -> Passed:  # type: ignore[override]
        """Keep up with the caches, without which no later draft would be right."""
        return self._take_in(model, state, drafting)[0]

    def propose(  # type: ignore[override]
        self, model: NextTokenModules, state: Passed, drafting: Drafting
    ) -> tuple[Passed, Array]:
        first: Any = model.each[0]  # all have the target's head
        state, passed, out_RD = self._take_in(model, state, drafting)
        drafts = [self._choose(first, out_RD, drafting, drafting.position_R + 1)]
        for i in range(1, drafting.num_wanted):
            out_RD, passed = self._next(model, drafting, i, drafts[-1], out_RD, passed)
            drafts.append(self._choose(first, out_RD, drafting, drafting.position_R + i + 1))
        return state, jnp.stack(drafts, axis=1)

    def _next(
        self, model: NextTokenModules, drafting: Drafting, i: int, draft_R: Array, out_RD: Array, passed: dict[int, Array]
    ) -> tuple[Array, dict[int, Array]]:
        """Hidden states that draft i, counted from 0, is drawn from: its module's output for the draft before it. The modules of later
        drafts take that in too. out_RD, passed: those of the draft before, and the vectors that modules passed on then. Returns both
        anew."""
        own, now = min(i, self.num_modules - 1), {}
        left_RD = out_RD
        for index in range(own, min(self.num_modules, drafting.num_wanted)):
            position_R = drafting.position_R + i - 1 - index
            step = drafting.decode_step(draft_R, jnp.where(position_R < 0, _NEVER, position_R))
            hidden_RD = out_RD if i >= self.num_modules else passed[index - 1]
            result_RD, _ = model.each[index](drafting.target, hidden_RD, step)
            left_RD = result_RD if index == own else left_RD
            now[index] = self._passed(hidden_RD, result_RD)
        return left_RD, now

    def _passed(self, hidden_TD: Array, out_TD: Array) -> Array:
        """Vectors that a module passes on: its outputs, or its inputs where each takes the model's hidden states."""
        return out_TD if self.config.next_token.chains else hidden_TD

    def _take_in(self, model: NextTokenModules, state: Passed, drafting: Drafting) -> tuple[Passed, dict[int, Array], Array]:
        """Compute the tokens of a step that proved right with all modules. Returns the state, what each module but the last passes on
        of the last token of each row that it can take, [R, D], and what the first leaves of it."""
        rows = _Rows.of(drafting, len(state.position_N))
        hidden_TD, passed, first_RD = drafting.hidden_TD, {}, drafting.hidden_TD
        for index, module in enumerate(model.each):
            if index:
                known_RD = state.hidden_NMD[rows.row_T, index - 1]
                is_known_T = state.position_N[rows.row_T] == rows.start_T
                hidden_TD = rows.behind(hidden_TD, jnp.where(is_known_T[:, None], known_RD, 0), index)
            step = drafting.same_step(rows.ahead(drafting.next_ids_T, index), index)
            if index == self.num_modules - 1:
                module(drafting.target, hidden_TD, step, drafting.last_R)  # of which only the cache is of use
                break
            out_TD, _ = module(drafting.target, hidden_TD, step)
            first_RD = first_RD if index else out_TD[drafting.last_R]
            hidden_TD = self._passed(hidden_TD, out_TD)
            passed[index] = hidden_TD[rows.last(index)]
        hidden_RMD = jnp.stack(list(passed.values()), axis=1)
        state = Passed(state.position_N.at[rows.row_R].set(rows.end_R), state.hidden_NMD.at[rows.row_R].set(hidden_RMD))
        return state, passed, first_RD


@dataclass(frozen=True)
class _Rows:
    """The runs of tokens of a step's rows."""

    row_T: Array
    offset_T: Array
    start_T: Array
    """Position at which the run of each token's row begins."""
    row_R: Array
    """The last place for rows without tokens."""
    last_R: Array
    """Index of the last token of each row that proved right, of a prompt that goes on too."""
    start_R: Array
    end_R: Array
    """The position behind it."""

    @classmethod
    def of(cls, drafting: Drafting, num_rows: int) -> "_Rows":
        start_T, offset_T = drafting.position_T - drafting.offset_T, drafting.offset_T
        bounds_R1 = drafting.query_start_R1
        last_R = jnp.where(drafting.draws_R, drafting.last_R, jnp.maximum(bounds_R1[1:] - 1, 0))
        row_R = jnp.where(bounds_R1[1:] > bounds_R1[:-1], drafting.row_T[last_R], num_rows - 1)
        return cls(drafting.row_T, offset_T, start_T, row_R, last_R, start_T[last_R], drafting.position_T[last_R] + 1)

    def ahead(self, ids_T: Array, lag: int) -> Array:
        """Ids of what stands behind each token, for a module that lags: in rows with fewer tokens before the step its first one is in
        the place of a later one. Behind those of a row there may be any."""
        index_T = jnp.arange(len(ids_T)) + lag - jnp.minimum(lag, self.start_T)
        return ids_T[jnp.minimum(index_T, len(ids_T) - 1)]

    def behind(self, passed_TD: Array, before_TD: Array, lag: int) -> Array:
        """Vectors of the module before, for one that lags: of the token before each; before_TD: of the one before the step."""
        moved_TD = jnp.where(self.offset_T[:, None] == 0, before_TD.astype(passed_TD.dtype), jnp.roll(passed_TD, 1, axis=0))
        return jnp.where(self.start_T[:, None] < lag, passed_TD, moved_TD)

    def last(self, lag: int) -> Array:
        """Index of the last token of each row that a module can take."""
        return jnp.maximum(self.last_R - (lag - jnp.minimum(lag, self.start_R)), 0)


def make(
    directory: Path, target: ModelConfig, *, tensor_parallel_size: int = 1, num_expert_devices: int = 1, **fields: Any
) -> MultiTokenPrediction | SeveralModules:
    """As `mtp.make`, with as many modules as the checkpoint has and drafts need."""
    devices = {"tensor_parallel_size": tensor_parallel_size, "num_expert_devices": num_expert_devices}
    first = mtp.make(directory, target, **devices, **fields)
    count = min(_num_modules(first), first.num_drafts) if target.next_token.numbers_modules else 1
    if count == 1:
        return first
    config, layer = first.config, target.next_token.layer
    size = config.num_layers
    own = {
        (layer or target.layer_name(target.num_layers + module)).format(i)
        for module in range(count)
        for i in range(count * size)
    }
    names = replace(target.names, ignored=tuple(name for name in config.names.ignored if name.removesuffix(".") not in own))
    config = replace(config, layers=config.layers * count, names=names, next_token=target.next_token)
    model = NextTokenModules(config, count=count, first=target.num_layers)
    return SeveralModules(config=config, target=target, model=model, directory=directory, num_modules=count, **fields)


def _num_modules(first: MultiTokenPrediction) -> int:
    """The modules of the checkpoint; of random weights, those that its config.json has."""
    target = first.target
    if first.load_format == "dummy":
        return target.num_spare_layers
    entries = open_checkpoint(first.directory, first.load_format).entries
    layer, size = target.next_token.layer, first.config.num_layers

    def is_there(module: int) -> bool:
        name = target.layer_name(target.num_layers + module) if layer is None else layer.format(module * size)
        return any(entry.startswith(f"{name}.") for entry in entries)

    return next(module for module in itertools.count(1) if not is_there(module))
