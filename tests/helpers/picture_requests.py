"""Requests of an engine with images: the prompts of goldens, and runs of text with images between them."""

from dataclasses import replace
from typing import Any

import msgspec

from jaxllm.media.payload import pack
from jaxllm.model_parts import Vision
from jaxllm.request import EngineCoreRequest, PromptItem
from tests.helpers import engines, pictures


def golden_requests(name: str, vision: Vision, **params: Any) -> list[EngineCoreRequest]:
    """Greedy, of as many tokens as the golden has, with other parameters of sampling."""
    golden = pictures.golden(name)
    found = []
    for number, result in enumerate(golden.results):
        prepared = [pictures.patches(pictures.picture(*golden.pictures[i]), vision) for i in result.pictures]
        token_ids, items = pictures.expanded(result.prompt, [grid for grid, _ in prepared], vision)
        named = [
            msgspec.structs.replace(item, payload=pack(*patches), content_hash=bytes([i]))
            for item, patches, i in zip(items, prepared, result.pictures, strict=True)
        ]
        made = engines.request(f"{number}", token_ids, max_tokens=len(result.tokens), **params)
        found.append(replace(made, items=tuple(named)))
    return found


def mixed_request(
    ids: tuple[int, int, int], name: str, *parts: int | PromptItem, max_tokens: int = 8, **params: Any
) -> EngineCoreRequest:
    """A prompt of runs of text, of so many tokens, and images. ids: of the tokens before, of and behind an image."""
    start, placeholder, end = ids
    prompt: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            prompt += [(7 * len(prompt) + i) % 250 for i in range(part)]
        else:
            prompt.append(start)
            items.append(msgspec.structs.replace(part, position=len(prompt)))
            prompt += [placeholder] * part.num_tokens + [end]
    return replace(engines.request(name, prompt, max_tokens=max_tokens, **params), items=tuple(items))
