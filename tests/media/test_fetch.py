"""`MediaFetcher` against a local server: what it must not reach, and how slow, endless and lying servers end."""

import asyncio
import contextlib
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Callable

import pytest

from jaxllm.errors import InvalidRequestError, MediaFetchError
from jaxllm.media.fetch import MediaFetcher, is_public

IMAGE = b"\x89PNG of a kind"
NAME = "messages[0].content[1]"


class Site:
    """A server on this machine that answers each path with given bytes."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.answers: dict[str, Callable[[asyncio.StreamWriter], object] | bytes] = {"/a.png": answer(IMAGE)}
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            said = self.answers[head.split()[1].decode()]
            if isinstance(said, bytes):
                writer.write(said)
                await writer.drain()
            else:
                await said(writer)  # type: ignore[misc]
        writer.close()


def answer(
    body: bytes, *, status: str = "200 OK", headers: str = "Content-Type: image/png", length: int | None = None
) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\n{headers}\r\nContent-Length: {size}\r\n\r\n".encode() + body


def redirect(to: str) -> bytes:
    return answer(b"", status="302 Found", headers=f"Location: {to}")


@contextlib.asynccontextmanager
async def site(**options: object) -> AsyncIterator[tuple[Site, MediaFetcher]]:
    """A server at 127.0.0.1, which here alone counts as public, under the name images.example."""
    served = Site()
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    names = {"images.example": ["127.0.0.1"], "inside.example": ["10.0.0.7"], "both.example": ["127.0.0.1", "192.168.1.1"]}

    def look_up(host: str, port: int) -> list[str]:
        if (host := host.rstrip(".")) not in names:
            raise OSError("no such host")
        return names[host]

    settings: dict[str, object] = {"allowed_domains": ["*"], "timeout_seconds": 5.0, **options}
    fetcher = MediaFetcher(
        look_up=look_up,
        is_public=lambda address: str(address) == "127.0.0.1" or is_public(address),
        **settings,  # type: ignore[arg-type]
    )
    try:
        yield served, fetcher
    finally:
        fetcher.close()
        server.close()


async def fetched(fetcher: MediaFetcher, url: str) -> bytes:
    return (await fetcher.fetch([url], [NAME]))[0]


async def status_of(fetcher: MediaFetcher, url: str) -> tuple[int, str]:
    with pytest.raises(InvalidRequestError) as caught:
        await fetched(fetcher, url)
    assert caught.value.param == NAME and str(caught.value).startswith(NAME)
    return getattr(caught.value, "status", 400), str(caught.value)


def test_an_image_comes_with_the_name_in_host_and_without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def run() -> None:
        async with site() as (served, fetcher):
            assert await fetched(fetcher, f"http://Images.Example:{served.port}/a.png") == IMAGE
            assert f"Host: images.example:{served.port}\r\n".encode() in served.requests[0]

    asyncio.run(run())


@pytest.mark.parametrize("domains", [[], ["other.example"], ["example"], ["ictures.example"]])
def test_only_hosts_on_the_list_are_asked(domains: list[str]) -> None:
    async def run() -> None:
        async with site(allowed_domains=domains) as (served, fetcher):
            status, text = await status_of(fetcher, f"http://images.example:{served.port}/a.png?secret")
            assert status == 400 and "--allowed-media-domains" in text and "secret" not in text
            assert not served.requests

    asyncio.run(run())


def test_a_listed_host_is_asked_however_its_name_is_written() -> None:
    async def run() -> None:
        async with site(allowed_domains=["Images.example"]) as (served, fetcher):
            assert await fetched(fetcher, f"HTTP://IMAGES.EXAMPLE:{served.port}/a.png") == IMAGE

    asyncio.run(run())


@pytest.mark.parametrize(
    "host",
    [
        "10.1.2.3",
        "127.0.0.2",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.0.1",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[fe80::1]",
        "[fc00::1]",
        "[ff02::1]",
        "[::ffff:127.0.0.2]",
        "[::ffff:8.8.8.8]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "017700000001",
        "0177.0.0.1",
        "127.1",
        "127.0.0.2.",
        "①②⑦.0.0.2",
        "inside.example",
        "INSIDE.example.",
        "both.example",
    ],
)
def test_private_hosts_are_refused_in_every_spelling(host: str) -> None:
    async def run() -> None:
        async with site() as (served, fetcher):
            status, text = await status_of(fetcher, f"http://{host}:{served.port}/a.png?secret")
            assert status == 400 and "secret" not in text
            served.answers["/on"] = redirect(f"http://{host}:{served.port}/a.png")
            await status_of(fetcher, f"http://images.example:{served.port}/on")
            assert len(served.requests) == 1  # the redirect was answered, and not followed

    asyncio.run(run())


def test_a_name_is_resolved_once_so_that_its_second_answer_is_not_used() -> None:
    answers = [["127.0.0.1"], ["10.0.0.1"]]

    async def run() -> None:
        async with site() as (served, fetcher):
            fetcher._look_up = lambda host, port: answers.pop(0)
            assert await fetched(fetcher, f"http://images.example:{served.port}/a.png") == IMAGE
            assert answers == [["10.0.0.1"]]

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        "ftp://images.example/a.png",
        "file:///etc/passwd",
        "http:///a.png",
        "//images.example/a.png",
        "http://user:word@images.example/a.png",
        "http://images.example:port/a.png",
        "http://images.example:99999/a.png",
        "http://[::1/a.png",
        "http://images.example/" + "a" * 9000,
        f"http://{'é' * 2000}.example/a.png",
        "",
    ],
)
def test_urls_of_other_kinds_are_refused(url: str) -> None:
    async def run() -> None:
        async with site() as (served, fetcher):
            assert (await status_of(fetcher, url))[0] == 400
            assert not served.requests

    asyncio.run(run())


def test_hosts_that_would_take_long_to_read_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = MediaFetcher(["*"])
    monkeypatch.setattr("jaxllm.media.fetch.URL", lambda url: pytest.fail("it is read"))
    for url in (f"http://{'é' * 2000}/a.png", f"https:/\t/{'é' * 301}", f"http://{'é' * 301}?a"):
        with pytest.raises(InvalidRequestError, match="more than 300 characters"):
            fetcher.check(url, NAME)


def test_redirects_are_followed_three_times_to_allowed_hosts_alone() -> None:
    async def run() -> None:
        async with site(allowed_domains=["images.example"]) as (served, fetcher):
            base = f"http://images.example:{served.port}"
            for number in range(4):
                served.answers[f"/{number}"] = redirect("/a.png" if number == 0 else f"/{number - 1}")
            assert await fetched(fetcher, f"{base}/2") == IMAGE
            assert (await status_of(fetcher, f"{base}/3"))[0] == 422
            served.answers["/away"] = redirect("http://elsewhere.example/a.png")
            assert (await status_of(fetcher, f"{base}/away"))[0] == 400
            served.answers["/file"] = redirect("file:///etc/passwd")
            assert (await status_of(fetcher, f"{base}/file"))[0] == 400

    asyncio.run(run())


def test_a_slow_server_ends_at_the_time_limit_wherever_it_is_slow() -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async def dripping(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async def run() -> None:
        async with site(timeout_seconds=0.1) as (served, fetcher):
            for slow in (silent, dripping):
                served.answers["/slow"] = slow
                began = time.monotonic()
                status, text = await status_of(fetcher, f"http://images.example:{served.port}/slow")
                assert status == 502 and "0.1 seconds" in text and time.monotonic() - began < 20
            fetcher._look_up = lambda host, port: time.sleep(0.2) or ["127.0.0.1"]
            assert (await status_of(fetcher, f"http://images.example:{served.port}/a.png"))[0] == 502

    asyncio.run(run())


def test_an_endless_or_large_answer_ends_at_the_limit() -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nConnection: close\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    async def run() -> None:
        async with site(max_bytes=lambda kind: 100_000) as (served, fetcher):
            served.answers["/endless"] = endless
            status, text = await status_of(fetcher, f"http://images.example:{served.port}/endless")
            assert status == 422 and "100000 bytes" in text and sent < 50 * 2**20
            served.answers["/large"] = answer(b"x", length=100_001)
            assert (await status_of(fetcher, f"http://images.example:{served.port}/large"))[0] == 422
            served.answers["/most"] = answer(b"x" * 100_000)
            assert len(await fetched(fetcher, f"http://images.example:{served.port}/most")) == 100_000

    asyncio.run(run())


def test_all_images_of_a_request_share_a_limit() -> None:
    async def run() -> None:
        async with site(max_request_bytes=2 * len(IMAGE)) as (served, fetcher):
            url = f"http://images.example:{served.port}/a.png"
            assert await fetcher.fetch([url] * 2, ["a", "b"]) == [IMAGE] * 2
            with pytest.raises(MediaFetchError, match="fetched images of this request"):
                await fetcher.fetch([url] * 3, ["a", "b", "c"])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (answer(b"no", status="404 Not Found"), 422),
        (answer(b"no", status="403 Forbidden"), 422),
        (answer(b"", status="204 No Content"), 422),
        (answer(b"later", status="429 Too Many Requests"), 502),
        (answer(b"later", status="408 Request Timeout"), 502),
        (answer(b"broken", status="500 Internal Server Error"), 502),
        (answer(b"<html>", headers="Content-Type: text/html"), 422),
        (answer(IMAGE, headers="Content-Type: image/png\r\nContent-Encoding: gzip"), 422),
        (answer(IMAGE, length=1000), 502),
        (answer(b"", headers="Content-Length: minus one"), 502),
        (b"what?\r\n\r\n", 502),
        (b"", 502),
        (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n", 502),
        (redirect("http://[::1"), 502),
    ],
)
def test_answers_of_servers_become_statuses_without_their_words(said: bytes, expected: int) -> None:
    async def run() -> None:
        async with site() as (served, fetcher):
            served.answers["/x?secret"] = said
            status, text = await status_of(fetcher, f"http://images.example:{served.port}/x?secret")
            assert status == expected
            assert not any(word in text for word in ("secret", "127.0.0.1", "images.example", "html", "later", "Not Found"))

    asyncio.run(run())


@pytest.mark.parametrize("headers", ["Content-Type: application/octet-stream", "X: y", "Content-Type: IMAGE/JPEG; q=1"])
def test_content_types_of_images_and_of_any_bytes_are_taken(headers: str) -> None:
    async def run() -> None:
        async with site() as (served, fetcher):
            served.answers["/x"] = answer(IMAGE, headers=headers)
            assert await fetched(fetcher, f"http://images.example:{served.port}/x") == IMAGE

    asyncio.run(run())


@pytest.mark.parametrize(
    ("type", "is_taken"), [("audio/wav", True), ("video/ogg", True), ("application/octet-stream", True), ("image/png", False)]
)
def test_audio_comes_with_content_types_of_its_own(type: str, is_taken: bool) -> None:
    async def run() -> None:
        async with site() as (served, fetcher):
            served.answers["/x"] = answer(b"RIFF", headers=f"Content-Type: {type}")
            asked = fetcher.fetch([f"http://images.example:{served.port}/x"], ["messages[0].content[0]"], ["audio"])
            if is_taken:
                assert await asked == [b"RIFF"]
            else:
                with pytest.raises(MediaFetchError, match="has a content type that is not that of audio"):
                    await asked

    asyncio.run(run())


def test_tls_asks_for_the_name_and_checks_the_certificate() -> None:
    async def run() -> None:
        asked: list[bytes] = []

        async def take_hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.read(4096))
            writer.close()

        async with site() as (_, fetcher):
            server = await asyncio.start_server(take_hello, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            status, text = await status_of(fetcher, f"https://images.example:{port}/a.png")
            server.close()
        assert b"images.example" in asked[0] and status == 502 and "images.example" not in text

    asyncio.run(run())
    assert ssl.create_default_context().verify_mode == ssl.CERT_REQUIRED  # which aiohttp uses unless told otherwise


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
