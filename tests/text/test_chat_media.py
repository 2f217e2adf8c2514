from typing import Any

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.text.chat_media import MediaRef, split_media

URL = "data:image/png;base64,AAAA"
IMAGE = object()
TEXT = {"type": "text", "text": "what is it?"}


@pytest.mark.parametrize(
    ("part", "source", "uuid"),
    [
        ({"type": "image_url", "image_url": {"url": URL, "detail": "high"}}, URL, None),
        ({"type": "image_url", "image_url": URL, "uuid": "a"}, URL, "a"),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, None, "a"),
        ({"type": "input_image", "image_url": URL, "detail": "auto"}, URL, None),
        ({"image_url": {"url": URL}}, URL, None),
        ({"type": "image_pil", "image_pil": IMAGE}, IMAGE, None),
        ({"type": "image", "image": IMAGE}, IMAGE, None),
        ({"type": "image", "image": URL}, URL, None),
        ({"type": "image", "url": URL, "uuid": "a"}, URL, "a"),
        ({"type": "image_pil", "image_pil": None, "uuid": "a"}, None, "a"),
        ({"type": "image", "uuid": "a"}, None, "a"),
        ({"image_pil": IMAGE}, IMAGE, None),
    ],
)
def test_every_form_of_an_image_is_taken_out(part: dict[str, Any], source: Any, uuid: str | None) -> None:
    messages = [{"role": "system", "content": "hi"}, {"role": "user", "content": [TEXT, part], "name": "n"}]
    split, found = split_media(messages)
    assert split == [messages[0], {"role": "user", "content": [TEXT, {"type": "image"}], "name": "n"}]
    assert found == [MediaRef("image", source, uuid, "messages[1].content[1]")]
    assert messages[1]["content"] == [TEXT, part], "the caller's messages stay"


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, "data:audio/wav;base64,UklG"),
        ({"input_audio": {"data": "UklG", "format": "x;y,z"}}, "data:audio/x;y;base64,UklG"),
        ({"type": "audio_url", "audio_url": {"url": "file:///a.wav"}}, "file:///a.wav"),
        ({"type": "audio", "audio": b"RIFF"}, b"RIFF"),
        ({"type": "input_audio", "uuid": "mine"}, None),
    ],
)
def test_audio_in_all_its_forms_becomes_a_mark(part: dict[str, Any], source: Any) -> None:
    split, found = split_media([{"role": "user", "content": [part, TEXT]}])
    assert split[0]["content"][0] == {"type": "audio", "audio": ""}
    assert found == [MediaRef("audio", source, part.get("uuid"), "messages[0].content[0]")]


def test_images_keep_their_order_over_messages() -> None:
    images = [{"type": "image_url", "image_url": {"url": f"data:{number}"}} for number in range(3)]
    _, found = split_media([{"role": "user", "content": images[:2]}, {"role": "tool", "content": [TEXT, images[2]]}])
    assert [(ref.source, ref.name) for ref in found] == [
        ("data:0", "messages[0].content[0]"),
        ("data:1", "messages[0].content[1]"),
        ("data:2", "messages[1].content[1]"),
    ]


def test_what_is_no_item_stays_for_the_template_to_refuse() -> None:
    messages: list[Any] = [
        {"role": "user", "content": [TEXT, {"type": "audio_embeds", "audio_embeds": {}}, 3]},
        {"role": "user"},
        "hi",
    ]
    assert split_media(messages) == (messages, [])
    assert split_media("hi") == ("hi", [])  # type: ignore[arg-type, comparison-overlap]


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image_url"}, r"messages\[0\].content\[0\] has no image: image_url is missing"),
        ({"type": "image"}, "has no image: image is missing"),
        ({"type": "image", "path": "a.png"}, "has no image: image is missing"),
        ({"type": "image", "url": 3}, "has a url of type int, must be a string"),
        ({"type": "image_url", "image_url": {"url": 3}}, "has an image_url of type int, must be a string"),
        ({"type": "image_url", "image_url": URL, "uuid": 3}, "has the uuid 3, must be a string"),
        ({"type": "input_image", "file_id": "f"}, "has a file_id, but no images are kept here"),
        ({"type": "audio_url", "audio_url": {}}, "has no audio: audio_url is missing"),
        ({"type": "input_audio", "input_audio": "UklG"}, "has an input_audio of type str, must be an object"),
        ({"type": "input_audio", "input_audio": {"data": b"x"}}, "whose data or format is no string"),
    ],
)
def test_malformed_images_are_named(part: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        split_media([{"role": "user", "content": [part]}])
    assert caught.value.param == "messages[0].content[0]"
