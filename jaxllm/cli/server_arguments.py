"""Shared by commands that use a running server: connection arguments, and an event loop."""

import argparse
import asyncio
import os
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from jaxllm import env
from jaxllm.cli.numbers import name_value

if TYPE_CHECKING:
    from jaxllm.http_client.client import ServerClient

T = TypeVar("T")
KEY_VARIABLES = (env.API_KEY, "OPENAI_API_KEY", "VLLM_API_KEY")
"""Where a client finds the server's key."""


def add_connection_arguments(group: Any) -> None:
    """Key, headers and TLS."""
    key = f"the server's key; default: ${', $'.join(KEY_VARIABLES)}, in this order"
    group.add_argument("--api-key", metavar="KEY", help=key)
    header = "a further HTTP header; may be repeated"
    group.add_argument("--header", action="append", type=name_value, default=[], help=header)
    group.add_argument("--insecure", action="store_true", help="accept any TLS certificate")


def make_client(arguments: argparse.Namespace, url: str, *, timeout_seconds: float | None = None) -> "ServerClient":
    """A client of the server at `url`."""
    from jaxllm.http_client.client import ServerClient

    return ServerClient(
        url,
        api_key=arguments.api_key or next((key for name in KEY_VARIABLES if (key := os.environ.get(name))), None),
        headers=dict(arguments.header),
        verify_tls=not arguments.insecure,
        timeout_seconds=timeout_seconds,
    )


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if installed: half of a client's time is spent in the event loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
