"""The header `X-data-parallel-rank`, by which a client chooses the replica that computes its requests. Pure ASGI."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.async_llm import pinned_rank
from server.error_shapes import shaped
from server.errors import bad_request

HEADER = "x-data-parallel-rank"


class RankHeader:
    """Pins what a request asks of the engine to the replica that the header names. The engine refuses a rank that does not exist."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rank = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if rank is None:
            await self._app(scope, receive, send)
            return
        if not rank.isascii() or not rank.isdigit() or len(rank) > 6:
            error = bad_request(f"the header {HEADER} is {rank[:100]!r}, must be the number of a replica", HEADER)
            await shaped(scope, error).response()(scope, receive, send)
            return
        token = pinned_rank.set(int(rank))
        try:
            await self._app(scope, receive, send)
        finally:
            pinned_rank.reset(token)
