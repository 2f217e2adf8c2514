"""Passes states by row on through blocks of the KV cache, so that engines can keep and fetch them as they do blocks."""

from collections.abc import Sequence
from typing import Any

from jaxllm.device_ops import LoadState, StoreState
from jaxllm.runner.batch import Batch
from jaxllm.runner.features.state_blocks.programs import Load, Store, run
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.step_feature import FeatureParts, StepFeature


class StateBlocks(StepFeature):
    """Programs and operations between rows and blocks."""

    def programs(self) -> Sequence[ProgramKind]:
        return [Store(), Load()]

    def op_runner(self, device: Any) -> "StatesOnHost":
        return StatesOnHost(device)


class StatesOnHost(OpRunner):
    """Collects the operations of a plan, and starts them when its step has given requests rows: those that read blocks first."""

    ops = (StoreState, LoadState)

    def __init__(self, runner: Any):
        self._runner = runner
        self._loads: dict[str, list[int]] = {}
        self._stores: dict[str, list[int]] = {}
        """Blocks by request."""

    def run(self, op: StoreState | LoadState) -> None:
        match op:
            case LoadState():
                self._loads[op.request_id] = op.block_ids
            case StoreState():
                self._stores[op.request_id] = op.block_ids

    def before_step(self, batches: Sequence[Batch]) -> None:
        if not (self._loads or self._stores):
            return
        # A request that failed has no row, and none in this step.
        rows = {chunk.row.data.request_id: chunk.row.index for batch in batches for chunk in batch.chunks}
        self._run_by_row(Load.name, self._loads, rows)
        self._run_by_row(Store.name, self._stores, rows)
        self.replace_lost()

    def _run_by_row(self, name: str, of_requests: dict[str, list[int]], rows: dict[str, int]) -> None:
        for request_id, block_ids in of_requests.items():
            if request_id in rows:
                run(self._runner, name, rows[request_id], block_ids)

    def replace_lost(self) -> None:
        """Forget what waits for a step that does not come."""
        self._loads.clear()
        self._stores.clear()


def make(parts: FeatureParts) -> StepFeature | None:
    """For engines that pass states on to others, or get them."""
    has_states = bool(parts.model_config.delta_nets)
    return StateBlocks() if has_states and parts.config.kv_transfer.kv_role is not None else None
