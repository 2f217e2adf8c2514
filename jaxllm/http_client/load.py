"""Sends prompts to a server at given times, and records answers with their times. `results` evaluates them."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from jaxllm.http_client.client import ServerClient, ServerError
from jaxllm.http_client.datasets import LoadPrompt

Backend = Literal["openai", "openai-chat", "openai-embeddings"]
ENDPOINTS: Mapping[str, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}


@dataclass(slots=True)
class Outcome:
    """The outcome of one request. Times are in seconds of `time.perf_counter`."""

    start: float
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    """From the server's usage; None if it reports none."""
    token_times: list[float] = field(default_factory=list)
    """Arrival time of each chunk with output; a chunk may hold several tokens."""
    text_parts: list[str] = field(default_factory=list)
    error: str | None = None
    is_final_error: bool = False

    @property
    def succeeded(self) -> bool:
        return self.error is None

    @property
    def end(self) -> float:
        """Arrival time of the last output."""
        return self.token_times[-1] if self.token_times else self.start

    @property
    def text(self) -> str:
        return "".join(self.text_parts)


@dataclass(frozen=True)
class RequestMaker:
    """Turns prompts into request bodies of one backend."""

    backend: Backend
    model: str
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Merged into every body; overrides its fields."""
    ignore_eos: bool = False

    @property
    def streams(self) -> bool:
        """Whether answers are streamed."""
        return self.backend != "openai-embeddings"

    def body(self, prompt: LoadPrompt) -> bytes:
        """The JSON of one request."""
        model = prompt.model or self.model
        if self.backend == "openai-embeddings":
            return msgspec.json.encode({"model": model, "input": prompt.prompt, **self.extra_body})
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if self.backend == "openai":
            body |= {"prompt": prompt.prompt, "max_tokens": prompt.num_output_tokens}
        else:
            said = prompt.prompt
            messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
            body |= {"messages": messages, "max_completion_tokens": prompt.num_output_tokens}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode({**body, **self.extra_body})


async def ask(
    client: ServerClient,
    path: str,
    body: bytes,
    *,
    streams: bool = True,
    num_prompt_tokens: int | None = None,
    request_id: str | None = None,
) -> Outcome:
    """Send one request and read its stream, or wait for an answer that is not streamed.

    Never raises ServerError: the outcome holds it.
    """
    headers = None if request_id is None else {"X-Request-Id": request_id}
    outcome = Outcome(time.perf_counter(), num_prompt_tokens)
    times, parts = outcome.token_times, outcome.text_parts
    has_choices = False
    try:
        if not streams:
            await _ask_at_once(client, path, body, headers, outcome)
            return outcome
        async for chunks in client.stream(path, body, headers):
            now = time.perf_counter()
            for chunk in chunks:
                if chunk.choices:
                    has_choices = True
                    choice = chunk.choices[0]
                    if not choice.only_opens:
                        times.append(now)
                        parts.append(choice.visible)
                if (usage := chunk.usage) is not None:
                    if usage.prompt_tokens is not None:
                        outcome.num_prompt_tokens = usage.prompt_tokens
                    if usage.completion_tokens is not None:
                        outcome.num_output_tokens = usage.completion_tokens
        if not has_choices:
            outcome.error = "the stream ended without any output"
    except ServerError as error:
        outcome.error = str(error)
        outcome.is_final_error = error.is_final
    return outcome


async def _ask_at_once(
    client: ServerClient, path: str, body: bytes, headers: Mapping[str, str] | None, outcome: Outcome
) -> None:
    """Send a request whose answer is not streamed and has no tokens: an embedding."""
    try:
        answer = msgspec.json.decode(await client.post(path, body, headers), type=_Whole)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ServerError(f"the answer to {path} makes no sense: {error}") from None
    outcome.token_times.append(time.perf_counter())
    outcome.num_output_tokens = 0
    if answer.usage.prompt_tokens is not None:
        outcome.num_prompt_tokens = answer.usage.prompt_tokens


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Whole(msgspec.Struct):
    data: list[msgspec.Raw]
    usage: _Usage = msgspec.field(default_factory=_Usage)


@dataclass(frozen=True)
class LoadRun:
    """All outcomes, in the order of the prompts, and the time from the first start to the last end."""

    outcomes: list[Outcome]
    seconds: float


async def run_load(
    client: ServerClient,
    maker: RequestMaker,
    path: str,
    prompts: Sequence[LoadPrompt],
    times: Sequence[float],
    *,
    max_concurrency: int | None = None,
    request_id_prefix: str | None = None,
    done: Callable[[], None] = lambda: None,
) -> LoadRun:
    """Start each prompt at its time (seconds from the beginning), with at most `max_concurrency` at once.

    Calls `done` after each.
    """
    bodies = [maker.body(prompt) for prompt in prompts]
    places = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None

    async def one(index: int) -> Outcome:
        if places is not None:
            await places.acquire()
        try:
            request_id = None if request_id_prefix is None else f"{request_id_prefix}{index}"
            return await ask(
                client,
                path,
                bodies[index],
                streams=maker.streams,
                num_prompt_tokens=prompts[index].num_prompt_tokens,
                request_id=request_id,
            )
        finally:
            if places is not None:
                places.release()
            done()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for index, start in enumerate(times):
            if (delay := began + start - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            tasks.append(group.create_task(one(index)))
    return LoadRun([task.result() for task in tasks], time.perf_counter() - began)


async def first_model(client: ServerClient, timeout_seconds: float, pause_seconds: float = 1.0) -> str:
    """The first model that the server lists; waits while it cannot be reached, or loads. Raises ServerError or ConfigError."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return str((await client.model_card(None))["id"])
        except ServerError as error:
            if error.is_final or time.monotonic() > deadline:
                raise
            await asyncio.sleep(pause_seconds)


async def wait_until_ready(
    client: ServerClient,
    path: str,
    body: bytes,
    timeout_seconds: float,
    *,
    streams: bool = True,
    pause_seconds: float = 1.0,
) -> Outcome:
    """Retry until an answer comes. Raises ServerError after the time limit, or at once if the request itself is refused."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        outcome = await ask(client, path, body, streams=streams)
        if outcome.error is None:
            return outcome
        if outcome.is_final_error or time.monotonic() + pause_seconds > deadline:
            raise ServerError(f"the server does not answer a first request: {outcome.error}")
        await asyncio.sleep(pause_seconds)
