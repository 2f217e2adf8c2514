"""Reads and prepares the images and videos of conversations, never in the event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxllm.async_llm import AsyncLLM
from jaxllm.errors import InvalidRequestError
from jaxllm.media import ProcessedMedia
from jaxllm.media.addresses import MediaReader, is_remote
from jaxllm.request_options import placement
from jaxllm.text.chat_media import A, MediaRef, split_media
from jaxllm.text.prompt_media import DATA, KWARGS, by_kind
from server.options import LimitOptions
from server.request_bodies import BodyMemory


class TakenImages(NamedTuple):
    """A conversation whose images are ready."""

    messages: list[dict[str, Any]]
    """With a mark in place of each image, for the chat template."""
    images: list[ProcessedMedia]
    """Those of each kind in their order."""
    kinds: Sequence[str] = ()
    """Their kinds, in the order of the messages."""


class ChatImages:
    """Reads images from where requests say they are, and has them prepared for the engine's model."""

    def __init__(self, engine: AsyncLLM, limits: LimitOptions):
        options = engine.config.multimodal
        self._media = engine.input_processor.media
        self._reader = MediaReader(options)
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
        if not self._media.sees_images:
            raise InvalidRequestError(
                f"there is {A[references[0].kind]} at {name}, but this model takes text alone; leave it out", name
            )
        self._media.check_count([each.kind for each in references], name)
        client = placement().client
        num_bytes = sum(self._options.max_bytes(each.kind) for each in references if is_remote(each))
        give_back = await self._memory.take(client, min(num_bytes, self._memory.max_bytes // 2))
        try:
            own = [replace(each, uuid=None if each.uuid is None else f"{client} {each.uuid}") for each in references]
            return TakenImages(marked, await self._prepared(own, kwargs), [each.kind for each in references])
        finally:
            give_back()

    async def _prepared(self, references: Sequence[MediaRef], kwargs: Mapping[str, Any] | None) -> list[ProcessedMedia]:
        media = await self._reader.read(references)
        submitted = self._media.submit({DATA: by_kind(media), KWARGS: kwargs})
        try:
            return await asyncio.gather(*map(asyncio.wrap_future, submitted))
        finally:
            for each in submitted:
                each.cancel()
