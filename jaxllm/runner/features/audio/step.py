"""Audio as a feature of the step: the program `encode_clip` writes states of rows, which the step reads as any others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.layers.audio import AudioEncoder
from jaxllm.layers.cross_attention import CrossAttentionLM
from jaxllm.model_parts import Audio
from jaxllm.runner.features.audio.ops import AudioOnHost
from jaxllm.runner.features.audio.programs import EncodeClip
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import Caches, Params
from jaxllm.runner.step_feature import StepFeature


@dataclass(frozen=True)
class Hearing(StepFeature):
    """An encoder of clips, and the keys and values that it gives each layer."""

    audio: Audio
    kernels: Kernels
    merge_encoder: Callable[[Params], AudioEncoder]
    """All weights -> the encoder."""
    merge_model: Callable[[Params], CrossAttentionLM]
    """All weights -> the decoder."""

    def programs(self) -> Sequence[ProgramKind]:
        return [EncodeClip(self)]

    def op_runner(self, device: Any) -> AudioOnHost:
        return AudioOnHost(device, self)

    def encoded(self, params: Params, features_TM: jax.Array) -> jax.Array:
        """[F, D]: results of the encoder for a clip."""
        return self.merge_encoder(params)(features_TM, **self.kernels.of_encoder)

    def encode(self, params: Params, states: Caches, features_TM: jax.Array, row_1: jax.Array) -> Caches:
        """The states of all rows with those of one clip, in a row; beyond the last row nothing is written."""
        encoded_FD = self.encoded(params, features_TM)
        found = [part_KFH for block in self.merge_model(params).blocks for part_KFH in block.cross.encoded(encoded_FD)]  # type: ignore[attr-defined]
        written = (state.at[row_1].set(part[None], mode="drop") for state, part in zip(states, found, strict=True))
        return tuple(written)
