"""Reads and prepares the images, videos and audio of conversations, never in the event loop."""

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import InvalidRequestError
from jaxllm.media import Media, ProcessedMedia
from jaxllm.media.addresses import MediaReader, is_remote
from jaxllm.request_options import placement
from jaxllm.text.chat_media import A, MediaRef, split_media
from jaxllm.text.prompt_media import MAX_THREADS, by_kind
from server.options import LimitOptions
from server.prompts import too_long
from server.request_bodies import BodyMemory


class TakenImages(NamedTuple):
    """A conversation whose images are ready."""

    messages: list[dict[str, Any]]
    """With a mark in place of each image, for the chat template."""
    images: list[ProcessedMedia]
    """Items of each kind, in their order."""
    kinds: Sequence[str] = ()
    """Their kinds, in the order of the messages."""


class ChatImages:
    """Reads images from where requests say they are, and has them prepared for the engine's model."""

    def __init__(self, engine: AsyncLLM, limits: LimitOptions):
        options = engine.config.multimodal
        self._media = engine.input_processor.media
        self._max_tokens = engine.max_model_len
        self._turns: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        """Of each client: it has no more images waiting for the threads than these take, so that others' soon get one."""
        self._reader = MediaReader(options, on_fetched=self._media.counts.add_fetched)
        self._options = options
        self._memory = BodyMemory(limits)
        """Memory of fetched images, which no body counts."""

    def close(self) -> None:
        """End its threads."""
        self._reader.close()

    async def taken(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any] | None, *, counted: bool = False
    ) -> TakenImages:
        """Take the images out of a conversation. `kwargs`: mm_processor_kwargs of the request.

        A `uuid` is its client's own. Raises InvalidRequestError, whose param is the image's part, or with `counted` such as "image 2",
        MediaFetchError, or ApiError while too much is fetched for others.
        """
        self._media.check_trusted(kwargs)
        marked, references = split_media(messages)
        if not references:
            return TakenImages(marked, [])
        if counted:
            references = [replace(each, name=f"image {place}") for place, each in enumerate(references, 1)]
        name = references[0].name
        if not self._media.kinds:
            raise InvalidRequestError(
                f"there is {A[references[0].kind]} at {name}, but this model takes text alone; leave it out", name
            )
        self._media.check_count([each.kind for each in references], name)
        client = placement().client
        num_bytes = sum(self._options.max_bytes(each.kind) for each in references if is_remote(each))
        give_back = await self._memory.take(client, min(num_bytes, self._memory.max_bytes // 2))
        try:
            own = [replace(each, uuid=None if each.uuid is None else f"{client} {each.uuid}") for each in references]
            return TakenImages(marked, await self._prepared(own, kwargs, client), [each.kind for each in references])
        finally:
            give_back()

    async def _prepared(
        self, references: Sequence[MediaRef], kwargs: Mapping[str, Any] | None, client: str
    ) -> list[ProcessedMedia]:
        """Items of each kind, in their order. Ends where they have more tokens than a prompt: small files may be large images."""
        turns, num_tokens = self._turns.setdefault(client, asyncio.Semaphore(MAX_THREADS)), 0

        async def prepared(item: Media) -> ProcessedMedia:
            nonlocal num_tokens
            async with turns:
                [future] = self._media.process([item], kwargs)
                found = await asyncio.wrap_future(future)
            num_tokens += found.num_tokens
            if num_tokens >= self._max_tokens:
                raise too_long(num_tokens, self._max_tokens, at_least=True, param="messages")
            return found

        items = by_kind(await self._reader.read(references))
        tasks = [asyncio.ensure_future(prepared(item)) for kind in items.values() for item in kind]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
