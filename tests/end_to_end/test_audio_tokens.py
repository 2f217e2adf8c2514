"""Qwen 2 Audio in whole engines against what transformers computed (tests/goldens/qwen2_audio/audio.json), however requests share steps."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.layers.build import build_audio_encoder
from jaxllm.loaders.encoder import load_encoder
from jaxllm.media import Media, MediaOptions
from jaxllm.media.audio_tokens import AudioTokenProcessor
from jaxllm.media.features import unpack_part
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.request import EngineCoreRequest
from tests.helpers import audio_checkpoint, engines, whisper_checkpoint
from tests.helpers.goldens import FOLDER
from tests.helpers.slow import slow_except

GOLDEN = json.loads((FOLDER / "qwen2_audio" / "audio.json").read_text(encoding="utf-8"))
CLIPS = [whisper_checkpoint.clip(*clip) for clip in GOLDEN["clips"]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audio_checkpoint.write(tmp_path_factory.mktemp("qwen2_audio") / "model", **GOLDEN["checkpoint"])


@pytest.fixture(scope="module")
def programs() -> engines.SharedPrograms:
    return engines.SharedPrograms()


@pytest.fixture
def make_core(directory: Path, programs: engines.SharedPrograms) -> Iterator[Any]:
    small = {"model": str(directory), "dtype": "float32", "max_model_len": 160, "token_buckets": (16, 160)}
    with programs.engines({**engines.SMALL, **small}) as make:
        yield make


def requests(core: EngineCore, *, copies: int = 1, **params: Any) -> list[EngineCoreRequest]:
    """The golden's prompts, with clips and without."""
    processor = AudioTokenProcessor(core.model_config.audio, MediaOptions())
    made = []
    for number, result in enumerate(GOLDEN["results"] * copies):
        clips = [processor.process(Media("audio", CLIPS[clip])) for clip in result["clips"]]
        token_ids, items = processor.expand(result["prompt"], clips)
        request = engines.request(f"{number}", token_ids, max_tokens=64, logprobs=0, **{"prompt_logprobs": 0, **params})
        made.append(replace(request, items=items))
    return made


def check(core: EngineCore, asked: list[EngineCoreRequest]) -> None:
    found = engines.run(core, asked)
    assert len(found) == len(asked)
    for name, answer in found.items():
        result = GOLDEN["results"][int(name) % len(GOLDEN["results"])]
        assert answer.tokens == result["tokens"]
        np.testing.assert_allclose(answer.token_logprobs.logprobs[:, 0], result["logprobs"], atol=1e-4)
        if answer.prompt_logprobs is not None:
            np.testing.assert_allclose(answer.prompt_logprobs.logprobs[:, 0], result["prompt_logprobs"], atol=1e-4)


@pytest.mark.slow
def test_the_encoder_computes_what_transformers_does(directory) -> None:
    """In the program of the longest clip, with Triton's kernel. Engines encode in the smallest that holds a clip, by XLA."""
    config = load_model_config(directory)
    audio = config.audio
    encoder = build_audio_encoder(config)
    state = load_encoder(config, encoder, audio, directory, mesh=make_mesh(1))
    loaded = nnx.merge(nnx.graphdef(encoder), state)
    for clip, expected in GOLDEN["embeddings"].items():
        processed = AudioTokenProcessor(audio, MediaOptions()).process(Media("audio", CLIPS[int(clip)]))
        features, num_frames = unpack_part(processed.payload, audio)
        size = audio.num_positions
        padded = np.full((2 * size, audio.num_bins), 7, np.float32)  # whatever is behind the clip changes nothing
        padded[: len(features)] = features
        found = loaded.embeddings(padded, np.int32(audio.positions_of(num_frames)), attention="triton", interpret=True)
        assert processed.num_tokens == len(expected) == GOLDEN["counts"][int(clip)]
        np.testing.assert_allclose(found[: len(expected)], expected, atol=1e-5)


OPTIONS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 2, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8},
    {"share_layers": True, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1}},
    {"disable_chunked_mm_input": True, "max_num_batched_tokens": 40, "token_buckets": (16, 40)},
]


@pytest.mark.parametrize("options", slow_except([], OPTIONS))
def test_engines_say_what_transformers_says(make_core, options) -> None:
    """More requests than rows, those with the same clips among them. Without options: the tests below."""
    core = make_core(**options)
    check(core, requests(core, copies=2))
    core.scheduler.check_integrity()


@pytest.mark.slow
def test_short_steps_and_preemption_change_nothing(make_core) -> None:
    core = make_core()
    engines.reschedule(core, max_num_batched_tokens=16)
    check(core, requests(core, copies=2))
    engines.reschedule(core, num_blocks=14)
    check(core, requests(core, copies=2))
    assert core.stats().num_preemptions > 0


@pytest.mark.slow
def test_equal_beginnings_are_computed_once_and_equal_clips_encoded_once(make_core) -> None:
    core = make_core(enable_prefix_caching=True)
    plain = requests(core, prompt_logprobs=None)
    check(core, plain)
    encoded = core.stats().num_encoded_patches
    check(core, plain)
    stats = core.stats()
    assert stats.prefix_cache_hits > 0 and stats.num_encoded_patches == encoded


@pytest.mark.torch
def test_other_weights_and_lengths_equal_transformers_itself(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    from scripts.make_audio_token_golden import Reference

    directory = audio_checkpoint.write(tmp_path, seed=77)
    lengths = [(number, seconds) for number, seconds in enumerate((0.99, 0.5, 0.49, 0.25, 0.2401, 0.04, 0.03))]
    options = {**engines.SMALL, "model": str(directory), "dtype": "float32", "max_model_len": 160, "token_buckets": (16, 160)}
    core = EngineCore(EngineConfig.from_options(**options))
    processor = AudioTokenProcessor(core.model_config.audio, MediaOptions())
    clips = [processor.process(Media("audio", whisper_checkpoint.clip(*clip))) for clip in lengths]
    prompt = [token for number in range(len(clips)) for token in (number, audio_checkpoint.AUDIO, 7)]
    token_ids, items = processor.expand(prompt, clips)
    try:
        asked = replace(engines.request("a", token_ids, max_tokens=1, prompt_logprobs=0), items=items)
        found = engines.run(core, [asked])["a"].prompt_logprobs.logprobs[:, 0]
    finally:
        core.shutdown()
    with torch.no_grad():
        expected = Reference(directory, lengths).logprobs(token_ids, range(len(lengths))).numpy()
    np.testing.assert_allclose(found, [row[token] for row, token in zip(expected, token_ids[1:], strict=False)], atol=1e-4)


def test_what_audio_excludes_is_refused(make_core) -> None:
    for options in ({"pipeline_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} is set, but Qwen2Audio.*language_model_only"):
            make_core(**options)
    with pytest.raises(ConfigError, match="all 25 tokens of a clip, but max_num_batched_tokens is 16"):
        make_core(disable_chunked_mm_input=True, max_num_batched_tokens=16)


@pytest.mark.slow
def test_scripts_give_clips_in_prompts_and_chats(directory) -> None:
    llm = LLM(str(directory), **{**engines.SMALL, "skip_tokenizer_init": False, "dtype": "float32", "max_model_len": 160})
    try:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        result = GOLDEN["results"][1]
        clip = CLIPS[result["clips"][0]]
        placeholder, other = "<|audio_bos|><|AUDIO|><|audio_eos|>", (CLIPS[0], 16000)
        chat = [{"type": "audio", "audio": (clip, 16000)}, {"type": "text", "text": "what?"}]
        text = f"<|im_start|>user\nAudio 1: {placeholder}\nwhat?<|im_end|>\n<|im_start|>assistant\n"
        prompts = [
            {"prompt_token_ids": result["prompt"], "multi_modal_data": {"audio": clip}},
            {"prompt": text, "multi_modal_data": {"audio": [(clip, 16000)]}},
            {"prompt": f"{placeholder} and {placeholder}", "multi_modal_data": {"audio": [other, (clip, 16000)]}},
            {"prompt": f"{placeholder} and {placeholder}", "multi_modal_data": {"audio": [(clip, 16000), other]}},
        ]
        golden, plain, first, second = (list(output.outputs[0].token_ids) for output in llm.generate(prompts, params))
        assert golden == result["tokens"][:8]
        assert list(llm.chat([{"role": "user", "content": chat}], params)[0].outputs[0].token_ids) == plain
        assert first != second, "the order of clips changes what is said"
        with pytest.raises(InvalidRequestError, match=r"the prompt has 1 audio placeholder\(s\) .* and 2 clip of audio\(s\)"):
            llm.generate({"prompt": placeholder, "multi_modal_data": {"audio": [clip, clip]}}, params)
        with pytest.raises(InvalidRequestError, match="has more than 1 seconds, which this model hears of a clip; cut it"):
            llm.generate({"prompt": placeholder, "multi_modal_data": {"audio": np.zeros(16001, np.float32)}}, params)
    finally:
        llm.shutdown()
