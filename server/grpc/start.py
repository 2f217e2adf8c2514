"""Starts gRPC if it is enabled; imports it only then."""

import importlib.util
import socket
from typing import TYPE_CHECKING

from jaxllm.errors import ConfigError
from server.options import NetworkOptions

if TYPE_CHECKING:
    from server.context import ServerContext
    from server.grpc.serve import GrpcServer

PACKAGES = ("grpc", "grpc_health", "grpc_reflection")


def check_grpc(network: NetworkOptions) -> None:
    """Raise ConfigError for anything that would keep gRPC from starting, before a model is loaded."""
    port = network.grpc_port
    if port is None:
        return
    if any(importlib.util.find_spec(package) is None for package in PACKAGES):
        raise ConfigError("grpc_port needs packages that are not installed: pip install 'jaxllm[grpc]'")
    if port == 0 and network.api_server_count > 1:
        raise ConfigError("grpc_port is 0, but several --api-server-count must share one; name a port")
    if port != 0 and port == network.port and network.uds is None:
        raise ConfigError(f"grpc_port is {port}, the port of HTTP; choose another")
    from server.grpc.serve import address_of, credentials_of

    credentials_of(network)
    host = network.host
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"grpc_port: cannot listen on {address_of(network, port)}: {error.strerror}; choose another"
        ) from None


async def start_grpc(context: "ServerContext") -> "GrpcServer | None":
    """Start the gRPC server if the options enable it; else return None. Raises ConfigError."""
    port = context.options.network.grpc_port
    if port is None:
        return None
    from server.grpc.serve import GrpcServer

    server = GrpcServer(context)
    await server.start(port)
    return server
