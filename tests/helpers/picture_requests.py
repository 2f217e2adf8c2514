"""The prompts of goldens with pictures as requests of an engine."""

from dataclasses import replace
from typing import Any

import msgspec

from jaxllm.media.payload import pack
from jaxllm.model_parts import Vision
from jaxllm.request import EngineCoreRequest
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
