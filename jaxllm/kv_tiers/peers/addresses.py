"""Where a decode engine may connect: what requests name must lie within `kv_peers`."""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

from jaxllm.errors import JaxLLMError
from jaxllm.options.kv_transfer import network

LOOPBACK = ("127.0.0.0/8", "::1/128")
"""The peers of an engine without the option."""
Address = tuple[int, Any]
"""Family of a socket, and the address."""


class NotAllowedError(JaxLLMError):
    """A host lies outside of kv_peers."""


def allowed(host: str, port: int, peers: Sequence[str] | None) -> list[Address]:
    """The addresses of a host that may be connected to: all of a host that `peers` names, else those within its networks. What is checked
    here is what is connected to, so a name may not become another address meanwhile. Raises NotAllowedError, or OSError for a name that
    has no address."""
    peers = LOOPBACK if peers is None else peers
    found: list[Address] = [
        (family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ]
    if host.lower() in (peer.lower() for peer in peers if network(peer) is None):
        return found
    networks = [each for peer in peers if (each := network(peer)) is not None]
    inside = [(family, address) for family, address in found if _is_in(address[0], networks)]
    if not inside:
        raise NotAllowedError(
            f"{host} is not among the peers of this engine ({', '.join(peers)}); if it is a prefill engine, add it to kv_peers"
        )
    return inside


def _is_in(address: str, networks: "Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]") -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return any(found in each for each in networks)
