"""POST /v1/responses, and operations on stored responses."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response

from server.body import read_body
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.errors import ApiError
from server.named_events import encoded, named_event, named_events
from server.openapi import json_body
from server.owner import owner_of
from server.protocol.responses import ResponsesRequest
from server.responses.input_items import Order, page_of
from server.responses.service import ResponsesService, Run
from server.responses.store import ResponseStore
from server.sse import EventStream, unless_disconnected

router = APIRouter(tags=["OpenAI"])


def install(app: FastAPI, context: ServerContext) -> ResponsesService:
    """Install the response store. Not available with several HTTP processes: the next request may reach another one."""
    options = context.options
    is_alone = options.network.api_server_count == 1
    store = ResponseStore(options.limits.max_stored_responses if is_alone else 0, options.limits.max_stored_response_bytes)
    app.state.responses = ResponsesService(context, store)
    return app.state.responses


@router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer input items with output items."""
    context, service = context_of(request), _service_of(request)
    body = await read_body(request, ResponsesRequest)
    limit = Deadline(context.time_limit(body.timeout))
    run = await service.prepare(body, owner_of(request), request_id_of(request, body.request_id), limit)
    if body.background:
        background = service.start(run)
        return _event_stream(context, service.follow(background)) if body.stream else _reply(run.response)
    if body.stream:
        return _event_stream(context, _as_bytes(service, run))
    return _reply(await unless_disconnected(request.receive, service.whole(run)))


@router.post("/v1/responses/input_tokens", openapi_extra=json_body(ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """How many tokens the input has, without answering it."""
    body = await read_body(request, ResponsesRequest)
    num_tokens = await _service_of(request).count(body, owner_of(request))
    return _reply({"object": "response.input_tokens", "input_tokens": num_tokens})


@router.get("/v1/responses/{response_id}")
async def retrieve_response(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=-1)] = -1,
) -> Response:
    """A stored response, or the events of one that was made with background and stream."""
    service = _service_of(request)
    if stream:
        return _event_stream(context_of(request), service.events(response_id, owner_of(request), starting_after))
    return _reply(service.retrieve(response_id, owner_of(request)))


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Order = "desc",
) -> Response:
    """The input items of a stored response, page by page."""
    items = _service_of(request).input_items(response_id, owner_of(request))
    return _reply(page_of(items, after=after, limit=limit, order=order))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response."""
    return _reply(await _service_of(request).cancel(response_id, owner_of(request)))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a response."""
    await _service_of(request).delete(response_id, owner_of(request))
    return _reply({"id": response_id, "object": "response", "deleted": True})


def _service_of(request: Request) -> ResponsesService:
    return request.app.state.responses


def _reply(value: Any) -> Response:
    return Response(encoded(value), media_type="application/json")


async def _as_bytes(service: ResponsesService, run: Run) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(service.stream(run)) as updates:
        async for events in updates:
            yield named_events(events)


def _event_stream(context: ServerContext, pieces: AsyncGenerator[bytes, None]) -> EventStream:
    seconds = context.options.replies.sse_keep_alive_interval
    return EventStream(pieces, keep_alive_seconds=seconds, error_event=_error_event)


def _error_event(error: ApiError) -> bytes:
    return named_event({"type": "error", "code": error.code, "message": str(error), "param": error.param, "sequence_number": 0})
