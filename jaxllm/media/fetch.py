"""Fetches what requests name by http(s) URLs, images, videos and audio, from hosts that the operator allows, never from a private network.

A URL comes from an untrusted client, so a fetch must not reach what only this machine can reach. The URL is parsed once and its
host resolved once; every address must be public, and the connection goes to a checked address, with the host's name in `Host` and
in TLS. Proxies of the environment are not used. Redirects are checked like URLs. Time and bytes are bounded while they come.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from jaxllm.errors import InvalidRequestError, MediaFetchError

MAX_REDIRECTS = 3
MAX_AT_ONCE = 8
"""Fetches of one request that run at the same time."""
MAX_LOOKUPS = 8
"""Threads that wait for name servers; lookups beyond this wait for them, within the time of their fetches."""
MAX_URL_CHARACTERS = 8192
MAX_HOST_CHARACTERS = 300
"""With its port; names have at most 253. Reading a name of other letters takes the event loop quadratic time."""
MAX_REQUEST_BYTES = 128 << 20
"""Limit of all fetched items of a request together."""
REQUEST_SECONDS = 30.0
"""Time limit of fetching all of them."""
_ENDS_IN_NUMBER = re.compile(r"(?:^|\.)(?:[0-9]+|0x[0-9a-f]*)\.?$", re.IGNORECASE)
"""Hosts that URL parsers and resolvers read as IPv4 addresses, in forms such as 2130706433, 0x7f.1 or 0177.0.0.1."""
_GLOBAL_UNICAST, _6TO4 = ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("2002::/16")
_REDIRECTS = (301, 302, 303, 307, 308)
_TYPES = {"image": ("image/",), "video": ("video/", "image/"), "audio": ("audio/", "video/")}
"""How the content types of a kind of items begin. Ogg and MP4 files of audio may be called videos."""
_BINARY_TYPES = ("application/octet-stream", "binary/octet-stream")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether an address belongs to a host of the internet. Those that only wrap an IPv4 address do not."""
    if isinstance(address, ipaddress.IPv6Address) and (address not in _GLOBAL_UNICAST or address in _6TO4):
        return False  # among others v4-mapped, NAT64, link-local and unique local addresses
    return address.is_global and not (address.is_multicast or address.is_reserved)


def look_up(host: str, port: int) -> list[str]:
    """The addresses of a host. Raises OSError or UnicodeError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class MediaFetcher:
    """Fetches images, videos and audio from allowed hosts. Thread-safe."""

    def __init__(
        self,
        allowed_domains: Collection[str],
        *,
        max_bytes: Callable[[str], int] = lambda kind: 20 * 2**20,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        timeout_seconds: float = 5.0,
        look_up: Callable[[str, int], list[str]] = look_up,
        is_public: Callable[[Address], bool] = is_public,
    ):
        """`allowed_domains`: exact names of hosts, or "*" for all public ones. `max_bytes`, by its kind, and `timeout_seconds` hold for
        an item, redirects included; `max_request_bytes` for all that are fetched together.
        """
        self._allowed = frozenset(_plain(domain) for domain in allowed_domains)
        self._max_bytes, self._max_request_bytes = max_bytes, max_request_bytes
        self._seconds = timeout_seconds
        self._look_up, self._is_public = look_up, is_public
        self._threads = ThreadPoolExecutor(MAX_LOOKUPS, "jaxllm-lookup")

    def close(self) -> None:
        """End the threads that look up names."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def check(self, url: str, name: str) -> URL:
        """Parse a URL, of which errors speak as `name`. Raises InvalidRequestError, if it may not be fetched."""
        if len(url) > MAX_URL_CHARACTERS:
            raise InvalidRequestError(f"{name} is a URL of {len(url)} characters, at most {MAX_URL_CHARACTERS} are taken", name)
        if any(len(host) > MAX_HOST_CHARACTERS for host in re.split("[/?#]", url, maxsplit=3)[2:3]):
            raise InvalidRequestError(f"{name} is a URL of a host with more than {MAX_HOST_CHARACTERS} characters", name)
        try:
            parsed = URL(url)
            host, port = _plain(parsed.raw_host or ""), parsed.port
        except ValueError:
            raise InvalidRequestError(f"{name} is not a valid URL", name) from None
        if parsed.scheme not in ("http", "https") or not host or not port:
            raise InvalidRequestError(f"{name} must be a URL with http or https and a host", name)
        if parsed.raw_user or parsed.raw_password:
            raise InvalidRequestError(f"{name} is a URL with a user name or password; none is sent", name)
        if "*" not in self._allowed and host not in self._allowed:
            raise InvalidRequestError(f"{name} is a URL of a host that is not among --allowed-media-domains", name)
        if _is_address(host):
            self._check_address(host, name)
        elif _ENDS_IN_NUMBER.search(host):
            raise InvalidRequestError(f"{name} is a URL whose host is neither a name nor an IP address in its usual form", name)
        return parsed

    async def fetch(self, urls: Sequence[str], names: Sequence[str], kinds: Sequence[str] = ()) -> list[bytes]:
        """The images at these URLs, or what `kinds` says; `names` is what errors call each. Raises InvalidRequestError or
        MediaFetchError."""
        places, budget = asyncio.Semaphore(MAX_AT_ONCE), _Budget(self._max_request_bytes)

        async def one(url: URL, name: str, kind: str) -> bytes:
            async with places:
                return await self._fetch(url, name, kind, budget)

        checked = [(self.check(url, name), name) for url, name in zip(urls, names, strict=True)]
        kinds = kinds or ["image"] * len(urls)
        tasks = [asyncio.ensure_future(one(url, name, kind)) for (url, name), kind in zip(checked, kinds, strict=True)]
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await asyncio.gather(*tasks)
        except TimeoutError:
            raise MediaFetchError(
                f"the {len(urls)} images of this request took longer than {REQUEST_SECONDS:g} seconds to fetch",
                names[0],
                502,
            ) from None
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, url: URL, name: str, kind: str, budget: "_Budget") -> bytes:
        try:
            async with asyncio.timeout(self._seconds):
                return await self._follow(url, name, kind, budget)
        except TimeoutError:
            raise MediaFetchError(f"{name} took longer than {self._seconds:g} seconds to fetch", name, 502) from None
        except InvalidRequestError:
            raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise MediaFetchError(f"{name} could not be fetched: {_reason(error)}", name, 502) from None

    async def _follow(self, url: URL, name: str, kind: str, budget: "_Budget") -> bytes:
        """Ask for a checked URL, and for those that it redirects to."""
        resolver = _CheckedResolver(self, name)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=resolver, use_dns_cache=False, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "Accept": ", ".join(f"{type}*" for type in _TYPES[kind]),
                "Accept-Encoding": "identity",
                "User-Agent": "jaxllm",
            },
            timeout=aiohttp.ClientTimeout(total=None),  # the caller's
            auto_decompress=False,
            trust_env=False,
        ) as session:
            for _ in range(MAX_REDIRECTS + 1):
                async with session.get(url, allow_redirects=False) as response:
                    if response.status not in _REDIRECTS:
                        return await self._read(response, name, kind, budget)
                    url = self.check(str(url.join(URL(response.headers.get("Location", "")))), name)
        raise MediaFetchError(f"{name} redirects more than {MAX_REDIRECTS} times", name, 422)

    async def _read(self, response: aiohttp.ClientResponse, name: str, kind: str, budget: "_Budget") -> bytes:
        status, type, most = response.status, response.content_type, self._max_bytes(kind)
        if status != 200:
            is_passing = status in (408, 429) or status >= 500
            raise MediaFetchError(f"{name} could not be fetched: its server answers {status}", name, 502 if is_passing else 422)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaFetchError(f"{name} comes compressed, which was not asked for", name, 422)
        if "Content-Type" in response.headers and not type.startswith(_TYPES[kind]) and type not in _BINARY_TYPES:
            what = {"image": "an image's", "video": "a video's", "audio": "that of audio"}[kind]
            raise MediaFetchError(f"{name} has a content type that is not {what}", name, 422)
        if (response.content_length or 0) > most:
            raise _too_large(name, most)
        pieces, size = [], 0
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > most:
                raise _too_large(name, most)
            budget.take(len(piece), name)
            pieces.append(piece)
        return b"".join(pieces)

    async def resolve(self, host: str, port: int, name: str) -> list[str]:
        """The addresses of a host, all of them public. Raises InvalidRequestError or OSError."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._look_up, host, port)
        except UnicodeError:
            raise OSError("no such name") from None
        for address in found:
            self._check_address(address, name)
        return list(dict.fromkeys(found))

    def _check_address(self, text: str, name: str) -> None:
        if not self._is_public(ipaddress.ip_address(text)):
            raise InvalidRequestError(f"{name} is a URL of a private or special address, from which nothing is fetched", name)


class _Budget:
    """Bytes that a request may still fetch."""

    def __init__(self, max_bytes: int):
        self._max_bytes = self._left = max_bytes

    def take(self, num_bytes: int, name: str) -> None:
        """Count bytes that have come. Raises MediaFetchError."""
        self._left -= num_bytes
        if self._left < 0:
            raise MediaFetchError(f"the fetched images of this request have more than {self._max_bytes} bytes", name, 422)


class _CheckedResolver(AbstractResolver):
    """Resolves the hosts of one fetch to checked addresses: to them aiohttp connects, and resolves nothing itself."""

    def __init__(self, fetcher: MediaFetcher, name: str):
        self._fetcher, self._name = fetcher, name

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC) -> list[ResolveResult]:
        """Raises InvalidRequestError or OSError."""
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in await self._fetcher.resolve(host, port, self._name)
        ]

    async def close(self) -> None:
        """Nothing is open."""


def _plain(host: str) -> str:
    return host.lower().rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _too_large(name: str, max_bytes: int) -> MediaFetchError:
    return MediaFetchError(f"{name} has more than {max_bytes} bytes; send a smaller one", name, 422)


def _reason(error: Exception) -> str:
    """Reason of an error. Does not quote the library's text, which names addresses and URLs."""
    if isinstance(error, aiohttp.ClientSSLError):
        return "its server's certificate is not valid"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "its server cannot be reached"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "its server sent less than it announced"
    return "its server did not answer as HTTP servers do"
