"""Starts the programs of drafts from the host, in addition to those of the step itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxllm.runner.batch import Batch
from jaxllm.runner.drafter import NO_DRAFT, Drafter
from jaxllm.runner.features.drafts.programs import TOKENS_PER_SHOW
from jaxllm.runner.features.drafts.rows import drafts_of
from jaxllm.runner.heads import Device, Hidden
from jaxllm.runner.latest_tokens import TokensOnHost
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.rows import Row
from jaxllm.sampling.variants import Variant

if TYPE_CHECKING:
    from jaxllm.runner.pending import StepInFlight


class DraftsOnHost(TokensOnHost):
    """Shows cached prefixes and steps to the drafter, and has drafts copied for grammars."""

    def __init__(self, device: Device, drafter: Drafter):
        self._device, self._drafter = device, drafter

    def admit(self, batches: Sequence[Batch]) -> None:
        """Show the cached prefixes of requests to the drafter."""
        if not self._drafter.needs_history:
            return
        device = self._device
        shown = [[part for row in batch.admitted for part in _cached_parts(row)] for batch in batches]
        nothing = _padded(0, 0, ())
        for row_and_position, tokens in device.ranks.rounds(shown, nothing):
            program = device.program(ProgramKey("show"))
            device.row_arrays = program(device.row_arrays, *device.put((row_and_position, tokens)))

    def keys(self, step: "StepInFlight") -> list[ProgramKey]:
        copies = [ProgramKey("drafts")] if self._is_read(step) else []
        if self._drafter.proposes:
            return [self.propose_key(step.batch), *copies]
        return [] if step.mask_TW is None else [ProgramKey("set_drafts"), *copies]

    def propose_key(self, batch: Batch) -> ProgramKey:
        """The program that shows a step to the drafter."""
        variant = min(batch.variant, Variant.RANDOM)
        return ProgramKey("propose", batch.layout.num_tokens, variant, width=batch.next_width)

    def read(self, step: "StepInFlight") -> None:
        """Start to copy the drafts that a step with masked requests will compute."""
        if self._is_read(step):
            drafts = drafts_of(self._device.row_arrays)
            copied = self._device.ranks.split(self._device.program(ProgramKey("drafts"))(drafts.draft_NK))
            step.draft_NK = dict(zip(self._device.ranks.own, copied, strict=True))
            for draft_NK in copied:
                draft_NK.copy_to_host_async()

    def _is_read(self, step: "StepInFlight") -> bool:
        return step.mask_TW is not None and step.batch.width > 1

    def follow(self, step: "StepInFlight", hidden: Hidden) -> None:
        """Show a step to the drafter, and set the drafts of grammars."""
        if self._drafter.proposes:
            program = self._device.program(self.propose_key(step.batch))
            self._device.run_on_rows(program, hidden.hidden_TD, hidden.columns_NC, *hidden.shown)
        if step.next_drafts:
            self._set_drafts(step.batch.sampled, step.next_drafts)

    def _set_drafts(self, sampled: Sequence[Row], next_drafts: Mapping[int, Sequence[int]]) -> None:
        device, most = self._device, 1 + self._drafter.num_drafts
        draft_RX = np.full((device.buckets.max_rows, 1 + most), NO_DRAFT, np.int32)
        draft_RX[:, 0] = device.buckets.max_rows
        for values, (index, tokens) in zip(draft_RX, next_drafts.items(), strict=False):
            values[0], values[1 : 1 + len(tokens[:most])] = sampled[index].index, tokens[:most]
        device.row_arrays = device.program(ProgramKey("set_drafts"))(device.row_arrays, device.put(draft_RX))


def _cached_parts(row: Row) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The cached prefix of a request as `show` takes it."""
    for first in range(0, row.data.num_computed_tokens, TOKENS_PER_SHOW):
        yield _padded(row.index, first, row.data.token_ids[first : min(first + TOKENS_PER_SHOW, row.data.num_computed_tokens)])


def _padded(row: int, first: int, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.full(TOKENS_PER_SHOW, -1, np.int32)
    tokens[: len(token_ids)] = token_ids
    return np.array([row, first], np.int32), tokens
