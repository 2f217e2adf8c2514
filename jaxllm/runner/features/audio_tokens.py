"""Audio of models without cross attention: embeddings that an encoder computes of clips replace those of placeholder tokens in prompts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.device_ops import EncodeItem
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.layers.audio import AudioEmbedder, encoding_bytes
from jaxllm.layers.decoder import CausalLM
from jaxllm.loaders.encoder import audio_weights
from jaxllm.media.features import unpack_part
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Audio, AudioTokens
from jaxllm.runner.item_embeddings import ItemEmbeddings, ItemsOnHost, slab_rows
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind, Wanted, fit
from jaxllm.runner.row_arrays import Params
from jaxllm.runner.split_program import CompiledProgram, Lowered
from jaxllm.runner.step_feature import FeatureParts, StepFeature
from jaxllm.runner.weights import WithWeights

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


def weights(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> WithWeights | None:
    """The encoder, whole on every device."""
    return None if _tokens_of(model_config) is None else audio_weights(config.model, model_config)


def memory_bytes(config: EngineConfig, model_config: ModelConfig, model: CausalLM) -> int:
    """Bytes on each device of the encoder, of the slab, of what a step takes from it, and of temporary arrays of the longest clip."""
    encoder, audio, tokens = audio_weights(config.model, model_config), model_config.audio, _tokens_of(model_config)
    if encoder is None or audio is None or tokens is None:
        return 0
    sizes = EncoderSizes.of_audio(audio)
    kept = sizes.num_pages * sizes.page_embeddings + config.scheduler.max_step_tokens
    num_bytes = encoder.num_bytes + kept * tokens.output_size * jnp.dtype(model_config.dtype).itemsize
    return num_bytes if config.multimodal.skip_mm_profiling else num_bytes + encoding_bytes(audio, model_config.dtype)


def make(parts: FeatureParts) -> StepFeature | None:
    """For models that hear without cross attention."""
    audio = parts.model_config.audio
    if audio is None or _tokens_of(parts.model_config) is None:
        return None
    sizes, merge = EncoderSizes.of_audio(audio), parts.weights["audio_tokens"].merge
    return HeardTokens(audio, sizes, parts.model_config.dtype, parts.kernels, merge)


def _tokens_of(model_config: ModelConfig) -> AudioTokens | None:
    return None if model_config.audio is None else model_config.audio.tokens


@dataclass(frozen=True)
class ClipInput:
    """A clip to encode."""

    features_TM: np.ndarray
    num_real: int
    """Positions of the clip."""
    slab_rows: np.ndarray
    """int32: where its embeddings go."""


@dataclass(frozen=True)
class HeardTokens(ItemEmbeddings):
    """An encoder of clips to embeddings. Each program encodes one clip, of at most so many positions."""

    audio: Audio
    sizes: EncoderSizes
    dtype: str
    kernels: Kernels
    merge: Callable[[Params], AudioEmbedder]
    """All weights -> the encoder."""

    name = "audio_tokens"

    @property
    def tokens(self) -> AudioTokens:
        assert self.audio.tokens is not None
        return self.audio.tokens

    @property
    def result_width(self) -> int:
        return self.tokens.output_size

    def programs(self) -> Sequence[ProgramKind]:
        return [EncodeAudioItem(self)]

    def op_runner(self, device: Any) -> "ClipsOnHost":
        return ClipsOnHost(device, self)

    def encode(self, params: Params, slab: jax.Array, features_TM: jax.Array, integers: jax.Array) -> jax.Array:
        """The slab with the embeddings of a clip. integers: see `arrays`."""
        found = self.merge(params).embeddings(features_TM, integers[0], **self.kernels.of_encoder)
        return slab.at[integers[1:]].set(found.astype(slab.dtype), mode="drop")

    def arrays(self, clip: ClipInput | None, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs of a program of `size` positions: float32 features [2 size, M], and int32: the clip's positions, then the row of the slab
        of each embedding, beyond its end for padding. Without a clip nothing is written."""
        features_TM = np.zeros((2 * size, self.audio.num_bins), np.float32)
        integers = np.full(1 + self.tokens.num_embeddings(size), self.slab_shape[0], np.int32)
        integers[0] = size
        if clip is not None:
            features_TM[: len(clip.features_TM)] = clip.features_TM
            integers[0] = clip.num_real
            integers[1 : 1 + len(clip.slab_rows)] = clip.slab_rows
        return features_TM, integers


class ClipsOnHost(ItemsOnHost):
    """Encodes one clip after the other."""

    def __init__(self, runner: Any, heard: HeardTokens):
        super().__init__(runner, heard)
        self._heard = heard
        self._waiting: list[list[ClipInput]] = [[] for _ in range(runner.ranks.num)]
        """Clips that the next step encodes, by rank."""

    def add(self, op: EncodeItem) -> None:
        heard = self._heard
        features_TM, num_frames = unpack_part(op.payload, heard.audio)
        num_real = heard.audio.positions_of(num_frames)
        rows = slab_rows(op.pages, heard.sizes.page_embeddings, heard.tokens.num_embeddings(num_real))
        self._waiting[op.rank].append(ClipInput(features_TM, num_real, rows))

    def encode(self) -> None:
        audio = self._heard.audio
        for clips in zip_longest(*self._waiting):
            most = max(audio.positions_of(len(clip.features_TM)) for clip in clips if clip is not None)
            ready = self._runner.ready_sizes(ProgramKey(EncodeAudioItem.name), audio.sizes)
            size = fit(ready if ready and ready[-1] >= most else audio.sizes, most)
            program = self._runner.program(ProgramKey(EncodeAudioItem.name, size))
            num_computed, num_runs = self._runner.encoder_totals
            self._runner.encoder_totals = num_computed + size * len(clips), num_runs + 1
            run(self._runner, self._heard, program, [self._heard.arrays(clip, size) for clip in clips])

    def forget(self) -> None:
        for waiting in self._waiting:
            waiting.clear()


class EncodeAudioItem(ProgramKind):
    """See `HeardTokens.encode`. The key's size counts positions. With data-parallel ranks, a rank without a clip encodes silence."""

    name = "encode_audio"

    def __init__(self, heard: HeardTokens):
        self.heard = heard

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        return [ProgramKey(self.name, size) for size in reversed(self.heard.audio.sizes)]

    def awaited(self, programs: "StepPrograms", wanted: Wanted) -> Iterable[Sequence[ProgramKey]]:
        """One program that holds the longest clip, with what it sees behind it."""
        sizes, count = self.heard.audio.sizes, self.heard.tokens.num_averaged
        if not (clips := [item.num_embeddings for item in wanted.items if item.kind == "audio"]):
            return []
        longest = min((max(clips) + 1) * count, sizes[-1])
        return [[ProgramKey(self.name, size) for size in sizes if size >= longest]]

    def is_first(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        return key.size == self.heard.audio.sizes[-1]

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        slab = programs.rows.of_features[self.heard.name]
        features = programs.shape((2 * key.size, self.heard.audio.num_bins), jnp.float32)
        integers = programs.ints(1 + self.heard.tokens.num_embeddings(key.size))
        return programs.lower_on_each(
            self.heard.encode, (programs.params, slab, features, integers), programs.replicated, donate=(1,)
        )

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        run(runner, self.heard, program, [self.heard.arrays(None, key.size)] * runner.ranks.num)


def run(runner: Any, heard: HeardTokens, program: CompiledProgram, made: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Start to encode a clip of each rank."""
    joined = tuple(map(runner.ranks.joined, zip(*made, strict=True)))
    slab = program(runner.params, runner.row_arrays.of_features[heard.name], *runner.put(joined))
    runner.row_arrays = runner.row_arrays.replaced(**{heard.name: slab})
