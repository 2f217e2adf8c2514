"""FarLane: a lane of another host, of which this one knows the rows and the batches."""

from collections.abc import Iterable

from jaxllm.lanes.lane import Lane
from jaxllm.runner.batch import Batch, BatchBuilder
from jaxllm.runner.rows import Rows
from jaxllm.scheduler_output import SchedulerOutput


class FarLane:
    """`Lane`'s methods that need no devices. All hosts make the batches of all lanes, because these choose the program of a step."""

    def __init__(self, near: Lane):
        """near: a lane of this process."""
        same = near.batches
        self.rows = Rows(near.rows.trash, full_logprobs=near.rows.full_logprobs)
        self.batches = BatchBuilder(
            self.rows,
            same.buckets,
            block_size=same.block_size,
            max_blocks=same.max_blocks,
            num_groups=same.num_groups,
            num_updates=same.num_updates,
        )

    def batch_of(self, plan: SchedulerOutput) -> Batch:
        """See ModelRunner."""
        return self.batches.apply(plan)

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """See ModelRunner."""
        self.rows.check_idle(finished_ids)

    def start_over(self) -> None:
        """Free all rows."""
        self.rows.clear()

    def drop_caches(self) -> None:
        """Free all rows."""
        self.rows.clear()
