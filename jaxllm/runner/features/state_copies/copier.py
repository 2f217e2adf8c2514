"""Runs the operations of plans between rows and blocks."""

from collections.abc import Sequence
from typing import Any

from jaxllm.device_ops import LoadState, StoreState
from jaxllm.runner.batch import Batch
from jaxllm.runner.features.state_copies.programs import Load, Store, run
from jaxllm.runner.ops import OpRunner


class StateCopier(OpRunner):
    """Collects the operations of a plan, and starts them when its step has given requests rows: those that read blocks first."""

    ops = (StoreState, LoadState)

    def __init__(self, runner: Any):
        """runner: the `ModelRunner` whose arrays they change."""
        self._runner = runner
        self._loads: dict[str, list[int]] = {}
        self._stores: dict[str, list[int]] = {}
        """Blocks by request."""

    def run(self, op: StoreState | LoadState) -> None:
        (self._loads if isinstance(op, LoadState) else self._stores)[op.request_id] = op.block_ids

    def before_step(self, batches: Sequence[Batch]) -> None:
        if not (self._loads or self._stores):
            return
        # A request that failed has no row, and none in this step.
        rows = {chunk.row.data.request_id: chunk.row.index for batch in batches for chunk in batch.chunks}
        for name, of_requests in ((Load.name, self._loads), (Store.name, self._stores)):
            for request_id, block_ids in of_requests.items():
                if request_id in rows:
                    run(self._runner, name, rows[request_id], block_ids)
        self.replace_lost()

    def replace_lost(self) -> None:
        """Forget what waits for a step that does not come."""
        self._loads.clear()
        self._stores.clear()
