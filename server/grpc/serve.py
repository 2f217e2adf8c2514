"""Starts and stops the gRPC server: service, health, reflection, TLS, message size limit."""

import asyncio
import contextlib
import ssl
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxllm.errors import ConfigError, EngineError
from jaxllm.log import logger
from server.context import ServerContext
from server.grpc.interceptor import Gate, IsAllowed, key_in
from server.grpc.jaxllm_pb2_grpc import SERVICE, add_to_server
from server.grpc.service import Inference
from server.guard import holds_key, key_digests
from server.options import AccessOptions, NetworkOptions

HEALTH_SECONDS = 0.5
"""Seconds between two checks that the engine runs, for health watchers."""


class GrpcServer:
    """A gRPC server in the event loop that starts it."""

    def __init__(self, context: ServerContext):
        largest = context.options.limits.max_request_body_bytes
        options = [
            ("grpc.max_receive_message_length", largest),
            ("grpc.max_metadata_size", 16 << 10),
            ("grpc.so_reuseport", int(context.options.network.api_server_count > 1)),
        ]
        self._engine = context.engine
        self._network = context.options.network
        gate = Gate(_key_check(context.options.access))
        most = context.options.network.max_connections
        self._server = grpc.aio.server(interceptors=[gate], options=options, maximum_concurrent_rpcs=most)
        self._health = health.aio.HealthServicer()
        add_to_server(Inference(context), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self._follower: asyncio.Task[None] | None = None
        self._serves = True
        """Status of the health service."""
        self.port = 0
        """The port, once started."""

    async def start(self, port: int) -> None:
        """Listen; port 0: any free port. Raises ConfigError if the port is not available."""
        address, credentials = address_of(self._network, port), credentials_of(self._network)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ConfigError(f"grpc_port: cannot listen on {address}; choose another") from None
        self._serves = await self._is_ready()
        await self._set_health()
        await self._server.start()
        self._follower = asyncio.create_task(self._follow_engine())
        logger.info("gRPC at %s", address_of(self._network, self.port))

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, and cancel running ones after the grace period."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)

    async def _set_health(self) -> None:
        kind = health_pb2.HealthCheckResponse
        status = kind.SERVING if self._serves else kind.NOT_SERVING
        for service in ("", SERVICE.full_name):
            await self._health.set(service, status)

    async def _follow_engine(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            serves = await self._is_ready()
            if serves != self._serves:
                self._serves = serves
                await self._set_health()

    async def _is_ready(self) -> bool:
        try:
            await self._engine.check_ready()
        except EngineError:
            return False
        return True


def _key_check(access: AccessOptions) -> IsAllowed:
    """Whether an `authorization` holds one of the server's keys; always true without keys."""
    keys = [*(access.api_key or ()), *([access.admin_api_key] if access.admin_api_key else ())]
    digests = key_digests(keys)

    def is_allowed(authorization: str | None) -> bool:
        return not access.api_key or holds_key(key_in(authorization), digests)

    return is_allowed


def address_of(network: NetworkOptions, port: int) -> str:
    """The address on which gRPC listens."""
    return f"[{network.host}]:{port}" if ":" in network.host else f"{network.host}:{port}"


def credentials_of(network: NetworkOptions) -> grpc.ServerCredentials | None:
    """TLS from HTTP's certificate files. Raises ConfigError for options that gRPC does not support."""
    if network.ssl_certfile is None:
        return None
    if network.ssl_cert_reqs == ssl.CERT_OPTIONAL:
        raise ConfigError("ssl_cert_reqs is 1 (optional), which gRPC has not; use 0 or 2, or leave out --grpc-port")
    if network.ssl_ciphers is not None:
        raise ConfigError("ssl_ciphers does not reach gRPC; set $GRPC_SSL_CIPHER_SUITES instead, or leave out --grpc-port")
    try:
        chain = Path(network.ssl_certfile).read_bytes()
        key = Path(network.ssl_keyfile or network.ssl_certfile).read_bytes()
        roots = Path(network.ssl_ca_certs).read_bytes() if network.ssl_ca_certs is not None else None
    except OSError as error:
        raise ConfigError(f"a TLS file cannot be read: {error}") from error
    return grpc.ssl_server_credentials([(key, chain)], roots, require_client_auth=network.ssl_cert_reqs == ssl.CERT_REQUIRED)
