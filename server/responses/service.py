"""Runs requests of the Responses API: prepares, streams, runs them in the background if requested, and stores them."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxllm.log import logger
from jaxllm.request_options import placement
from server.chat_deltas import ChatDelta
from server.chat_service import Conversation, PreparedChat
from server.context import ServerContext
from server.converted import conversation_of, renamed_params
from server.deadline import Deadline
from server.early_errors import after_early_errors
from server.errors import ApiError, as_api_error, bad_request
from server.logprobs import LogprobWriter
from server.named_events import encoded, named_event
from server.protocol.responses import CustomTool, FunctionTool, ResponsesRequest
from server.protocol.sizes import too_many
from server.responses.input_items import with_ids
from server.responses.items import checking
from server.responses.output import Event, ResponseWriter, new_id, usage_object
from server.responses.store import ResponseStore, StoredResponse
from server.responses.to_chat import chat_fields, check, wants_logprobs
from server.responses.truncation import longest_that_fits
from server.work import ORIGIN, in_one_piece

RENAMED = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
    "logprobs": "top_logprobs",
}
SWITCHED_OFF = "this server stores no responses (that takes --max-stored-responses and a single --api-server-count)"
MAX_BACKGROUND_RUNS = 1024
"""Maximum number of background runs at once; the engine's own queue may be shorter."""


@dataclass
class Run:
    """One response that is being generated."""

    owner: str
    request: ResponsesRequest
    input_items: list[dict[str, Any]]
    chat: PreparedChat
    writer: ResponseWriter
    limit: Deadline
    logprobs: LogprobWriter | None
    """None: not requested."""
    waiting_logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Logprobs of tokens whose text is still pending."""

    @property
    def response(self) -> dict[str, Any]:
        """The response so far."""
        return self.writer.response

    def events_of(self, deltas: Sequence[ChatDelta]) -> list[Event]:
        """Process an update from the model; return its events."""
        events: list[Event] = []
        for delta in deltas:
            if delta.reasoning:
                events += self.writer.reasoning(delta.reasoning)
            if self.logprobs is not None and delta.logprobs is not None and (delta.content or not delta.reasoning):
                self.waiting_logprobs += self.logprobs.chat(delta.token_ids, delta.logprobs, self.request.top_logprobs or 0)
            if delta.content:
                ready, self.waiting_logprobs = self.waiting_logprobs, []
                events += self.writer.text(delta.content, ready)
            for call in delta.tool_calls:
                if call.id is not None:
                    events += self.writer.call(call.index, call.id, call.name or "")
                if call.arguments:
                    events += self.writer.arguments(call.index, call.arguments)
            if delta.finish_reason is not None:
                cut = "max_output_tokens" if delta.finish_reason == "length" else None
                self.response.update(self.chat.kv_transfer)
                events += self.writer.finish(usage=self._usage(), incomplete_reason=cut, logprobs=self.waiting_logprobs)
        return events

    def _usage(self) -> dict[str, Any]:
        usage = self.chat.usage
        return usage_object(
            usage.prompt_tokens,
            usage.cached_tokens or 0,
            usage.created_cache_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens or 0,
        )


@dataclass
class BackgroundRun:
    """A run that continues without its client."""

    run: Run
    task: "asyncio.Task[None] | None" = None
    events: list[bytes] = field(default_factory=list)
    """All events so far, if the request asked for a stream."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set and replaced with each event."""
    is_done: bool = False

    def tell(self, events: Sequence[Event]) -> None:
        """Append events and wake up the readers."""
        self.events += map(named_event, events)
        self._wake()

    def end(self) -> None:
        """End of the events."""
        self.is_done = True
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class ResponsesService:
    """One instance per application."""

    def __init__(self, context: ServerContext, store: ResponseStore):
        self._context = context
        self._store = store
        self._background: dict[str, BackgroundRun] = {}

    # Running

    async def prepare(self, request: ResponsesRequest, owner: str, request_id: str, limit: Deadline) -> Run:
        """Check the whole request; all request errors are found here. Raises ApiError or InvalidRequestError."""
        check(request)
        async with limit:
            adapter = await self._context.adapter_of(request.model)
        self._check_store(request)
        new_items = await self._context.work.unless_small(checking(request.input))
        history, num_bytes = self._history(request.previous_response_id, owner)
        async with limit:
            with renamed_params(RENAMED):
                chat = await self._prepared(request, [*history, *new_items], request_id, num_bytes, adapter)
        response = self._response_object(request, chat)
        tokenizer = self._context.engine.input_processor.tokenizer
        logprobs = LogprobWriter(tokenizer, as_ids=False) if wants_logprobs(request) else None
        custom = {tool["name"] for tool in request.tools or () if tool["type"] == "custom"}
        return Run(owner, request, new_items, chat, ResponseWriter(response, custom), limit, logprobs)

    async def count(self, request: ResponsesRequest, owner: str) -> int:
        """Number of input tokens, earlier turns included. Raises ApiError or InvalidRequestError."""
        check(request)
        await self._context.adapter_of(request.model)
        new_items = await self._context.work.unless_small(checking(request.input))
        history, num_bytes = self._history(request.previous_response_id, owner)
        with renamed_params(RENAMED):
            conversation = await self._converted(request, [*history, *new_items], "input_tokens", num_bytes)
            return len((await self._context.chat.render(conversation)).token_ids)

    async def _converted(
        self, request: ResponsesRequest, items: list[dict[str, Any]], request_id: str, num_bytes: int
    ) -> Conversation:
        """The conversation of items with this size. Raises ApiError."""
        if len(items) > (longest := self._context.engine.max_model_len):
            raise too_many(len(items), "input", longest)

        def convert() -> Conversation:
            return conversation_of(chat_fields(request, items), self._context, request_id, "responses")

        conversation = await self._context.work.unless_small(in_one_piece(convert), num_bytes=num_bytes)
        conversation.num_bytes = num_bytes
        return conversation

    async def stream(self, run: Run) -> AsyncGenerator[list[Event], None]:
        """Yield a run's events from beginning to end, and store the response. Closing it aborts the run.

        A failure before the first event is raised (ApiError, EngineError or EngineDeadError); a later one is the last event.
        """
        has_begun = False
        try:
            async with contextlib.aclosing(after_early_errors(self._updates(run))) as updates:
                async for deltas in updates:
                    has_begun = True
                    if events := run.writer.start() if deltas is None else run.events_of(deltas):
                        yield events
        except Exception as error:
            if not has_begun:
                if not run.request.background:
                    raise
                yield run.writer.start()
            told = as_api_error(error)
            if told.code == "internal_error":
                logger.error("a response failed", exc_info=error)
            yield run.writer.fail(str(told))
        self._keep(run)

    async def whole(self, run: Run) -> dict[str, Any]:
        """The finished response. Raises ApiError, EngineError or EngineDeadError."""
        async with contextlib.aclosing(self._updates(run)) as updates:
            async for deltas in updates:
                run.events_of(deltas)
        self._keep(run)
        return run.response

    async def _updates(self, run: Run) -> AsyncGenerator[list[ChatDelta], None]:
        with self._context.running():
            async with contextlib.aclosing(run.limit.applied(self._context.chat.stream(run.chat))) as updates:
                async for deltas in updates:
                    yield deltas

    # Background runs

    def start(self, run: Run) -> BackgroundRun:
        """Start a background run. Raises ApiError if too many are running."""
        if len(self._background) >= MAX_BACKGROUND_RUNS:
            raise ApiError(503, f"{MAX_BACKGROUND_RUNS} responses run in the background already; try later", code="overloaded")
        background = BackgroundRun(run)
        run.response["status"] = "queued"
        self._background[run.response["id"]] = background
        counted = contextlib.ExitStack()
        counted.enter_context(self._context.clients.counted(placement().client, limited=False))  # its HTTP request was limited
        background.task = asyncio.create_task(self._run_in_background(background))
        background.task.add_done_callback(lambda _: counted.close())
        background.task.add_done_callback(lambda task: self._end(background, task))
        return background

    async def follow(self, background: BackgroundRun, after: int = -1) -> AsyncGenerator[bytes, None]:
        """Yield the events of a background run as they come, after event number `after`. Closing it does not end the run."""
        place = after + 1
        while True:
            changed = background.changed
            if place < len(background.events):
                events, place = background.events[place:], len(background.events)  # more may arrive during the yield
                yield b"".join(events)
            elif background.is_done:
                return
            else:
                await changed.wait()

    async def _run_in_background(self, background: BackgroundRun) -> None:
        run = background.run
        run.response["status"] = "in_progress"
        async with contextlib.aclosing(self.stream(run)) as updates:
            async for events in updates:
                if run.request.stream:
                    background.tell(events)

    def _end(self, background: BackgroundRun, task: "asyncio.Task[None]") -> None:
        """Called after the last event, or on cancellation, perhaps before the run began."""
        run = background.run
        if task.cancelled():
            run.writer.cancel()
        elif task.exception() is not None:
            logger.error("a response in the background failed", exc_info=task.exception())
            run.writer.fail("the server failed on this request")
        self._keep(run, background.events)
        del self._background[run.response["id"]]
        background.end()

    async def close(self) -> None:
        """Cancel all background runs."""
        for background in list(self._background.values()):
            await self._cancelled(background)

    # Stored responses

    def retrieve(self, response_id: str, owner: str) -> dict[str, Any]:
        """Look up a response. Raises ApiError."""
        background = self._running(response_id, owner)
        return background.run.response if background is not None else self._stored(response_id, owner).response

    def input_items(self, response_id: str, owner: str) -> list[dict[str, Any]]:
        """The input items of a response, oldest first, with the turns before it as far as they are stored. Raises ApiError."""
        background = self._running(response_id, owner)
        entry = self._stored(response_id, owner) if background is None else background.run
        previous = entry.response["previous_response_id"]
        before = None if previous is None else self._store.conversation(previous, owner)
        return with_ids([*(before[0] if before else ()), *entry.input_items], response_id)

    def events(self, response_id: str, owner: str, after: int) -> AsyncGenerator[bytes, None]:
        """Replay the events of a response made with background and stream. Raises ApiError."""
        background = self._running(response_id, owner)
        if background is not None:
            response, is_streamed = background.run.response, bool(background.run.request.stream)
        else:
            entry = self._stored(response_id, owner)
            response, is_streamed = entry.response, bool(entry.events)
            background = BackgroundRun(None, events=list(entry.events), is_done=True)  # type: ignore[arg-type]
        if not is_streamed:
            raise bad_request(
                f"the response {response['id']} was not made with background and stream; it has no events", "stream"
            )
        return self.follow(background, after)

    async def cancel(self, response_id: str, owner: str) -> dict[str, Any]:
        """Cancel a background run; a finished one is unchanged. Raises ApiError."""
        background = self._running(response_id, owner)
        if background is not None:
            await self._cancelled(background)
            return background.run.response
        response = self._stored(response_id, owner).response
        if not response["background"]:
            raise bad_request(
                f"the response {response_id} was not made with background: true; close its connection to end it", "response_id"
            )
        return response

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response; cancel it first if it is running. Raises ApiError."""
        background = self._running(response_id, owner)
        if background is not None:
            await self._cancelled(background)
        elif self._store.get(response_id, owner) is None:
            raise self._not_found(response_id)
        self._store.delete(response_id, owner)

    async def _cancelled(self, background: BackgroundRun) -> None:
        assert background.task is not None
        background.task.cancel()
        await asyncio.wait([background.task])

    def _running(self, response_id: str, owner: str) -> BackgroundRun | None:
        background = self._background.get(response_id)
        return background if background is not None and background.run.owner == owner else None

    def _stored(self, response_id: str, owner: str) -> StoredResponse:
        entry = self._store.get(response_id, owner)
        if entry is None:
            raise self._not_found(response_id)
        return entry

    def _not_found(self, response_id: str) -> ApiError:
        """One error for an id that is unknown, deleted or another owner's; it does not reveal which."""
        why = "(any more)" if self._store.max_responses else f"because {SWITCHED_OFF}"
        return ApiError(404, f"there is no response {response_id[:80]!r} {why}", param="response_id", code="response_not_found")

    def _keep(self, run: Run, events: list[bytes] | None = None) -> None:
        if not run.response["store"]:
            return
        entry = StoredResponse(run.owner, run.response, run.input_items, events or [])
        size = len(encoded([run.response, run.input_items])) + sum(map(len, entry.events))
        if not self._store.put(entry, size):
            logger.warning("a response of %d bytes is larger than the store of responses and is not kept", size)

    # Preparing

    def _check_store(self, request: ResponsesRequest) -> None:
        if self._store.max_responses > 0:
            if request.background and request.store is False:
                raise bad_request("background needs store: true, because its response is fetched later", "background")
            return
        for name in ("store", "background", "previous_response_id"):
            if getattr(request, name):
                raise bad_request(f"{name} cannot be honoured, because {SWITCHED_OFF}", name)

    def _history(self, previous_response_id: str | None, owner: str) -> tuple[list[dict[str, Any]], int]:
        """The items of earlier turns, and the number of bytes of these and of the request."""
        num_bytes = ORIGIN.get().num_bytes
        if previous_response_id is None:
            return [], num_bytes
        if self._running(previous_response_id, owner) is not None:
            raise bad_request("the response of previous_response_id is still being made", "previous_response_id")
        found = self._store.conversation(previous_response_id, owner)
        if found is None:
            raise ApiError(
                404,
                f"the response {previous_response_id[:80]!r}, or one before it, is not stored (any more); send the whole conversation",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found[0], found[1] + num_bytes

    async def _prepared(
        self, request: ResponsesRequest, items: list[dict[str, Any]], request_id: str, num_bytes: int, adapter: str | None
    ) -> PreparedChat:
        """The conversation for the engine; with truncation auto, drops as few of its first turns as needed to fit."""

        async def attempt(kept: list[dict[str, Any]]) -> PreparedChat:
            conversation = await self._converted(request, kept, request_id, num_bytes * len(kept) // max(1, len(items)))
            conversation.adapter = adapter
            return await self._context.chat.prepare(conversation)

        async def attempt_shorter(kept: list[dict[str, Any]]) -> PreparedChat | None:
            try:
                return await attempt(kept)
            except ApiError as error:
                if not _is_too_long(error):
                    raise
                return None

        try:
            return await attempt(items)
        except ApiError as error:
            if request.truncation != "auto" or not _is_too_long(error):
                raise
            if (chat := await longest_that_fits(items, attempt_shorter)) is None:
                raise
            return chat

    def _response_object(self, request: ResponsesRequest, chat: PreparedChat) -> dict[str, Any]:
        """A response before its first token: the request's settings, with the effective values."""
        params = chat.conversation.params
        given = request.model_dump(exclude_unset=True, by_alias=True)
        reasoning = given.get("reasoning") or {}
        text_format = (given.get("text") or {}).get("format") or {"type": "text"}
        return {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": bool(request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "model": self._context.name_for(chat.request),
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": self._store.max_responses > 0 and request.store is not False,
            "temperature": params.temperature,
            "text": {"format": text_format, "verbosity": "medium"},
            "tool_choice": given.get("tool_choice") or ("auto" if request.tools else "none"),
            "tools": [_tool_object(tool) for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
            "metadata": request.metadata or {},
        }


def _tool_object(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "custom":
        return CustomTool.model_validate(tool).model_dump()
    return FunctionTool.model_validate(tool).model_dump()


def _is_too_long(error: ApiError) -> bool:
    return error.code == "context_length_exceeded"
