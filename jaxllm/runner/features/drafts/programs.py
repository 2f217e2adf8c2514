"""`propose`, `show`, `set_drafts` and `drafts`: the programs of an engine with a drafter."""

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxllm.runner.features.drafts.rows import drafts_of, set_drafts
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted
from jaxllm.runner.split_program import CompiledProgram, Lowered
from jaxllm.sampling.variants import Variant

if TYPE_CHECKING:
    from jaxllm.runner.features.drafts.step import Drafts
    from jaxllm.runner.step_programs import StepPrograms

TOKENS_PER_SHOW = 1024
"""Tokens of a cached prefix that one `show` shows to the drafter."""


class Propose(ProgramKind):
    """See `Drafts.propose_apart`."""

    name = "propose"

    def __init__(self, drafts: "Drafts"):
        self.drafts = drafts

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [
            ProgramKey(self.name, size, variant, width=width)
            for size in reversed(programs.buckets.tokens)
            for variant in (Variant.GREEDY, Variant.RANDOM)
            for width in programs.buckets.widths
        ]

    def uses_peers(self, key: ProgramKey) -> bool:
        return True

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        hidden_TD = programs.shape((key.size, programs.model.hidden_size), programs.model.dtype)
        features = (hidden_TD,) * len(self.drafts.drafter.feature_layers)
        columns_NC = programs.ints(programs.buckets.max_rows, programs.inputs.num_columns)
        step = (hidden_TD, columns_NC, programs.ints(key.size), features)
        arguments = (programs.params, programs.caches, programs.rows, *step, programs.workspace)
        function = partial(self.drafts.propose_apart, programs.functions, key.size, key.variant, key.width)
        return programs.lower_on_each(function, arguments, (programs.cache_shardings, programs.replicated), donate=(1, 2))

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        runner.run_on_rows(program, *runner.put(self._nothing(runner.shapes, key)))

    def _nothing(self, programs: "StepPrograms", key: ProgramKey) -> tuple[Any, ...]:
        """The arguments of the program for a step without requests."""
        hidden_TD = np.zeros((key.size, programs.model.hidden_size), jnp.dtype(programs.model.dtype))
        hidden_TD, token_ids_T = map(programs.ranks.repeated, (hidden_TD, np.zeros(key.size, np.int32)))
        features = (hidden_TD,) * len(self.drafts.drafter.feature_layers)
        return hidden_TD, programs.nothing_to_sample()[1], token_ids_T, features


class Show(ProgramKind):
    """See `Drafts.show`."""

    name = "show"
    only = "common"

    def __init__(self, drafts: "Drafts"):
        self.drafts = drafts

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        arguments = (programs.rows, programs.ints(2), programs.ints(TOKENS_PER_SHOW))
        return programs.lower_on_ranks(self.drafts.show, arguments, donate=(0,))


class SetDrafts(ProgramKind):
    """See `set_drafts`: drafts from the host, of grammars."""

    name = "set_drafts"
    only = "rare"

    def __init__(self, num_drafts: int):
        self.num_drafts = num_drafts

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        return wanted.is_masked

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        draft_RX = programs.ints(programs.buckets.max_rows, 2 + self.num_drafts)
        return programs.lower_on_ranks(set_drafts, (programs.rows, draft_RX), donate=(0,))


class CopyDrafts(ProgramKind):
    """A copy of the drafts, for grammars, which stays when the next program takes the rows."""

    name = "drafts"
    only = "rare"

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        return wanted.is_masked

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        return programs.lower_on_ranks(jnp.copy, (drafts_of(programs.rows).draft_NK,))
