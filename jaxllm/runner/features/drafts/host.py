"""Starts the programs of drafts from the host, in addition to those of the step itself."""

from typing import TYPE_CHECKING

import numpy as np

from jaxllm.runner.batch import Batch
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

    def __init__(self, device: Device, *, needs_history: bool):
        self._device, self._needs_history = device, needs_history

    def admit(self, row: Row) -> None:
        """Show the cached prefix of a request to the drafter."""
        if not self._needs_history or not row.data.num_computed_tokens:
            return
        device, token_ids = self._device, row.data.token_ids
        program = device.program(ProgramKey("show"))
        for first in range(0, row.data.num_computed_tokens, TOKENS_PER_SHOW):
            part = token_ids[first : min(first + TOKENS_PER_SHOW, row.data.num_computed_tokens)]
            tokens = np.full(TOKENS_PER_SHOW, -1, np.int32)
            tokens[: len(part)] = part
            device.row_arrays = program(device.row_arrays, *device.put((np.array([row.index, first], np.int32), tokens)))

    def keys(self, step: "StepInFlight") -> list[ProgramKey]:
        copies = [ProgramKey("drafts")] if self._is_read(step) else []
        return [self.propose_key(step.batch), *copies]

    def propose_key(self, batch: Batch) -> ProgramKey:
        """The program that shows a step to the drafter."""
        variant = min(batch.variant, Variant.RANDOM)
        return ProgramKey("propose", batch.layout.num_tokens, variant, width=batch.next_width)

    def read(self, step: "StepInFlight") -> None:
        """Start to copy the drafts that a step with masked requests will compute."""
        if self._is_read(step):
            drafts = drafts_of(self._device.row_arrays)
            step.draft_NK = draft_NK = self._device.program(ProgramKey("drafts"))(drafts.draft_NK)
            draft_NK.copy_to_host_async()

    def _is_read(self, step: "StepInFlight") -> bool:
        return step.mask_TW is not None and step.batch.width > 1

    def follow(self, batch: Batch, hidden: Hidden) -> None:
        """Show a step to the drafter, unless a program of all data-parallel ranks does."""
        if hidden.shown is not None:
            program = self._device.program(self.propose_key(batch))
            self._device.run_on_rows(program, hidden.hidden_TD, hidden.columns_NC, *hidden.shown)
