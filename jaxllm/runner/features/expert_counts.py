"""Counts on the device how many tokens each expert of each mixture computes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.device_ops import TakeCounts
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MoE
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.runner.split_program import CompiledProgram, Lowered
from jaxllm.runner.step_feature import FeatureParts, StepFeature, StepRun
from jaxllm.scheduler_output import ModelRunnerOutput

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


@dataclass(frozen=True)
class ExpertCounts(StepFeature):
    """The mixtures that are counted, in the order of their layers, as a part of the step's programs.

    A step counts all of them at its end, because a kernel for each of them would cost more than what it does.
    """

    names: tuple[str, ...]
    """Names of the layers' mixtures."""
    num_experts: int
    """Number of experts of the largest mixture."""
    layers: tuple[int, ...] = ()
    """Layers of the mixtures."""

    @classmethod
    def of(cls, config: ModelConfig, layers: Collection[int]) -> "ExpertCounts":
        """The counts of these layers of a model."""
        found = [(i, layer.mlp) for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MoE) and i in layers]
        names = tuple(part.module(config.layer_name(layer)) for layer, part in found)
        most = max((part.routing.num_experts for _, part in found), default=0)
        return cls(names, most, tuple(layer for layer, _ in found))

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the counts."""
        return len(self.names), self.num_experts

    def add(self, counts_LE: jax.Array, chosen: Sequence[tuple[str, jax.Array]]) -> jax.Array:
        """The counts with those of a step. chosen: mixtures by name with the experts of some tokens, int32 [T, k], -1 for padding."""
        if not chosen:
            return counts_LE
        numbers = {name: number for number, name in enumerate(self.names)}
        assert numbers.keys() >= {name for name, _ in chosen}, "a mixture that is not counted"
        none = counts_LE.size
        index = [
            jnp.where(expert_Tk < 0, none, numbers[name] * self.num_experts + expert_Tk).reshape(-1)
            for name, expert_Tk in chosen
        ]
        return counts_LE.reshape(-1).at[jnp.concatenate(index)].add(1, mode="drop").reshape(counts_LE.shape)

    def programs(self) -> Sequence[ProgramKind]:
        return [TakeExpertTokens(self)]

    def op_runner(self, device: Any) -> "CountReader":
        return CountReader(device, self)

    def row_arrays(self, buckets: Buckets) -> dict[str, Any]:
        return {"expert_tokens_LE": jax.ShapeDtypeStruct(self.shape, jnp.int32)}

    def before(self, run: StepRun) -> None:
        run.step.chosen = []

    def after(self, run: StepRun) -> None:
        chosen = run.step.chosen
        assert chosen is not None
        counts_LE = run.count(lambda counts_LE: self.add(counts_LE, chosen), run.rows.of_features["expert_tokens_LE"])
        run.rows = run.rows.replaced(expert_tokens_LE=counts_LE)

    def take(self, rows: RowArrays) -> tuple[RowArrays, jax.Array]:
        """The rows' arrays with no tokens of experts, and those counted so far."""
        counts_LE = rows.of_features["expert_tokens_LE"]
        return rows.replaced(expert_tokens_LE=jnp.zeros_like(counts_LE)), counts_LE


class TakeExpertTokens(ProgramKind):
    """See `ExpertCounts.take`."""

    name = "take_expert_tokens"
    only = "common"

    def __init__(self, counts: ExpertCounts):
        self.counts = counts

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        return programs.lower_on_ranks(self.counts.take, (programs.rows,), donate=(0,))

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        runner.row_arrays, _ = program(runner.row_arrays)


class CountReader(OpRunner):
    """Reads the counts. Each stage and each rank counts what its own tokens chose."""

    ops = (TakeCounts,)

    def __init__(self, runner: Any, counts: ExpertCounts):
        self._runner, self._counts = runner, counts

    def run(self, op: TakeCounts) -> "CountsInFlight":
        runner = self._runner
        runner.row_arrays, counts_LE = runner.program(ProgramKey(TakeExpertTokens.name))(runner.row_arrays)
        return CountsInFlight(self._counts.layers, runner.ranks.split(counts_LE))


class CountsInFlight:
    """A PendingPart: counts being copied to the host."""

    def __init__(self, layers: Sequence[int], counts: Sequence[jax.Array]):
        """counts: [L, E] of each rank of this process."""
        self.arrays, self._layers = counts, layers
        for counts_LE in counts:
            counts_LE.copy_to_host_async()

    def collect(self, output: ModelRunnerOutput) -> None:
        """See PendingPart. Raises the error of a step before."""
        for counts_LE in self.arrays:
            output.add_counts(dict(zip(self._layers, np.asarray(counts_LE), strict=True)))


def make(parts: FeatureParts) -> StepFeature | None:
    """For engines that report the load of experts."""
    return ExpertCounts.of(parts.model_config, parts.model.layers) if parts.config.observe.expert_load else None
