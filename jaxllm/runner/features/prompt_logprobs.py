"""Logprobs of prompts: scored in the steps that compute them, collected in the row, and returned once they are complete."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.runner.batch import Chunk
from jaxllm.runner.feature_inputs import Names
from jaxllm.runner.heads import Device, Hidden, alone, trim
from jaxllm.runner.layout import padded
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted
from jaxllm.runner.row_arrays import Logprobs, Params
from jaxllm.runner.rows import Row
from jaxllm.runner.split_program import Lowered
from jaxllm.runner.step import StepFunctions
from jaxllm.runner.step_feature import FeatureParts, StepFeature
from jaxllm.scheduler_output import NO_ADAPTER, ModelRunnerOutput, TokenLogprobs

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


@dataclass(frozen=True)
class Targets:
    """Prompt positions of one request whose logprobs a step yields."""

    row: Row
    first_token: int
    """Index among the step's tokens of the first position."""
    token_ids: list[int]
    """The prompt tokens that follow those positions; none follows the last position of a prompt."""
    is_last: bool
    """Whether the prompt ends with them."""


class PromptLogprobs:
    """Scores the prompt tokens of requests that ask for `prompt_logprobs`."""

    def __init__(self, device: Device):
        self._device, self._buckets = device, device.buckets

    def select(self, chunks: Sequence[Chunk]) -> list[Targets]:
        """The targets of prompts that are computed for the first time: those of a resumed request were delivered before."""
        return [
            Targets(
                chunk.row,
                chunk.first_token,
                chunk.row.data.token_ids[chunk.start + 1 : chunk.stop + 1],
                is_last=chunk.stop >= chunk.row.data.num_prompt_tokens,
            )
            for chunk in chunks
            if chunk.row.num_prompt_logprobs is not None
            and chunk.start < chunk.row.data.num_prompt_tokens == chunk.row.num_known
        ]

    def keys(self, work: Sequence[Sequence[Targets]], num_tokens: int) -> list[ProgramKey]:
        """The programs that `launch` calls."""
        slots = {self._slot(targets) for of_rank in work for targets in of_rank if targets.token_ids}
        return list(dict.fromkeys(self._key(num_tokens, slot) for slot in slots))

    @property
    def _logits_features(self) -> Names:
        return self._device.inputs.logits_sets[-1]

    def _key(self, num_tokens: int, slot: int) -> ProgramKey:
        return ProgramKey("prompt_logprobs", num_tokens, features=() if slot == NO_ADAPTER else self._logits_features)

    def _slot(self, targets: Targets) -> int:
        """The slot of the adapter that changes the logits, if any does."""
        return targets.row.data.adapter_slot if self._logits_features else NO_ADAPTER

    def launch(self, work: Sequence[Sequence[Targets]], hidden: Hidden | None) -> list["PendingPromptLogprobs"]:
        """Start to score. Without hidden states there is nothing to score, only prompts that end."""
        ranks = self._device.ranks
        pending = [PendingPromptLogprobs([]) for _ in ranks.own]
        for slot in dict.fromkeys(self._slot(targets) for of_rank in work for targets in of_rank):
            alike = [[targets for targets in of_rank if self._slot(targets) == slot] for of_rank in work]
            scores = self._score(alike, slot, hidden)
            for rank, part, found in zip(ranks.own, pending, ranks.split(scores), strict=True):
                part.groups.append((alike[rank], found))
        return pending

    def _score(self, work: Sequence[Sequence[Targets]], slot: int, hidden: Hidden | None) -> list[Logprobs]:
        """Scores of positions of several requests of each rank, one after the other."""
        if not any(targets.token_ids for of_rank in work for targets in of_rank):
            return []
        assert hidden is not None, "a decode step with prompt tokens to score"
        device = self._device
        nothing = (padded((), (), self._buckets.scored_positions, padding=0),)
        chunks = device.put([chunk_2C for (chunk_2C,) in device.ranks.rounds(list(map(self._chunks, work)), nothing)])
        adapter_slot = None if slot == NO_ADAPTER else device.put(np.int32(slot))
        num_tokens = len(hidden.hidden_TD) // device.ranks.num
        program = device.program(self._key(num_tokens, slot))
        return [program(device.params, hidden.hidden_TD, chunk_2C, adapter_slot) for chunk_2C in chunks]

    def _chunks(self, work: Sequence[Targets]) -> Iterator[tuple[np.ndarray]]:
        """The positions of one rank in arrays of one size, as `score` takes them."""
        token_ids = [token for targets in work for token in targets.token_ids]
        spans = (range(targets.first_token, targets.first_token + len(targets.token_ids)) for targets in work)
        index = list(chain.from_iterable(spans))
        size = self._buckets.scored_positions
        for first in range(0, len(token_ids), size):
            part = slice(first, first + size)
            yield (padded(index[part], token_ids[part], size, padding=0),)

    def delete_arrays(self) -> None:
        """Nothing is kept."""


@dataclass(frozen=True)
class PendingPromptLogprobs:
    """Scores of prompt tokens of one data-parallel rank, in flight from the device."""

    groups: list[tuple[Sequence[Targets], list[Logprobs]]]
    """With the scores of a group's positions, one request after the other, in arrays of one size; the last one is padded."""

    @property
    def arrays(self) -> Any:
        return [scores for _, scores in self.groups]

    def collect(self, output: ModelRunnerOutput) -> None:
        """Add these parts to earlier ones of their rows; the output gets those that are complete.

        Parts belong to the row, not to the request: a preempted request starts again in a new row.
        """
        for work, found in self.groups:
            read: list[Any] = jax.device_get(found)
            scores = Logprobs(*(np.concatenate(parts) for parts in zip(*read, strict=True))) if read else None  # type: ignore[arg-type]
            first = 0
            for targets in work:
                positions = slice(first, first + len(targets.token_ids))
                first = positions.stop
                request_id = targets.row.data.request_id
                with alone(request_id, output):
                    _keep(targets, scores, positions)
                    if targets.is_last:
                        output.prompt_logprobs[request_id] = _whole(targets.row)


def _keep(targets: Targets, scores: Logprobs | None, positions: slice) -> None:
    row = targets.row
    assert row.num_prompt_logprobs is not None, "a part of a request that asked for none"
    if targets.token_ids:
        assert scores is not None, "positions that were not scored"
        row.prompt_parts.append(trim(scores, positions, row.num_prompt_logprobs))


def _whole(row: Row) -> TokenLogprobs:
    assert row.num_prompt_logprobs is not None
    parts = row.prompt_parts or [_no_logprobs(row.num_prompt_logprobs)]
    return TokenLogprobs(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def _no_logprobs(num_logprobs: int) -> TokenLogprobs:
    """Prompt logprobs of a prompt of one token."""
    shape = (0, 1 + max(0, num_logprobs))
    return TokenLogprobs(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(0, np.int32))


class PromptLogprobsFeature(StepFeature):
    """Scores prompt tokens in a separate program after `forward`."""

    def programs(self) -> Sequence[ProgramKind]:
        return [ScorePrompt()]

    def head(self, device: Device) -> PromptLogprobs:
        return PromptLogprobs(device)


class ScorePrompt(ProgramKind):
    """See `score`."""

    name = "prompt_logprobs"

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        sets = programs.inputs.logits_sets
        return [ProgramKey(self.name, size, features=names) for size in programs.buckets.tokens for names in sets]

    def rank(self, key: ProgramKey) -> int:
        return 2

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        return wanted.params.prompt_logprobs is not None

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        hidden_TD = programs.shape((key.size, programs.model.hidden_size), programs.model.dtype)
        adapter_slot = programs.ints() if key.features else None
        arguments = (programs.params, hidden_TD, programs.ints(2, programs.buckets.scored_positions), adapter_slot)
        return programs.lower_on_each(partial(score, programs.functions), arguments, programs.replicated, donate=())


def score(
    functions: StepFunctions, params: Params, hidden_TD: jax.Array, chunk_2C: jax.Array, adapter_slot: jax.Array | None
) -> Logprobs:
    """Logprobs of prompt tokens (second row of the chunk) that follow tokens of the step (first row: their index).

    adapter_slot: of the adapter that changes the logits; None: none does.
    """
    index_C, target_C = chunk_2C
    adapts = (
        () if adapter_slot is None else functions.adapts(params, jnp.full(len(index_C), adapter_slot), functions.inputs.all)
    )
    logits_CV = functions.logits(params, hidden_TD[index_C], functions.shards, adapts)
    scores = functions.top(functions.shards.to_rows(logits_CV), functions.shards.own_rows(target_C))
    return functions.shards.from_rows(scores, len(target_C))


def make(parts: FeatureParts) -> StepFeature | None:
    """For models that generate, where the last layers are."""
    return PromptLogprobsFeature() if parts.samples else None
