"""The programs of lanes: those of all lanes together, which contain experts, and those that each lane runs alone."""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.parallel.exchange import make_exchange
from jaxllm.parallel.mesh import DATA, TENSOR
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.step_programs import StepPrograms


@dataclass(frozen=True)
class JointPrograms(StepPrograms):
    """Traces `forward`, `decode` and `propose` of all lanes: what one lane's program takes and returns, joined.

    Each device, in a shard_map over all lanes, sees the arrays of its lane, and the other lanes in mixtures alone."""

    @classmethod
    def of(cls, lane: StepPrograms, mesh: Mesh, params: tuple[jax.ShapeDtypeStruct, ...]) -> "JointPrograms":
        """The joint programs of lanes that have these of their own."""
        functions = replace(lane.functions, exchange=make_exchange(mesh, lane.buckets.policy))
        shared = {field.name: getattr(lane, field.name) for field in fields(StepPrograms)}
        return cls(**{**shared, "functions": functions, "mesh": mesh, "params": params})

    @property
    def replicated(self) -> NamedSharding:
        """The same on all devices of a lane."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))

    @property
    def by_heads(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(DATA, TENSOR))

    def common_keys(self) -> list[ProgramKey]:
        return [key for key in super().common_keys() if self.kind_of(key).is_joint]

    def rare_keys(self) -> list[ProgramKey]:
        return []

    def joined_arrays(self, arrays: Any) -> Any:
        return jax.tree.map(lambda x: np.concatenate([x] * self.mesh.shape[DATA]), arrays)

    @property
    def caches(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(self._joined(x.shape), x.dtype, sharding=x.sharding) for x in super().caches)

    def shape(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return super().shape(self._joined(shape), dtype)

    def _joined(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (self.mesh.shape[DATA] * shape[0], *shape[1:])


@dataclass(frozen=True)
class LanePrograms(StepPrograms):
    """Traces the programs of a lane alone."""

    def start_keys(self) -> list[ProgramKey]:
        return self.common_keys()

    def common_keys(self) -> list[ProgramKey]:
        return [key for key in super().common_keys() if not self.kind_of(key).is_joint]
