"""The host's part of audio: clips of a plan are encoded when its step has given their requests rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.device_ops import EncodeAudio
from jaxllm.media.features import unpack
from jaxllm.runner.batch import Batch
from jaxllm.runner.features.audio.programs import EncodeClip, nothing, run
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.programs.key import ProgramKey

if TYPE_CHECKING:
    from jaxllm.runner.features.audio.step import Hearing


class AudioOnHost(OpRunner):
    """Collects the clips of a plan and encodes them before its step."""

    ops = (EncodeAudio,)

    def __init__(self, runner: Any, hearing: "Hearing"):
        self._runner, self._hearing = runner, hearing
        self._waiting: list[dict[str, np.ndarray]] = [{} for _ in range(runner.ranks.num)]
        """Features of clips that the next step encodes, by rank and request."""

    def run(self, op: EncodeAudio) -> None:
        self._waiting[op.rank][op.request_id] = unpack(op.payload, self._hearing.audio)

    def before_step(self, batches: Sequence[Batch]) -> None:
        if not any(self._waiting):
            return
        clips = []
        for waiting, batch in zip(self._waiting, batches, strict=True):
            # A request that failed has no row, and none in this step.
            rows = {chunk.row.data.request_id: chunk.row.index for chunk in batch.chunks}
            clips.append([(found, np.array([rows[name]], np.int32)) for name, found in waiting.items() if name in rows])
            waiting.clear()
        runner, program = self._runner, self._runner.program(ProgramKey(EncodeClip.name))
        for arrays in runner.ranks.rounds(clips, nothing(runner, self._hearing.audio)):
            run(runner, program, arrays)

    def replace_lost(self) -> None:
        """Forget what waits for a step that does not come."""
        for waiting in self._waiting:
            waiting.clear()
