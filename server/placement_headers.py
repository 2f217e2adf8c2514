"""Headers by which a client places its requests: `X-Session-ID`, `X-Vllm-Priority`, `X-data-parallel-rank`. Pure ASGI."""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.request_options import Placement, reset_placement, set_placement
from server.error_shapes import shaped
from server.errors import ApiError, bad_request
from server.protocol.common import MAX_SESSION_ID

SESSION, PRIORITY, RANK = "x-session-id", "x-vllm-priority", "x-data-parallel-rank"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class PlacementHeaders:
    """Applies the headers, and the guard's label of the client, to what a request asks of the engine, which refuses a rank that does
    not exist.

    has_replicas: whether there are several engines; of one, `X-data-parallel-rank` is ignored.
    """

    def __init__(self, app: ASGIApp, *, has_replicas: bool):
        self._app = app
        self._has_replicas = has_replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            found = self._read(Headers(scope=scope), scope["state"]["client"]) if scope["type"] == "http" else None
        except ApiError as error:
            await shaped(scope, error).response()(scope, receive, send)
            return
        token = set_placement(found)
        try:
            await self._app(scope, receive, send)
        finally:
            reset_placement(token)

    def _read(self, headers: Headers, client: str) -> Placement:
        rank = headers.get(RANK) if self._has_replicas else None
        if rank is not None and (not rank.isascii() or not rank.isdigit() or len(rank) > 6):
            raise bad_request(f"the header {RANK} is {rank[:100]!r}, must be the number of a replica", RANK)
        priority = headers.get(PRIORITY)
        if priority is not None and not _INTEGER.fullmatch(priority):
            raise bad_request(f"the header {PRIORITY} is {priority[:100]!r}, must be an integer of at most 18 digits", PRIORITY)
        session_id = headers.get(SESSION)
        if session_id is not None and len(session_id) > MAX_SESSION_ID:
            raise bad_request(
                f"the header {SESSION} has {len(session_id)} characters, at most {MAX_SESSION_ID} are possible", SESSION
            )
        return Placement(
            None if rank is None else int(rank), session_id or None, None if priority is None else int(priority), client
        )
