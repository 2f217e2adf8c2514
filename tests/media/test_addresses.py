"""`MediaReader`: what each kind of address gives, and what is refused by name."""

import asyncio
import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.media.addresses import MediaReader
from jaxllm.media.media import Media
from jaxllm.media.options import MediaOptions

IMAGE = bytes(range(256))
TEXT = base64.b64encode(IMAGE).decode()


@dataclass(frozen=True)
class Ref:
    source: Any
    uuid: str | None = None
    name: str = "messages[0].content[1]"
    kind: str = "image"


def read(reader: MediaReader, *sources: Any) -> list[Any]:
    return [media.data for media in asyncio.run(reader.read([Ref(source) for source in sources]))]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    inside = tmp_path / "images"
    (inside / "more").mkdir(parents=True)
    (inside / "more" / "a b.png").write_bytes(IMAGE)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    os.mkfifo(inside / "pipe.png")
    return inside


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:image/jpeg;charset=utf-8;BASE64,{TEXT}",
        f"data:;base64,{TEXT[:100]}\n{TEXT[100:]}\r\n",
    ],
)
def test_data_urls_hold_their_bytes(url: str) -> None:
    assert read(MediaReader(MediaOptions()), url) == [IMAGE]


def test_base64_is_decoded_in_pieces_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.media.addresses.PIECE_CHARACTERS", 8)
    reader = MediaReader(MediaOptions())
    for length in range(1, 40):
        assert read(reader, f"data:;base64,{base64.b64encode(IMAGE[:length]).decode()}") == [IMAGE[:length]]
    for wrong in ("AAAAAA==AAAA", "AAAA=AAA", "AAAAAAAA=", "AAAAAAAAA", "AAAAAAAAA==="):
        with pytest.raises(InvalidRequestError, match="not valid base64"):
            read(reader, f"data:;base64,{wrong}")


def test_items_without_an_address_are_passed_on_with_uuid_and_name() -> None:
    item = object()
    (first, second) = MediaReader(MediaOptions()).read_now([Ref(item, "u", "a"), Ref(None, "u", "b")])
    assert (first.kind, first.data, first.uuid, first.name) == ("image", item, "u", "a") and second.data is None


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("data:image/png,abc", "without base64"),
        ("data:image/png;base64", "without base64"),
        ("data:image/png;base64,", "empty image"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64,AAAÄ", "not valid base64"),
        (f"data:image/png;base64,{'A' * 2000}", "more than 1000 bytes"),
        (TEXT, "no address of an image"),
        ("ftp://host/a.png", "no address of an image"),
        ("", "no address of an image"),
        ("http://host/a.png", "--allowed-media-domains"),
        ("file:///etc/passwd", "--allowed-local-media-path"),
    ],
)
def test_other_addresses_are_refused_by_name(url: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        read(MediaReader(MediaOptions(mm_max_image_bytes=1000)), url)
    assert caught.value.param == Ref("").name and len(str(caught.value)) < 300


def test_files_below_the_directory_are_read(directory: Path) -> None:
    reader = MediaReader(MediaOptions(allowed_local_media_path=str(directory)))
    assert read(reader, f"file://{directory}/more/a%20b.png", f"file://localhost{directory}/more/a b.png") == [IMAGE] * 2


@pytest.mark.parametrize(
    "path", ["../secret.png", "link.png", "pipe.png", "more", "missing.png", "more/%00", "%2e%2e/secret.png"]
)
def test_files_elsewhere_and_other_things_are_not(directory: Path, path: str) -> None:
    with pytest.raises(InvalidRequestError, match="no readable file below --allowed-local-media-path") as caught:
        read(MediaReader(MediaOptions(allowed_local_media_path=str(directory))), f"file://{directory}/{path}")
    assert str(directory) not in str(caught.value)


def test_files_and_hosts_have_limits(directory: Path) -> None:
    reader = MediaReader(MediaOptions(allowed_local_media_path=str(directory), mm_max_image_bytes=255))
    with pytest.raises(InvalidRequestError, match="more than 255 bytes"):
        read(reader, f"file://{directory}/more/a%20b.png")
    with pytest.raises(InvalidRequestError, match="no readable file"):
        read(reader, f"file://host{directory}/more/a%20b.png")


def test_scripts_read_inside_of_an_event_loop_too() -> None:
    async def run() -> list[Any]:
        return MediaReader(MediaOptions()).read_now([Ref(f"data:;base64,{TEXT}")])

    assert asyncio.run(run())[0].data == IMAGE


def test_files_of_a_request_share_a_limit(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.media.addresses.MAX_FILE_BYTES", 2 * len(IMAGE))
    fetched: list[int] = []
    reader = MediaReader(MediaOptions(allowed_local_media_path=str(directory)), on_fetched=fetched.append)
    urls = [f"file://{directory}/more/a%20b.png", f"data:;base64,{TEXT}"] * 2
    assert read(reader, *urls) == [IMAGE] * 4
    assert fetched == [2 * len(IMAGE)], "data: URLs come with the request"
    with pytest.raises(InvalidRequestError, match="the files of this request have more than 512 bytes"):
        read(reader, *urls, urls[0])


def test_frames_are_counted_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.media.addresses.MAX_FRAMES", 3)
    reader = MediaReader(MediaOptions())

    def frames(count: int) -> list[Media]:
        return reader.read_now([Ref("data:video/jpeg;base64," + ",".join(["AAAA"] * count), kind="video")])

    assert frames(3)[0].data == [bytes(3)] * 3
    monkeypatch.setattr("jaxllm.media.addresses._from_base64", lambda text: pytest.fail("it is decoded"))
    with pytest.raises(InvalidRequestError, match="more than 3 frames"):
        frames(4)
