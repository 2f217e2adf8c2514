"""Videos in chat completions, with the real preparation over a fake engine core."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jaxllm.async_llm import AsyncLLM
from server.app import create_app
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.seeing_core import data_url, file_of, seeing_core, write_seeing
from tests.server.client import Client
from tests.server.conftest import options

COLORS = ("red", "green", "blue")
STILL = {"type": "image_url", "image_url": {"url": data_url(file_of())}}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> FakeEngineCore:
    return seeing_core(write_seeing(tmp_path_factory.mktemp("seeing")), limit_mm_per_prompt={"video": 1})


@pytest.fixture(scope="module")
def seeing(core: FakeEngineCore) -> Iterator[Client]:
    given = options(enable_prompt_tokens_details=True)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, given)) as client:
        yield client


def part(url: Any, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **more}


def jpegs(*files: bytes) -> str:
    return "data:video/jpeg;base64," + ",".join(base64.b64encode(file).decode() for file in files)


FRAMES = jpegs(*(file_of(64, 32, color, "JPEG") for color in COLORS))


def ask(client: Client, *parts: Any) -> Any:
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]}
    return client.post("/v1/chat/completions", json=body)


def prompt_of(core: FakeEngineCore) -> str:
    from jaxllm.text.tokenizer import load_tokenizer

    text = load_tokenizer(Path(core.config.model.model)).decode(core.requests[-1].prompt_token_ids, skip_special_tokens=False)
    for token, letter in (("<|vision_start|>", "["), ("<|vision_end|>", "]"), ("<|image_pad|>", "i"), ("<|video_pad|>", "v")):
        text = text.replace(token, letter)
    return text


def test_frames_stand_in_the_prompt_behind_their_times(seeing: Client, core: FakeEngineCore) -> None:
    reply = ask(seeing, part(FRAMES), STILL)
    assert reply.status_code == 200, reply.text
    assert "<0.5 seconds>[vv]<2.0 seconds>[vv][ii]what?" in prompt_of(core).replace("  ", " ")
    assert [item.kind for item in core.requests[-1].items] == ["video", "video", "image"]
    assert reply.json()["usage"]["prompt_tokens_details"]["multimodal_tokens"] == {"video": 4, "image": 2}


def test_an_animation_is_a_video(seeing: Client, core: FakeEngineCore) -> None:
    first, *rest = (Image.new("RGB", (64, 32), color) for color in COLORS)
    stream = io.BytesIO()
    first.save(stream, "GIF", save_all=True, append_images=rest, duration=500)
    reply = ask(seeing, part(data_url(stream.getvalue(), "image/gif")))
    assert reply.status_code == 200, reply.text
    assert [item.grid for item in core.requests[-1].items] == [(1, 1, 2)] * 2


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ([part(jpegs(file_of()))], "has 1 frame(s), must have at least 2"),
        ([part(jpegs(file_of(), file_of(32, 32)))], "has a frame 1 of 32 x 32 pixels, its first has 64 x 32"),
        ([part(jpegs(file_of(), b""))], "is an empty picture"),
        ([part("data:video/jpeg;base64,abc*")], "is not valid base64"),
        ([part(data_url(b"no video", "video/mp4"))], "is a file of an unknown format"),
        ([part("frames")], "has no address of a video; give data:video/mp4;base64"),
        ([part("https://example.org/a.mp4")], "send the video as data:video"),
        ([part(FRAMES), part(FRAMES)], "At most 1 video(s) may be provided in one prompt, and this one has 2"),
    ],
)
def test_bad_videos_are_refused_by_the_name_of_their_part(seeing: Client, parts: list[Any], fault: str) -> None:
    reply = ask(seeing, *parts)
    assert reply.status_code == 400 and fault in reply.json()["error"]["message"], reply.text
    assert reply.json()["error"]["param"] == "messages[0].content[0]"


def test_a_model_of_text_alone_refuses_videos(served_directory: Path) -> None:
    with AsyncLLM(core=fake_core(served_directory)) as engine, Client(create_app(engine, options())) as client:
        reply = ask(client, part(FRAMES))
    assert reply.status_code == 400 and "there is a video at messages[0].content[0]" in reply.json()["error"]["message"]
