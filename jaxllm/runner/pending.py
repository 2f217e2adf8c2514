"""A step in flight: what the engine's loop holds between dispatching a step and reading its results."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile

import jax
import numpy as np

from jaxllm.runner.batch import Batch
from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.runner.heads import Hidden, PendingPart
from jaxllm.runner.layout import Column
from jaxllm.runner.ops import collected
from jaxllm.scheduler_output import ModelRunnerOutput


@dataclass(slots=True)
class StepInFlight:
    """A dispatched step. Launches, which may run in a thread, fill in what they started on the device.

    A step with masked requests has two launches: `dispatch` starts the forward pass, `sample` samples under `mask_TW`.
    """

    batches: Sequence[Batch]
    """Batch of each data-parallel rank, all of one layout. With several hosts each has all batches and the results of its ranks."""
    launches: "list[Future[None]]" = field(default_factory=list)
    """Launches in the thread, in order."""
    hidden: Hidden | None = None
    """Between the forward pass and sampling."""
    parts: Sequence[PendingPart] = ()
    op_parts: Sequence[PendingPart] = ()
    """Pending results of the plan's operations."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed alone, with the reason."""
    done: Sequence[jax.Array] = ()
    """Small results to wait for, of each rank of this process, once all is launched."""
    mask_TW: np.ndarray | None = None
    """With masked requests: what request i of `sampled_ids` may get behind its last token is in row i * width, and behind its d-th
    draft in row i * width + d, with the width of the batch: bit b of word w allows token 32 w + b. Allows every token at first."""
    draft_NK: Mapping[int, jax.Array] = field(default_factory=dict)
    """With masked requests and drafts: `DraftRows.draft_NK` before the step, by the ranks of this process."""
    next_drafts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """See `PendingStep.set_next_drafts`."""
    start_sampling: "Callable[[StepInFlight], None] | None" = None
    """With masked requests, until `sample` is called."""
    was_sampled_late: bool = False
    """Whether the forward pass was over before `sample`, so that the device had nothing to do."""

    @property
    def batch(self) -> Batch:
        """The batch of one rank. What chooses programs is the same in all."""
        return self.batches[0]

    @property
    def sampled_ids(self) -> list[str]:
        """The requests that get a token, rank by rank."""
        return [row.data.request_id for batch in self.batches for row in batch.sampled]

    @property
    def width(self) -> int:
        """Tokens that a request may sample: 1, and drafts."""
        return self.batch.width

    def drafts(self) -> list[list[int]]:
        """The drafts that each request of `sampled_ids` computes in this step, if any is masked. Waits until they are proposed. Masked
        requests of ranks on other hosts have none."""
        if self.width == 1:
            return [[]] * len(self.sampled_ids)
        for launched in self.launches:
            launched.result()
        return [drafts for rank in range(len(self.batches)) for drafts in self._drafts_of(rank)]

    def _drafts_of(self, rank: int) -> list[list[int]]:
        batch = self.batches[rank]
        if rank not in self.draft_NK:
            return [[]] * len(batch.sampled)
        draft_NK = np.asarray(self.draft_NK[rank])
        num_drafts_R = batch.layout.views(batch.buffer).columns_RC[:, Column.NUM_DRAFTS]
        found = (draft_NK[row.index, :count].tolist() for row, count in zip(batch.sampled, num_drafts_R, strict=False))
        return [[*takewhile(NO_DRAFT.__ne__, tokens)] for tokens in found]

    def set_next_drafts(self, tokens: Mapping[int, Sequence[int]]) -> None:
        """See PendingStep."""
        self.next_drafts = tokens

    def sample(self) -> None:
        """Start sampling under the current mask. Returns at once."""
        assert self.start_sampling is not None, "sampled twice"
        self.was_sampled_late = self.hidden is not None and self.hidden.columns_NC.is_ready()  # type: ignore[attr-defined]
        start, self.start_sampling = self.start_sampling, None
        start(self)

    def take_hidden(self) -> Hidden:
        """The results of the forward pass, whose memory is released with the returned object."""
        hidden, self.hidden = self.hidden, None
        assert hidden is not None, "the forward pass was not launched"
        return hidden

    def start_copies(self) -> None:
        """Start copying the results to the host; each copy runs as soon as its result is ready."""
        for array in jax.tree.leaves([*self.done, *(part.arrays for part in self.parts)]):
            array.copy_to_host_async()

    def tokens(self) -> list[int]:
        """The tokens sampled for the requests of `sampled_ids`, without drafts. Waits for the launches and the device, and raises their
        errors; the step must have been sampled."""
        for launched in self.launches:
            launched.result()
        return np.asarray(self.done[0])[: len(self.batch.sampled)].tolist() if self.batch.sampled else []

    def result(self) -> ModelRunnerOutput:
        """Wait for the launches and the device, and return the results of the step.

        Raises the error of a launch, if any, and RuntimeError before `sample`.
        """
        for launched in self.launches:
            launched.result()
        return self.read()

    def read(self) -> ModelRunnerOutput:
        """Wait for the device and return the results of the step, whose launches are over. Raises RuntimeError before `sample`."""
        if not self.done:
            raise RuntimeError("the step was never sampled")
        for result in self.done:
            np.asarray(result)
        output = ModelRunnerOutput({}, errors=self.errors)
        for part in (*self.parts, *self.op_parts):
            part.collect(output)
        return output

    def op_results(self) -> ModelRunnerOutput:
        """See PendingStep."""
        return collected(self.op_parts)
