"""A step of all lanes in flight."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
import numpy as np

from jaxllm.runner.batch import Batch
from jaxllm.runner.heads import PendingPart
from jaxllm.runner.ops import collected
from jaxllm.runner.pending import StepInFlight
from jaxllm.scheduler_output import ModelRunnerOutput


@dataclass(slots=True)
class LanesInFlight:
    """The steps of the lanes, which run in the same programs. See `PendingStep`.

    With several hosts each has the batches of all lanes and the results of its own.
    """

    batches: Sequence[Batch]
    """Of each lane."""
    first_lane: int
    """The first of this process."""
    parts: Sequence[StepInFlight]
    """Of each lane of this process."""
    launches: "list[Future[None]]" = field(default_factory=list)
    """Those in the thread, in order."""
    op_parts: Sequence[PendingPart] = ()
    """Of the plan's operations."""
    for_drafter: tuple[Any, ...] | None = None
    """What `propose` takes of the forward pass, of all lanes; None without a drafter, and once it was launched."""
    mask_TW: np.ndarray | None = None
    start_sampling: "Callable[[LanesInFlight], None] | None" = None
    was_sampled_late: bool = False

    @property
    def batch(self) -> Batch:
        """Of one lane; all have its layout."""
        return self.batches[0]

    @property
    def width(self) -> int:
        return self.batch.width

    @property
    def sampled_ids(self) -> list[str]:
        """The requests of all lanes that get a token."""
        return [row.data.request_id for batch in self.batches for row in batch.sampled]

    @property
    def done(self) -> jax.Array | None:
        """A small result to wait for, once all is launched."""
        return self.parts[0].done

    def open_masks(self, num_words: int) -> None:
        """Let every request draw every token, until the masks are filled."""
        self.mask_TW = np.full((len(self.sampled_ids) * self.width, num_words), -1, np.int32)

    def drafts(self) -> list[list[int]]:
        """See `PendingStep`. Masked requests of lanes on other hosts have none."""
        for launched in self.launches:
            launched.result()
        found: list[list[list[int]]] = [[[]] * len(batch.sampled) for batch in self.batches]
        for lane, part in enumerate(self.parts, self.first_lane):
            if part.mask_TW is not None:
                found[lane] = part.drafts()
        return [*chain.from_iterable(found)]

    def sample(self) -> None:
        """Start sampling under the current mask. Returns at once."""
        assert self.start_sampling is not None and self.mask_TW is not None, "sampled twice"
        hidden = self.parts[0].hidden
        self.was_sampled_late = hidden is not None and hidden.columns_NC.is_ready()  # type: ignore[attr-defined]
        first = self.width * sum(len(batch.sampled) for batch in self.batches[: self.first_lane])
        for part in self.parts:
            count = self.width * len(part.batch.sampled)
            if part.mask_TW is not None:
                part.mask_TW[:count] = self.mask_TW[first : first + count]
            first += count
        start, self.start_sampling = self.start_sampling, None
        start(self)

    def start_copies(self) -> None:
        """Start copying the results to the host."""
        for part in self.parts:
            part.start_copies()

    def result(self) -> ModelRunnerOutput:
        """Wait for the launches and the devices, and return the results of this process's lanes. Raises the first error."""
        for launched in self.launches:
            launched.result()
        first, *others = [part.read() for part in self.parts]
        for other in (*others, self.op_results()):
            first.add(other)
        return first

    def op_results(self) -> ModelRunnerOutput:
        """See PendingStep. Of this process's lanes."""
        return collected(self.op_parts)
