"""A step of several data-parallel ranks, as the scheduler plans it and as the loop sees it. Does not import JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from jaxllm.scheduler_output import SchedulerOutput


@dataclass(frozen=True)
class LanesPlan(SchedulerOutput):
    """One step of all data-parallel ranks; some may have no work. The fields of `SchedulerOutput` are those of all ranks together."""

    lanes: tuple[SchedulerOutput, ...] = ()

    @classmethod
    def of(cls, lanes: Sequence[SchedulerOutput], step_id: int) -> "LanesPlan":
        """The step that has these parts. Each data-parallel rank numbers its own."""
        return cls(
            new_requests=[*chain.from_iterable(plan.new_requests for plan in lanes)],
            rows=[*chain.from_iterable(plan.rows for plan in lanes)],
            num_tokens=sum(plan.num_tokens for plan in lanes),
            finished_request_ids=[*chain.from_iterable(plan.finished_request_ids for plan in lanes)],
            preempted_request_ids=[*chain.from_iterable(plan.preempted_request_ids for plan in lanes)],
            step_id=step_id,
            masked_request_ids=tuple(chain.from_iterable(plan.masked_request_ids for plan in lanes)),
            num_drafts=max(plan.num_drafts for plan in lanes),
            ops=tuple(chain.from_iterable(plan.ops for plan in lanes)),
            lanes=tuple(lanes),
        )
