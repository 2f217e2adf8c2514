"""A step of several data-parallel ranks, as the scheduler plans it and as the loop sees it. Does not import JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from jaxllm.device_ops import AnyDeviceOp, RankOp
from jaxllm.scheduler_output import SchedulerOutput


@dataclass(frozen=True)
class RanksPlan(SchedulerOutput):
    """One step of all data-parallel ranks; some may have no work. The fields of `SchedulerOutput` are those of all ranks together."""

    ranks: tuple[SchedulerOutput, ...] = ()

    @classmethod
    def of(cls, ranks: Sequence[SchedulerOutput], step_id: int) -> "RanksPlan":
        """The step that has these parts. Each data-parallel rank numbers its own."""
        return cls(
            new_requests=[*chain.from_iterable(plan.new_requests for plan in ranks)],
            rows=[*chain.from_iterable(plan.rows for plan in ranks)],
            num_tokens=sum(plan.num_tokens for plan in ranks),
            finished_request_ids=[*chain.from_iterable(plan.finished_request_ids for plan in ranks)],
            preempted_request_ids=[*chain.from_iterable(plan.preempted_request_ids for plan in ranks)],
            step_id=step_id,
            masked_request_ids=tuple(chain.from_iterable(plan.masked_request_ids for plan in ranks)),
            num_drafts=max(plan.num_drafts for plan in ranks),
            ops=tuple(_of_rank(op, rank) for rank, plan in enumerate(ranks) for op in plan.ops),
            ranks=tuple(ranks),
        )


def _of_rank(op: AnyDeviceOp, rank: int) -> AnyDeviceOp:
    return msgspec.structs.replace(op, rank=rank) if isinstance(op, RankOp) else op
