"""The listening socket of all API servers. The supervisor owns it, so that no connection attempt is lost when an API server dies."""

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat
from pathlib import Path

from jaxllm.errors import ConfigError
from server.options import NetworkOptions
from server.unread import UNSENT_BYTES

BACKLOG = 2048
_LISTEN_STATE = "0A"


def listen(network: NetworkOptions) -> list[socket.socket]:
    """Open one listening socket, with a descriptor for each API server: a connection is accepted by the first one that has time, and none
    waits for an API server that has ended. Raises ConfigError if the address is in use, naming the process that has it."""
    shared = _listen_unix(network.uds) if network.uds is not None else _listen_tcp(network)
    return [shared, *(shared.dup() for _ in range(network.api_server_count - 1))]


def is_local(network: NetworkOptions) -> bool:
    """Whether only programs of this machine reach the server by TCP. Not so of a Unix socket, which browsers cannot open."""
    if network.uds is not None:
        return False
    try:
        found = socket.getaddrinfo(network.host, network.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:  # nothing can listen there
        return True
    address = ipaddress.ip_address(str(found[0][4][0]).partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def check_tls(network: NetworkOptions) -> None:
    """Raise ConfigError for TLS files and ciphers that no connection could use, before a model is loaded."""
    if network.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if (path := getattr(network, name)) is not None:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{name} is the TLS file {path!r}, which cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    fault = "ssl_certfile and ssl_keyfile are no certificate with its key, unencrypted"
    try:
        context.load_cert_chain(network.ssl_certfile, network.ssl_keyfile, password="")  # never prompts for the password
        if network.ssl_ca_certs is not None:
            fault = f"ssl_ca_certs is {network.ssl_ca_certs!r}, which holds no certificates"
            context.load_verify_locations(network.ssl_ca_certs)
        if network.ssl_ciphers is not None:
            fault = f"ssl_ciphers is {network.ssl_ciphers!r}, which OpenSSL does not take"
            context.set_ciphers(network.ssl_ciphers)
    except ssl.SSLError as error:
        raise ConfigError(f"{fault} ({error})") from None


def address_of(listening: socket.socket) -> tuple[str, int]:
    """Host and port for connections from this machine."""
    host, port = listening.getsockname()[:2]
    return ("127.0.0.1" if host in ("0.0.0.0", "::") else host), port


def _listen_tcp(network: NetworkOptions) -> socket.socket:
    host, port = network.host, network.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host is {host!r}, which is no address of this machine ({error.strerror})") from None
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted sockets inherit it
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(_explain(error, host, port)) from None
    return listening


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = owner_of_port(port)
        by = f" by {owner}" if owner else ""
        return f"port {port} is in use{by}; choose another, e.g. --port {_free_port(port)}, or --port 0 for any free one"
    if error.errno == errno.EACCES:
        return f"port {port} is for root only; choose one from 1024, e.g. --port 8000"
    return f"cannot listen on {host}:{port}: {error.strerror}"


def _free_port(taken: int) -> int:
    """The next free port."""
    for port in range(taken + 1, min(taken + 100, 65536)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return 0


def owner_of_port(port: int) -> str | None:
    """`python3 (process 1234)`, the process that listens on a port, if this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"{name} (process {process.name})"
    return None


def _listen_unix(path: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError(f"uds is {path!r}, where something else lies than a socket; choose another path")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except OSError:
                os.unlink(path)  # left behind by a killed server
            else:
                raise ConfigError(f"uds is {path!r}, where another server listens; choose another path")
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(path)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen on the socket {path!r}: {error.strerror or error}") from None
    return listening
