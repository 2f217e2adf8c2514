"""Passes states by row on through blocks of the KV cache, so that engines keep and fetch them as they do blocks."""

from collections.abc import Sequence
from typing import Any

from jaxllm.device_ops import CopyBlocks, LoadState, StoreState
from jaxllm.runner.batch import Batch
from jaxllm.runner.features.block_copies.copier import BlockCopier
from jaxllm.runner.features.block_copies.state_programs import Load, Store, run


class StateCopier(BlockCopier):
    """Also collects the operations of a plan between rows and blocks, and starts them when its step has given requests rows: those that
    read blocks first."""

    ops = (*BlockCopier.ops, StoreState, LoadState)

    def __init__(self, *arguments: Any, **options: Any):
        """As of BlockCopier."""
        super().__init__(*arguments, **options)
        self._loads: dict[str, list[int]] = {}
        self._stores: dict[str, list[int]] = {}
        """Blocks by request."""

    def run(self, op: CopyBlocks | StoreState | LoadState) -> None:
        match op:
            case LoadState():
                self._loads[op.request_id] = op.block_ids
            case StoreState():
                self._stores[op.request_id] = op.block_ids
            case _:
                super().run(op)

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
