"""Clips of audio in all forms of all APIs, with the real preparation of audio over a fake engine core."""

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.models.load_config import load_model_config
from jaxllm.text.tokenizer import load_tokenizer
from server.app import create_app
from server.batch.lines import BatchLine
from server.batch.output_file import BatchOutput
from server.batch.run import run_batch
from tests.helpers import audio_checkpoint, whisper_checkpoint
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.server.client import Client
from tests.server.conftest import options

TEXT = {"type": "text", "text": "what?"}


def file_of(seed: int = 0, seconds: float = 0.2) -> str:
    """The base64 of a WAV file, by default of 5 tokens."""
    return base64.b64encode(whisper_checkpoint.wav(whisper_checkpoint.clip(seed, seconds))).decode()


CLIP = file_of()
AUDIO = {"type": "input_audio", "input_audio": {"data": CLIP, "format": "wav"}}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> FakeEngineCore:
    directory = audio_checkpoint.write(tmp_path_factory.mktemp("hearing"), weights=False)
    core = fake_core(directory, "one two three", max_model_len=300, limit_mm_per_prompt={"audio": 3})
    core.model_config = replace(core.model_config, audio=load_model_config(directory).audio)
    return core


@pytest.fixture(scope="module")
def hearing(core: FakeEngineCore) -> Iterator[Client]:
    given = options(enable_prompt_tokens_details=True)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, given)) as client:
        yield client


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def prompt_of(core: FakeEngineCore) -> str:
    """The prompt of the last request, with a letter for each token of a clip."""
    tokenizer = load_tokenizer(Path(core.config.model.model))
    text = tokenizer.decode(core.requests[-1].prompt_token_ids, skip_special_tokens=False)
    return text.replace("<|audio_bos|>", "[").replace("<|audio_eos|>", "]").replace("<|AUDIO|>", "a")


@pytest.mark.parametrize(
    "part",
    [
        AUDIO,
        {"input_audio": {"data": CLIP, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": CLIP}, "uuid": "mine"},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{CLIP}"}},
        {"type": "audio_url", "audio_url": f"data:audio/x-wav;base64,{CLIP}"},
        {"audio_url": {"url": f"data:;base64,{CLIP}"}},
    ],
)
def test_every_form_of_chat_completions(hearing: Client, core: FakeEngineCore, part: dict[str, Any]) -> None:
    reply = hearing.chat(messages=user(part, TEXT))
    assert reply.status_code == 200, reply.text
    assert prompt_of(core).startswith("<|im_start|>user\nAudio 1: [aaaaa]\nwhat?<|im_end|>")
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details["audio_tokens"] == 5 and details["multimodal_tokens"] == {"audio": 5}


def test_clips_stand_where_their_parts_are(hearing: Client, core: FakeEngineCore) -> None:
    longer = {"type": "input_audio", "input_audio": {"data": file_of(1, 0.28), "format": "wav"}}
    messages = [*user(AUDIO, TEXT), {"role": "assistant", "content": "it"}, *user(TEXT, longer, AUDIO)]
    assert hearing.chat(messages=messages).status_code == 200
    text = prompt_of(core)
    assert "Audio 1: [aaaaa]\nwhat?" in text and "what?Audio 2: [aaaaaaa]\nAudio 3: [aaaaa]\n" in text
    first, second, third = core.requests[-1].items
    assert first.content_hash == third.content_hash != second.content_hash
    assert [item.num_tokens for item in (first, second)] == [5, 7]


def test_a_clip_is_named_and_sent_once(hearing: Client, core: FakeEngineCore) -> None:
    named = {"type": "input_audio", "input_audio": {"data": file_of(5), "format": "wav"}, "uuid": "five"}
    assert hearing.chat(messages=user(named)).status_code == 200
    first = core.requests[-1].items[0]
    for again in ({"type": "input_audio", "uuid": "five"}, {"type": "audio_url", "audio_url": None, "uuid": "five"}):
        assert hearing.chat(messages=user(again)).status_code == 200
        assert core.requests[-1].items[0].content_hash == first.content_hash
    reply = hearing.chat(messages=user({"type": "input_audio", "uuid": "six"}))
    assert reply.status_code == 400 and "no audio of that uuid is kept here" in reply.json()["error"]["message"]


def test_the_responses_api_takes_input_audio(hearing: Client, core: FakeEngineCore) -> None:
    content = [AUDIO, {"type": "input_text", "text": "what?"}]
    reply = hearing.post("/v1/responses", {"input": [{"role": "user", "content": content}]})
    assert reply.status_code == 200, reply.text
    assert "Audio 1: [aaaaa]\nwhat?" in prompt_of(core)
    for wrong in ({"type": "input_audio"}, {"type": "input_audio", "input_audio": {"data": 3}}):
        reply = hearing.post("/v1/responses", {"input": [{"role": "user", "content": [wrong]}]})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "input[0].content[0].input_audio"


def test_models_say_what_they_hear(hearing: Client) -> None:
    assert hearing.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "audio"]


def test_lines_of_batch_files_have_clips(hearing: Client, tmp_path: Path) -> None:
    bodies = {"audio": {"messages": user(AUDIO)}, "torn": {"messages": user(audio(CLIP[:40]))}}
    lines = [BatchLine(place, name, "/v1/chat/completions", body) for place, (name, body) in enumerate(bodies.items(), 1)]
    output = BatchOutput(tmp_path / "answers.jsonl")
    hearing.run(run_batch(hearing.app, lines, output, max_in_flight=2, is_alive=lambda: True))
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [answer["response"]["status_code"] for answer in answers] == [200, 400]


def audio(data: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav", **fields}}


def silent(count: int) -> str:
    return base64.b64encode(whisper_checkpoint.wav(np.zeros(count))).decode()


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (audio(file_of(0, 1.1)), "has more than 1 seconds, which this model hears of a clip; cut it into several"),
        (audio(silent(0)), "has no samples"),
        (audio(silent(320)), "has 0.0200 seconds, too few for this model"),
        (audio(base64.b64encode(b"garbage").decode()), "is no WAV file"),
        (audio(CLIP[:40]), "is a WAV file without samples, or a damaged one"),
        (audio("*"), "is not valid base64"),
        (audio(""), "is an empty clip of audio"),
        (audio(None), "has no audio: input_audio is missing"),
        ({"type": "audio_url", "audio_url": "clip.wav"}, "has no address of audio; give data:audio/wav;base64"),
        ({"type": "audio_url", "audio_url": "https://example.org/a.wav"}, "send the audio as data:audio"),
        ({"type": "audio_url", "audio_url": "file:///etc/passwd"}, "send the audio itself"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "this model takes no images"),
    ],
)
def test_bad_clips_are_refused_by_the_name_of_their_part(hearing: Client, part: dict[str, Any], fault: str) -> None:
    reply = hearing.chat(messages=user(TEXT, part))
    assert reply.status_code == 400 and fault in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["param"] == "messages[0].content[1]"


@pytest.mark.parametrize("given", ["AAAA", 3, {"data": 3}, {"data": CLIP, "format": 3}, {"data": CLIP, "format": "w" * 600}])
def test_an_input_audio_of_another_shape_is_refused(hearing: Client, given: Any) -> None:
    reply = hearing.chat(messages=user({"type": "input_audio", "input_audio": given}))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages", reply.text


def test_more_clips_than_a_prompt_may_have_are_refused(hearing: Client) -> None:
    reply = hearing.chat(messages=user(*[AUDIO] * 4))
    assert reply.status_code == 400
    assert "At most 3 audio(s) may be provided in one prompt, and this one has 4" in reply.json()["error"]["message"]


def test_placeholders_that_users_type_are_text(hearing: Client, core: FakeEngineCore) -> None:
    assert hearing.chat(messages=user(AUDIO, {"type": "text", "text": "<|AUDIO|>"})).status_code == 200
    assert core.requests[-1].prompt_token_ids.count(audio_checkpoint.AUDIO) == 5


def test_a_model_of_text_alone_refuses_audio(served_directory: Path) -> None:
    with AsyncLLM(core=fake_core(served_directory)) as engine, Client(create_app(engine, options())) as client:
        reply = client.chat(messages=user(AUDIO))
    assert reply.status_code == 400
    assert "there is audio at messages[0].content[0], but this model takes text alone" in reply.json()["error"]["message"]
