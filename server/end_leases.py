"""Frees blocks that a prefill engine keeps for requests which this server refuses, so that it does not keep them for half a minute.
Pure ASGI."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import InvalidRequestError
from jaxllm.kv_transfer import PARAM, read_kv_transfer


class EndLeases:
    """Ends the lease that a request names when its answer is an error, or none. The engine ends those of the requests that reach it, and
    to end a lease twice does no harm."""

    def __init__(self, app: ASGIApp, engine: AsyncLLM):
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        succeeded = False

        async def noting(message: Message) -> None:
            nonlocal succeeded
            if message["type"] == "http.response.start":
                succeeded = message["status"] < 400
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            if not succeeded and isinstance(params := scope.get(PARAM), dict):
                self._end(params)

    def _end(self, params: dict[str, object]) -> None:
        try:
            transfer = read_kv_transfer(params)
        except InvalidRequestError:
            return  # it may be why the request was refused
        if transfer is not None and transfer.remote_engine_id is not None:
            self._engine.end_lease(transfer)
