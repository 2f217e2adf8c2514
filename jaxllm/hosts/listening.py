"""Where host 0 listens for the others, and when a host counts as lost. Does not import JAX."""

import errno
import socket
from typing import Protocol

from jaxllm.config import ParallelOptions
from jaxllm.errors import ConfigError

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 7.0
"""A host that sends nothing for so long is lost."""


class Started(Protocol):
    """The launcher of the other hosts."""

    def fault(self) -> str | None:
        """Why one of them ended before it connected; None if none did."""

    def end(self) -> None:
        """End them, if they have not ended by themselves."""


def listen(options: ParallelOptions) -> socket.socket:
    """A socket at the address and the port of host 0, and at no other. Raises ConfigError if it cannot listen there."""
    where = options.master_addr, options.master_port
    try:
        family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server(where, family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {where[1]} of {where[0]} is taken by another program; choose another --master-port, on all hosts"
            ) from error
        raise ConfigError(
            f"host 0 cannot listen at master_addr {where[0]}, port {where[1]} ({error.strerror or error}); give an address of this "
            "machine that the other hosts reach"
        ) from error


def free_port(address: str) -> int:
    """A free port at an address of this machine."""
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        return int(probe.getsockname()[1])
