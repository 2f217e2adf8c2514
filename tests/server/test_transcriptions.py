"""The routes of audio, over an engine with a tiny random Whisper."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.media import MediaOptions
from jaxllm.media.audio_files import read_audio
from jaxllm.media.features import log_mel
from jaxllm.models.load_config import load_model_config
from server.app import create_app
from tests.helpers import engines, whisper_checkpoint
from tests.server.client import Client
from tests.server.conftest import options

PATH, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"
BOUNDARY = "limit"
CHECKPOINT: dict[str, Any] = {"seed": 3, "gain": 3.5}


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = whisper_checkpoint.write(tmp_path_factory.mktemp("whisper") / "model", **CHECKPOINT)
    small: dict[str, Any] = {**engines.SMALL, "skip_tokenizer_init": False, "dtype": "float32", "model": str(directory)}
    config = EngineConfig.from_options(**small, mm_max_audio_seconds=5)
    with AsyncLLM(config) as engine, Client(create_app(engine, options())) as client:
        yield client


NO_SPEECH_PROB = 0.00069955
"""Of SHORT, as transformers computes it."""
SHORT, LONG = whisper_checkpoint.wav(whisper_checkpoint.clip(0)), whisper_checkpoint.wav(whisper_checkpoint.clip(1, 2.5))


def form(file: bytes | None = SHORT, **fields: Any) -> bytes:
    """A body with a file and fields; a list is sent in several parts, with [] behind its name."""
    parts = []
    for name, value in fields.items():
        for each in value if isinstance(value, list) else [value]:
            label = f"{name}[]" if isinstance(value, list) else name
            parts.append(f'Content-Disposition: form-data; name="{label}"\r\n\r\n{each}'.encode())
    if file is not None:
        head = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        parts.append(head + file)
    limit = f"--{BOUNDARY}".encode()
    return b"".join(limit + b"\r\n" + part + b"\r\n" for part in parts) + limit + b"--\r\n"


def post(client: Client, path: str = PATH, file: bytes | None = SHORT, **fields: Any) -> Any:
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    return client.post(path, content=form(file, **{"max_completion_tokens": 8, **fields}), headers=headers)


@pytest.mark.torch
def test_transformers_says_so_too(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    directory = whisper_checkpoint.write(tmp_path / "model", **CHECKPOINT)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    audio = load_model_config(directory).audio
    assert audio is not None
    features = log_mel(read_audio(SHORT, "a", MediaOptions()), audio).T[None]
    with torch.no_grad():
        start = torch.tensor([[whisper_checkpoint.START]])
        logits = model(input_features=torch.tensor(features), decoder_input_ids=start).logits[0, 0]
    np.testing.assert_allclose(torch.softmax(logits, -1)[whisper_checkpoint.NO_SPEECH], NO_SPEECH_PROB, rtol=1e-4)


@pytest.mark.slow
class TestTranscriptions:
    def test_json_and_text_say_the_same(self, hearing: Client) -> None:
        reply = post(hearing, language="en")
        assert reply.status_code == 200, reply.text
        found = reply.json()
        assert found["usage"] == {"type": "duration", "seconds": 1} and found["text"]
        assert post(hearing, language="en", response_format="text").text == found["text"] + "\n"
        assert post(hearing, language="de").json()["text"] != found["text"]
        assert post(hearing, TRANSLATIONS, language="de").json()["text"] != post(hearing, language="de").json()["text"]

    def test_a_language_that_is_not_said_is_heard(self, hearing: Client) -> None:
        found = post(hearing, response_format="verbose_json").json()
        assert found["language"] in ("en", "de")
        assert found["text"] == post(hearing, response_format="verbose_json", language=found["language"]).json()["text"]

    def test_verbose_json_and_subtitles_have_times(self, hearing: Client) -> None:
        found = post(
            hearing, file=LONG, response_format="verbose_json", language="en", timestamp_granularities=["segment"]
        ).json()
        assert found["duration"] == 2.5 and found["task"] == "transcribe" and found["usage"]["seconds"] == 3
        segments = found["segments"]
        assert len(segments) >= 3, "one for each clip of a second at least"
        for before, after in zip(segments, segments[1:], strict=False):
            assert 0 <= before["start"] <= before["end"] <= after["start"]
        assert found["text"] == "".join(each["text"] for each in segments).strip()
        srt = post(hearing, file=LONG, response_format="srt", language="en").text
        assert srt.startswith("1\n00:00:00,000 --> 00:00:") and srt.count("-->") == len(segments)
        assert post(hearing, file=LONG, response_format="vtt", language="en").text.startswith("WEBVTT\n\n00:00:00.000 --> ")

    def test_segments_say_how_likely_it_is_that_nobody_speaks(self, hearing: Client) -> None:
        """The probability of <|nospeech|> behind <|startoftranscript|>, of each clip, whatever is asked for else."""
        fields = {"response_format": "verbose_json", "language": "en"}
        probs = [each["no_speech_prob"] for each in post(hearing, **fields).json()["segments"]]
        np.testing.assert_allclose(probs, NO_SPEECH_PROB, rtol=1e-3)
        clips = [each["no_speech_prob"] for each in post(hearing, file=LONG, **fields).json()["segments"]]
        assert len(set(clips)) == 3 and all(0 < prob < 1 for prob in clips)
        assert post(hearing, prompt="ab", **fields).json()["segments"][0]["no_speech_prob"] != probs[0], "earlier text counts"

    @pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits"])
    def test_logits_are_not_reported_as_probabilities(self, tmp_path: Path, mode: str) -> None:
        directory = whisper_checkpoint.write(tmp_path / "model", **CHECKPOINT)
        small: dict[str, Any] = {**engines.SMALL, "skip_tokenizer_init": False, "dtype": "float32", "model": str(directory)}
        config = EngineConfig.from_options(**small, logprobs_mode=mode)
        with AsyncLLM(config) as engine, Client(create_app(engine, options())) as client:
            segments = post(client, response_format="verbose_json", language="en").json()["segments"]
        probs = [each.get("no_speech_prob") for each in segments]
        assert probs and probs == (
            [None] * len(probs) if mode == "raw_logits" else pytest.approx([NO_SPEECH_PROB] * len(probs))
        )

    def test_a_stream_gives_the_same_text(self, hearing: Client) -> None:
        whole = post(hearing, file=LONG, language="en").json()["text"]
        lines = post(hearing, file=LONG, language="en", stream="true", stream_include_usage="true").text.strip().split("\n\n")
        assert lines.pop() == "data: [DONE]"
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        usage = chunks.pop()
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks).strip() == whole
        assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == ["length"]

    def test_other_rates_are_resampled(self, hearing: Client) -> None:
        twice = np.repeat(whisper_checkpoint.clip(0), 2)
        assert post(hearing, file=whisper_checkpoint.wav(twice, 32000), language="en").json()["usage"]["seconds"] == 1

    @pytest.mark.parametrize(
        ("fields", "status", "told", "param"),
        [
            ({"file": None}, 400, "file is missing", "file"),
            ({"file": b""}, 400, "is empty", "file"),
            ({"file": b"ID3 and so on"}, 400, "no WAV file", "file"),
            ({"file": SHORT[:30]}, 400, "damaged", "file"),
            ({"file": whisper_checkpoint.wav(np.zeros(90000))}, 400, "has 5.6 seconds, at most 5", "file"),
            ({"language": "xx"}, 400, "must be one of de, en", "language"),
            ({"response_format": "xml"}, 400, "response_format", "response_format"),
            ({"response_format": "srt", "stream": "true"}, 400, "srt is not streamed", "response_format"),
            ({"timestamp_granularities": ["word"]}, 400, "use segment", "timestamp_granularities"),
            ({"timestamp_granularities": ["segment"]}, 400, "needs the response_format verbose_json", "timestamp_granularities"),
            ({"temperature": "hot"}, 400, "temperature", "temperature"),
            ({"temperature": "-1"}, 400, "temperature", "temperature"),
            ({"model": "other"}, 404, "does not exist", "model"),
            ({"include": ["logprobs"]}, 400, "include", "include"),
        ],
    )  # fmt: skip
    def test_wrong_requests_are_named(self, hearing: Client, fields: Any, status: int, told: str, param: str) -> None:
        reply = post(hearing, **fields)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (status, param), error
        assert told in error["message"]

    def test_bodies_of_another_kind_are_refused(self, hearing: Client) -> None:
        assert hearing.post(PATH, {"file": "a"}).status_code == 415

    def test_chats_and_completions_need_audio(self, hearing: Client) -> None:
        reply = hearing.post("/v1/completions", {"prompt": "hi"})
        assert reply.status_code == 400 and "needs 1" in reply.json()["error"]["message"]


def test_models_that_do_not_hear_have_no_such_routes(client: Client) -> None:
    assert post(client).status_code == 404
