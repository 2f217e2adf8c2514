"""The host's part of clips in place of tokens: which program encodes each, what it takes, and how much memory that needs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.device_ops import EncodeItem
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.foreseen import Needs
from jaxllm.layers.audio import AudioEmbedder, attend_by_head, attend_together, encoding_bytes
from jaxllm.media.features import pack_part
from jaxllm.model_parts import MLP, Audio, AudioTokens, MergerLinear
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.ranks import Ranks
from jaxllm.request import PromptItem
from jaxllm.runner.feature_inputs import FeatureInputs
from jaxllm.runner.features import audio_tokens
from jaxllm.runner.features.audio_tokens import ClipsOnHost, HeardTokens
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.programs.kind import Wanted
from jaxllm.sampling_params import SamplingParams
from tests.helpers import audio_checkpoint

TOKENS = AudioTokens(9, "<|audio|>", "projector.", (MergerLinear("projector.linear", 64),), num_averaged=2)
AUDIO = Audio(4, 50, 64, 2, 2, MLP(96), tokens=TOKENS)
SIZES = EncoderSizes.of_audio(AUDIO)
NUM_ROWS = SIZES.num_pages * 64


class Runner:
    """Notes what is encoded."""

    def __init__(self, heard: HeardTokens, num_ranks: int):
        self.ranks = Ranks(SimpleNamespace(shape={}))  # type: ignore[arg-type]
        self.ranks.num = num_ranks
        self.shapes = SimpleNamespace(inputs=FeatureInputs((heard,)))
        self.params, self.put = (), lambda arrays: arrays
        self.calls: list[Any] = []
        self.encoder_totals, self.ready = (0, 0), AUDIO.sizes
        self.row_arrays = SimpleNamespace(of_features={"audio_tokens": "slab"}, replaced=lambda audio_tokens: self.row_arrays)

    def ready_sizes(self, key: Any, sizes: Any) -> Any:
        return tuple(size for size in sizes if size in self.ready)

    def program(self, key: Any) -> Any:
        return lambda params, slab, features, integers: self.calls.append((key.size, features, integers))


def new_host(num_ranks: int = 1) -> tuple[ClipsOnHost, Runner]:
    heard = HeardTokens(AUDIO, SIZES, "float32", Kernels(), None)  # type: ignore[arg-type]
    runner = Runner(heard, num_ranks)
    return ClipsOnHost(runner, heard), runner


def clip(rank: int, num_frames: int, *pages: int) -> EncodeItem:
    """A clip of so many frames, which all have its number of frames as values."""
    return EncodeItem(rank, pack_part(np.full((100, 4), num_frames, np.float32), num_frames), [*pages])


@pytest.mark.parametrize(
    ("num_frames", "size"), [(3, 14), (26, 14), (27, 26), (50, 26), (51, 50), (98, 50), (99, 50), (100, 50)]
)
def test_the_smallest_program_that_sees_what_is_behind_a_clip_encodes_it(num_frames: int, size: int) -> None:
    host, runner = new_host()
    host.run(clip(0, num_frames, 3))
    assert not runner.calls
    host.before_step([])
    ((found, features, integers),) = runner.calls
    seen, num_positions = min(num_frames + 2, 100), (num_frames + 1) // 2
    assert found == size and features.shape == (2 * size, 4)
    assert (features[:seen] == num_frames).all() and not features[seen:].any()
    rows = [3 * 64 + row for row in range(num_positions // 2)]
    assert integers.tolist() == [num_positions, *rows, *[NUM_ROWS] * (size // 2 - len(rows))]
    host.before_step([])
    assert len(runner.calls) == 1, "once"
    host.run(clip(0, num_frames, 3))
    host.replace_lost()
    host.before_step([])
    assert len(runner.calls) == 1, "what waits is lost with the slab"


def test_a_larger_program_that_is_there_encodes_a_clip() -> None:
    host, runner = new_host()
    runner.ready = (50,)  # type: ignore[assignment]
    host.run(clip(0, 10, 3))
    host.before_step([])
    runner.ready = (14,)  # type: ignore[assignment]
    host.run(clip(0, 60, 3))
    host.before_step([])
    assert [size for size, _, _ in runner.calls] == [50, 50] and runner.encoder_totals == (100, 2)


@pytest.mark.parametrize(("num_tokens", "sizes"), [(1, [14, 26, 50]), (6, [14, 26, 50]), (7, [26, 50]), (25, [50])])
def test_a_request_waits_for_a_program_that_holds_its_clips(num_tokens: int, sizes: list[int]) -> None:
    (encode,) = HeardTokens(AUDIO, SIZES, "float32", Kernels(), None).programs()  # type: ignore[arg-type]
    wanted = Wanted.of(Needs(SamplingParams()), full_logprobs=False)
    items = [PromptItem("audio", b"a", 0, 1), PromptItem("audio", b"b", 1, num_tokens)]
    found = [*encode.awaited(None, replace(wanted, items=items))]  # type: ignore[arg-type]
    assert [[key.size for key in keys] for keys in found] == [sizes]
    assert not [*encode.awaited(None, wanted)]  # type: ignore[arg-type]


def test_ranks_encode_at_the_same_time_each_its_own() -> None:
    host, runner = new_host(num_ranks=2)
    for each in (clip(1, 10, 0), clip(0, 60, 1), clip(1, 20, 2)):
        host.run(each)
    host.before_step([])
    (size, features, integers), (second_size, second, second_integers) = runner.calls
    assert (size, second_size) == (50, 14) and len(features) == 200 and len(second) == 56
    assert (features[0, 0], features[100, 0]) == (60, 10) and not second[:28].any() and second[28, 0] == 20
    assert integers[[0, 26]].tolist() == [30, 5]
    assert second_integers[:8].tolist() == [14] + [NUM_ROWS] * 7, "a rank without a clip writes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encoding_takes_no_more_memory_than_is_planned(dtype: str) -> None:
    audio = replace(AUDIO, num_bins=128, num_positions=1500, hidden_size=1280, num_heads=20, mlp=MLP(5120, "gelu", gated=False))
    encoder = AudioEmbedder(audio, dtype)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.state(encoder))

    def encode(state: Any, features_TM: jax.Array, num_real: jax.Array) -> jax.Array:
        return nnx.merge(nnx.graphdef(encoder), state).embeddings(features_TM, num_real)

    given = jax.ShapeDtypeStruct((3000, 128), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    found = jax.jit(encode).lower(state, *given).compile().memory_analysis()
    assert 0 < found.temp_size_in_bytes + found.output_size_in_bytes <= encoding_bytes(audio, dtype)


@pytest.mark.parametrize("num_real", [None, 5])
def test_attention_of_all_heads_together_is_that_of_each(num_real: int | None) -> None:
    """CPUs compute one head after the other, other devices all together."""
    q_FNH, k_FNH, v_FNH = np.random.default_rng(0).normal(size=(3, 9, 4, 8)).astype(np.float32)
    scores_NQK = np.einsum("qnh,knh->nqk", *map(np.float64, (q_FNH, k_FNH))) * 0.5
    weight_NQK = np.exp(scores_NQK[..., :num_real])
    weight_NQK /= weight_NQK.sum(-1, keepdims=True)
    expected = np.einsum("nqk,knh->qnh", weight_NQK, v_FNH[:num_real])
    for attend in (attend_together, attend_by_head):
        found = attend(*map(jnp.asarray, (q_FNH, k_FNH, v_FNH)), num_real=num_real, scale=0.5)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_memory_is_planned_for_encoder_slab_and_the_longest_clip(tmp_path) -> None:
    directory = audio_checkpoint.write(tmp_path)
    model_config = load_model_config(directory, dtype="float32")

    def planned(**options: Any) -> int:
        config = EngineConfig.from_options(model=str(directory), max_num_batched_tokens=64, dtype="float32", **options)
        return audio_tokens.memory_bytes(resolve_platform_defaults(config, on_gpu=False), model_config, None)  # type: ignore[arg-type]

    audio, unprofiled = model_config.audio, planned(skip_mm_profiling=True)
    assert audio is not None
    assert planned() - unprofiled == encoding_bytes(audio, "float32")
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(AudioEmbedder(audio, "float32"))))
    assert unprofiled == weights + (EncoderSizes.of_audio(audio).num_pages * 64 + 64) * 4 * 64
    assert audio_tokens.memory_bytes(EngineConfig(), replace(model_config, audio=None), None) == 0  # type: ignore[arg-type]
