"""Copies states by row to blocks of the KV cache and back, as operations of plans, for the prefix cache and for other engines."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.cache_spec import row_bytes
from jaxllm.runner.features.state_copies.copier import StateCopier
from jaxllm.runner.features.state_copies.programs import Load, Store
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.step_feature import FeatureParts, StepFeature


@dataclass(frozen=True)
class StateCopies(StepFeature):
    """Needs nothing but the arrays of blocks and states."""

    def programs(self) -> Sequence[ProgramKind]:
        return [Store(), Load()]

    def op_runner(self, device: Any) -> StateCopier:
        return StateCopier(device)


def make(parts: FeatureParts) -> StepFeature | None:
    """For engines that find prefixes of models with states by row."""
    return StateCopies() if parts.config.cache.enable_prefix_caching and row_bytes(parts.model_config) else None
