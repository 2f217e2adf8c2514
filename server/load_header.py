"""The header `endpoint-load-metrics` (ORCA), which reports the engine's load to balancers with each answer. Pure ASGI."""

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import EngineError

ASKED_BY, TOLD_BY = "endpoint-load-metrics-format", "endpoint-load-metrics"


class LoadHeader:
    """Adds the header to answers of /v1 whose request asks for TEXT or JSON."""

    def __init__(self, app: ASGIApp, engine: AsyncLLM):
        self._app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        format = Headers(scope=scope).get(ASKED_BY, "").upper()

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start" and (found := await self._text(format)) is not None:
                MutableHeaders(scope=message)[TOLD_BY] = found
            await send(message)

        await self._app(scope, receive, telling if format in ("TEXT", "JSON") else send)

    async def _text(self, format: str) -> str | None:
        try:
            load = await self._engine.load()
        except EngineError:
            return None
        metrics = {"kv_cache_usage_perc": round(load.cache_usage, 4), "num_requests_waiting": load.num_waiting}
        if format == "JSON":
            return f"JSON {msgspec.json.encode({'named_metrics': metrics}).decode()}"
        return "TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
