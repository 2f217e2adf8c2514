"""Tells a step whose numbers an earlier stage lost, because a device gave up waiting for another, from a model that computes NaN."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.runner.batch import Chunk
from jaxllm.runner.heads import Hidden
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.runner import ModelRunner
from jaxllm.scheduler_output import ModelRunnerOutput


@dataclass(frozen=True)
class LostPeers:
    """A head of every step, after sampling. The last stage itself reports its own devices' failures."""

    stages: Sequence[ModelRunner]
    """The stages before the last."""

    @property
    def arrays(self) -> Any:
        return ()

    def select(self, chunks: Sequence[Chunk]) -> Sequence[ModelRunner]:
        """The stages whose devices exchange through each other's memory."""
        return [stage for stage in self.stages if stage.peers is not None]

    def keys(self, work: Any, num_tokens: int) -> list[ProgramKey]:
        return []

    def launch(self, work: Any, hidden: Hidden | None) -> list["LostPeers"]:
        return [self]

    def collect(self, output: ModelRunnerOutput) -> None:
        """Raises RuntimeError if numbers that are not finite come from a failed exchange."""
        if output.not_finite:
            check_peers(self.stages)

    def delete_arrays(self) -> None:
        """Nothing is kept."""


def check_peers(stages: Sequence[ModelRunner]) -> None:
    """Raise RuntimeError if a device of these gave up waiting for another."""
    if any(stage.peers is not None and stage.peers.failed() for stage in stages):
        raise RuntimeError("a device of an earlier stage waited too long for another: the step's results are lost")
