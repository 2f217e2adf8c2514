"""--image and /image, over a fake engine core whose model takes the word "ten" for a placeholder."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm import request_processor
from jaxllm.cli.main import main
from jaxllm.request import EngineCoreRequest
from jaxllm.text.tokenizer import load_tokenizer
from tests.cli import conftest
from tests.helpers.stand_in_media import StandInProcessor, stand_in_media
from tests.helpers.stub_server import Stub


@pytest.fixture
def ten(words_directory: Path) -> int:
    (ten,) = load_tokenizer(words_directory).encode("ten", add_special_tokens=False)
    return ten


@pytest.fixture
def seeing(opened: Any, ten: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that sees images, and says nothing."""
    monkeypatch.setattr(request_processor, "PromptMedia", lambda *_: stand_in_media(StandInProcessor(ten, "ten ")))
    monkeypatch.setattr(conftest, "backwards", lambda request: [request.eos_token_ids[0]])
    return opened


@pytest.fixture
def stub(shared_stub: Stub) -> Stub:
    shared_stub.reset()
    return shared_stub


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path, content in zip(paths, (b"\1\2\3", b"\4"), strict=True):
        path.write_bytes(content)
    return list(map(str, paths))


def images_of(request: EngineCoreRequest) -> list[bytes]:
    return [item.payload for item in request.items]


def test_generate_puts_images_before_each_prompt(seeing: Any, ten: int, files: list[str]) -> None:
    first, second = files
    assert main(["generate", "-q", "--image", first, "--image", second, "one", "two"]) == 0
    assert [images_of(request) for request in seeing.core.requests] == [[b"\1\2\3", b"\4"]] * 2
    assert seeing.core.requests[0].prompt_token_ids[1:5] == [ten] * 4


def test_generate_puts_images_into_messages(seeing: Any, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--chat", "--json", "--image", files[0], "one"]) == 0
    assert images_of(seeing.core.requests[0]) == [b"\1\2\3"]
    assert json.loads(capsys.readouterr().out)["messages"] == [{"role": "user", "content": "one"}], "images are not repeated"


def test_a_conversation_sends_images_with_the_next_message(
    seeing: Any, files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = files
    saved = str(tmp_path / "talk.json")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"one\n/image {second}\ntwo\nthree\n/save {saved}\n"))
    assert main(["chat", "-q", "--image", first]) == 0
    requests = seeing.core.requests
    assert [images_of(request) for request in requests] == [[b"\1\2\3"], [b"\1\2\3", b"\4"], [b"\1\2\3", b"\4"]]
    monkeypatch.setattr("sys.stdin", io.StringIO("four\n"))
    assert main(["chat", "-q", "--load", saved]) == 0
    assert images_of(seeing.core.requests[-1]) == [b"\1\2\3", b"\4"]


def test_images_go_to_a_server_as_data_urls(stub: Stub, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", stub.url, "-q", "--image", files[1], "--quick", "hi", "--max-tokens", "1"]) == 0
    url = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,BA=="}}
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": [url, {"type": "text", "text": "hi"}]}]


def test_videos_go_to_a_server_as_data_urls(stub: Stub, tmp_path: Path) -> None:
    clip = tmp_path / "a.mp4"
    clip.write_bytes(b"\4")
    assert main(["chat", "--url", stub.url, "-q", "--video", str(clip), "--quick", "hi", "--max-tokens", "1"]) == 0
    url = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,BA=="}}
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": [url, {"type": "text", "text": "hi"}]}]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("generate --image missing.png hi", "cannot read the image missing.png: No such file"),
        ("generate --image {image} --file {lines}", "--image takes prompts of text; write images into messages"),
        ("generate --image {image} hi", "takes text alone, and no images"),
        ("chat --image {image} --quick hi", "takes text alone, and no images"),
        ("chat --image missing.png --quick hi", "cannot read the image missing.png: No such file"),
        ("generate --video missing.mp4 hi", "cannot read the video missing.mp4: No such file"),
        (
            "generate --video {image} --file {lines}",
            "--video takes prompts of text; write videos into messages as parts of type video_url",
        ),
        ("generate --video {image} hi", "takes text alone, and no videos"),
    ],
)
def test_images_that_cannot_be_sent_are_an_error(
    opened: Any, files: list[str], tmp_path: Path, command: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert main(command.format(image=files[0], lines=lines).split()) != 0
    assert told in capsys.readouterr().err
