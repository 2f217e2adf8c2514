"""Refuses what pages of other sites make a browser send: DNS rebinding by the Host, cross-site requests by where they come from.

Only for servers without a key: no page can know a key, and browsers add none on their own. Clients that are no browsers send neither
Origin nor Sec-Fetch-Site.
"""

import functools
import ipaddress
import re
from collections.abc import Mapping

from jaxllm.log import logger, safe
from server.errors import ApiError, shortened
from server.listening import is_local
from server.options import ServerOptions

MAX_LOGGED = 64
"""Most refusals in the log: one for each host and each origin. Pages choose both."""
_MAX_SHOWN = 100
_MAX_HOST_BYTES = 300
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]+?)\.?(?::([0-9]{0,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}


class BrowserAccess:
    """The hosts and origins that a server answers to. Reads headers alone; `check` raises for a request that is not let in."""

    def __init__(self, options: ServerOptions):
        access = options.access
        hosts = [_normal(name) for name in access.allowed_hosts or ()]
        has_key = bool(access.api_key)
        self._takes_any_host = "*" in hosts or (not hosts and (has_key or not is_local(options.network)))
        self._hosts = frozenset({"localhost", *hosts})
        self._parents = (".localhost", *(name[1:] for name in hosts if name.startswith("*.")))
        self._origins = frozenset(origin.encode() for origin in access.allowed_origins or ())
        self._takes_any_origin = has_key or b"*" in self._origins
        self._knows_host = functools.lru_cache(maxsize=256)(self._is_known_host)
        self._advice = "" if has_key or hosts else ", or with --api-key to answer to any"
        self._logged: set[str] = set()

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError for a Host that is not this server's, and for requests of pages that are not allowed."""
        host = headers.get(b"host")
        if not self._takes_any_host and host is not None and not (len(host) <= _MAX_HOST_BYTES and self._knows_host(host)):
            raise self._unknown_host(host.decode("latin-1"))
        if self._takes_any_origin:
            return
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site")
        if (origin is None and site is None) or origin in self._origins or site in (b"same-origin", b"none"):
            return
        if site is None and _is_same(origin or b"", host or b""):
            return  # browsers name the site only to servers with TLS, and on this machine
        if _is_visit(method, headers):
            return
        raise self._foreign(None if origin is None else origin.decode("latin-1"))

    def _is_known_host(self, host: bytes) -> bool:
        name, _ = _split(host)
        if name is None:
            return False
        if name in self._hosts or name.endswith(self._parents):
            return True
        try:
            ipaddress.IPv6Address(name[1:-1]) if name.startswith("[") else ipaddress.IPv4Address(name)
        except ValueError:
            return False
        return True

    def _unknown_host(self, host: str) -> ApiError:
        name = _split(host.encode("latin-1"))[0] or host
        return self._refusal(
            f"this server does not answer to the host {shortened(host, _MAX_SHOWN)!r}, only to localhost, IP addresses and "
            f"--allowed-hosts; if that name is yours, start it with --allowed-hosts {shortened(name, _MAX_SHOWN)}{self._advice}",
            "host_not_allowed",
        )

    def _foreign(self, origin: str | None) -> ApiError:
        if not origin:
            sentence = "pages of other sites may not use this server; if yours is to, start it with --allowed-origins ORIGIN"
        else:
            shown = shortened(origin, _MAX_SHOWN)
            sentence = f"pages of {shown} may not use this server; if they are yours, start it with --allowed-origins {shown}"
        return self._refusal(sentence, "origin_not_allowed")

    def _refusal(self, sentence: str, code: str) -> ApiError:
        if sentence not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(sentence)
            logger.warning("refused a request: %s", safe(sentence))
        return ApiError(403, sentence, code=code, retry=False)


def _is_visit(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser wants to show what it asks for in a separate tab, as after a click on a link."""
    return (
        method in ("GET", "HEAD")
        and headers.get(b"sec-fetch-mode") == b"navigate"
        and headers.get(b"sec-fetch-dest", b"document") == b"document"
    )


def _is_same(origin: bytes, host: bytes) -> bool:
    """Whether an origin has the name and port of a Host. A proxy may have ended TLS, so that the scheme does not count."""
    scheme, _, authority = origin.partition(b"://")
    default = _DEFAULT_PORTS.get(scheme.decode("latin-1"))
    name, port = _split(authority)
    own_name, own_port = _split(host)
    return name is not None and default is not None and name == own_name and (port or default) == (own_port or default)


def _split(authority: bytes) -> tuple[str | None, int | None]:
    """The name, in small letters and without a last dot, and the port of `name:port`; no name if it is not of that form."""
    found = _AUTHORITY.fullmatch(authority.decode("latin-1").lower())
    if found is None:
        return None, None
    return found[1], int(found[2]) if found[2] else None


def _normal(name: str) -> str:
    return name.lower().removesuffix(".")
