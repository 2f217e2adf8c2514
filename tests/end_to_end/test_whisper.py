"""Whisper in whole engines against what transformers computed (tests/goldens/whisper/audio.json), however requests share steps."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, SamplingParams
from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.layers.build import build_audio_encoder
from jaxllm.loaders.encoder import load_encoder
from jaxllm.media.features import log_mel, pack
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.request import EngineCoreRequest, PromptItem
from tests.helpers import engines, whisper_checkpoint
from tests.helpers.goldens import FOLDER
from tests.helpers.slow import slow_except

GOLDEN = json.loads((FOLDER / "whisper" / "audio.json").read_text(encoding="utf-8"))

TRITON = {"attention_implementation": "triton", "kernel_check": "off"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_checkpoint.write(tmp_path_factory.mktemp("whisper") / "model", **GOLDEN["checkpoint"])


@pytest.fixture(scope="module")
def programs() -> engines.SharedPrograms:
    return engines.SharedPrograms()


@pytest.fixture
def make_core(directory: Path, programs: engines.SharedPrograms) -> Iterator[Any]:
    with programs.engines({**engines.SMALL, "model": str(directory), "dtype": "float32", "token_buckets": (16, 112)}) as make:
        yield make


def requests(core: EngineCore, *, copies: int = 1) -> list[EngineCoreRequest]:
    """The golden's prompts."""
    made = []
    for number, result in enumerate(GOLDEN["results"] * copies):
        features = log_mel(whisper_checkpoint.clip(*result["clip"]), core.model_config.audio)
        item = PromptItem("audio", b"%d" % number, 0, 1, pack(features))
        request = engines.request(f"{number}", result["prompt"], max_tokens=64, logprobs=0)
        made.append(replace(request, items=(item,)))
    return made


def check(core: EngineCore, asked: list[EngineCoreRequest]) -> None:
    found = engines.run(core, asked)
    assert len(found) == len(asked)
    for name, answer in found.items():
        result = GOLDEN["results"][int(name) % len(GOLDEN["results"])]
        assert answer.tokens == result["tokens"]
        np.testing.assert_allclose(answer.token_logprobs.logprobs[:, 0], result["logprobs"], atol=1e-4)


@pytest.mark.parametrize("attention", ["xla", "triton"])
@pytest.mark.slow
def test_the_encoder_computes_what_transformers_does(directory, attention) -> None:
    config = load_model_config(directory)
    encoder = build_audio_encoder(config)
    state = load_encoder(config, encoder, config.audio, directory, mesh=make_mesh(1))
    features = log_mel(whisper_checkpoint.clip(*GOLDEN["results"][0]["clip"]), config.audio)
    found = nnx.merge(nnx.graphdef(encoder), state)(features, attention=attention, interpret=True)
    np.testing.assert_allclose(found, GOLDEN["encoded"], atol=1e-5)


@pytest.mark.parametrize("options", slow_except([], [{"tensor_parallel_size": 2}, {"share_layers": True, **TRITON}]))
def test_engines_say_what_transformers_says(make_core, options) -> None:
    """More requests than rows, then one alone in a row that others have used."""
    core = make_core(**options)
    check(core, requests(core, copies=2))
    check(core, requests(core)[1:2])
    core.scheduler.check_integrity()


@pytest.mark.slow
def test_short_steps_and_preemption_change_nothing(make_core) -> None:
    core = make_core()
    engines.reschedule(core, max_num_batched_tokens=16)
    check(core, requests(core, copies=2))
    engines.reschedule(core, num_blocks=9)
    check(core, requests(core, copies=2))
    assert core.stats().num_preemptions > 0


def test_what_audio_excludes_is_refused(make_core, directory) -> None:
    for options in ({"pipeline_parallel_size": 2}, {"enable_prefix_caching": True}, {"enable_lora": True}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make_core(**options)


@pytest.mark.slow
def test_a_script_gives_samples_and_their_rate(directory) -> None:
    clip, result = whisper_checkpoint.clip(*GOLDEN["results"][0]["clip"]), GOLDEN["results"][0]
    small = {**engines.SMALL, "skip_tokenizer_init": False, "dtype": "float32"}
    llm = LLM(str(directory), **small)
    try:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
        text = "".join(("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"))
        prompts = [
            {"prompt": text, "multi_modal_data": {"audio": (clip, 16000)}},
            {"prompt_token_ids": result["prompt"], "multi_modal_data": {"audio": [clip]}},
            {"prompt": text, "multi_modal_data": {"audio": (whisper_checkpoint.clip(9), 16000)}},
        ]
        first, second, other = (output.outputs[0].token_ids for output in llm.generate(prompts, params))
        assert list(first) == list(second) == result["tokens"]
        assert list(other) != list(first), "the audio changes what is said"
        with pytest.raises(InvalidRequestError, match="has 0 clips of audio; this model needs 1"):
            llm.generate(text, params)
        with pytest.raises(InvalidRequestError, match="has 2.0 seconds, this model hears 1 at a time"):
            llm.generate({"prompt": text, "multi_modal_data": {"audio": np.zeros(32000, np.float32)}}, params)
    finally:
        llm.shutdown()
