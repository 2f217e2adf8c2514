"""Identifies clients by key, or without keys by address, and limits how many requests each may have at once."""

import contextlib
import hashlib
import ipaddress
from collections.abc import Iterator

from starlette.types import Scope

from server.errors import ApiError
from server.options import ServerOptions

RETRY_AFTER_SECONDS = 1
IPV6_NETWORK_BITS = 64
"""Bits of an IPv6 address that identify a network: its machines choose the rest."""
_NOT_COUNTED = ("/cancel", "/abort_requests")
"""Ends of paths that end other requests."""


class Clients:
    """Counts the requests of each client in one process. Used by its event loop alone."""

    def __init__(self, options: ServerOptions, operators_paths: frozenset[str] = frozenset()):
        self.num_refused = 0
        self._has_keys = bool(options.access.api_key)
        self._most = options.limits.max_concurrent_requests_per_key
        self._operators_paths = operators_paths
        self._num_running: dict[str, int] = {}

    def label_of(self, key: bytes | None, host: str | None) -> str:
        """A client's label. `key`: a valid one, of which a digest is taken; `host`: its address, None for a Unix socket."""
        if self._has_keys and key is not None:
            return hashlib.sha256(key).hexdigest()[:16]
        return "" if host is None else _network_of(host)

    def enter(self, scope: Scope, key: bytes | None) -> None:
        """Note in its scope who an HTTP request is from, and count it until `leave`. Raises ApiError if the client has too many."""
        state = scope.setdefault("state", {})
        state["client"] = client = self.label_of(key, (scope.get("client") or (None,))[0])
        path = scope["path"]
        if self._most and scope["method"] == "POST" and path not in self._operators_paths and not path.endswith(_NOT_COUNTED):
            self._add(client)
            state["is_counted"] = True

    def leave(self, scope: Scope) -> None:
        """An HTTP request ends."""
        if scope.get("state", {}).pop("is_counted", False):
            self._remove(scope["state"]["client"])

    @contextlib.contextmanager
    def counted(self, client: str, *, limited: bool = True) -> Iterator[None]:
        """Count a request that is none of HTTP. Raises ApiError if the client has too many, unless it is not limited."""
        if not self._most:
            yield
            return
        self._add(client, limited=limited)
        try:
            yield
        finally:
            self._remove(client)

    def _add(self, client: str, *, limited: bool = True) -> None:
        count = self._num_running.get(client, 0)
        if limited and count >= self._most:
            self.num_refused += 1
            whose = "this key" if self._has_keys else "this address"
            raise ApiError(
                429,
                f"{count} requests of {whose} are being answered, and at most {self._most} may be "
                "(--max-concurrent-requests-per-key); try again when one has ended",
                code="rate_limit_exceeded",
                headers={"retry-after": str(RETRY_AFTER_SECONDS)},
                retry=True,
            )
        self._num_running[client] = count + 1

    def _remove(self, client: str) -> None:
        self._num_running[client] -= 1
        if not self._num_running[client]:
            del self._num_running[client]


def _network_of(host: str) -> str:
    """An IPv4 address, or the network of an IPv6 address."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, IPV6_NETWORK_BITS), strict=False))
