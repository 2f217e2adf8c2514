"""Rejects requests that can never be scheduled, or not soon, with the numbers, instead of letting them wait for ever."""

import time
from collections.abc import Collection, Iterable

from jaxllm.config import SchedulerOptions
from jaxllm.errors import ConfigError, InvalidRequestError, OverloadedError
from jaxllm.request import EngineCoreRequest, Request
from jaxllm.scheduler.admission import ChunkRoom
from jaxllm.scheduler.kv_cache_manager import KVCacheManager
from jaxllm.scheduler.waiting_queue import WaitingQueue

_MAX_RETRY_AFTER_SECONDS = 60


def check_options(options: SchedulerOptions, max_model_len: int) -> None:
    """Raise ConfigError if options are unresolved or contradict each other."""
    if options.max_num_seqs is None or options.max_num_batched_tokens is None:
        raise ConfigError("max_num_seqs and max_num_batched_tokens must be resolved before a scheduler is made")
    if options.enable_chunked_prefill:
        return
    if options.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"without chunked prefill a step must hold a whole request: max_num_batched_tokens is "
            f"{options.max_num_batched_tokens}, max_model_len is {max_model_len}"
        )
    if options.long_prefill_token_threshold:
        raise ConfigError(
            f"long_prefill_token_threshold is {options.long_prefill_token_threshold}, but enable_chunked_prefill is off: "
            "the threshold cuts prompts into chunks"
        )


def check_items(request: Request, rooms: Iterable[ChunkRoom]) -> None:
    """Raise InvalidRequestError if the prompt has an item that no room computes."""
    room_of = {kind: room for room in rooms for kind in room.item_kinds}
    for item in request.spec.items:
        if item.kind not in room_of:
            raise InvalidRequestError(
                f"prompt has an item of kind {item.kind!r} at position {item.position}; this engine computes "
                f"{' and '.join(sorted(room_of)) or 'text alone'}",
                "prompt",
            )
        room_of[item.kind].check(item)


def check_servable(request: Request, manager: KVCacheManager, max_model_len: int) -> None:
    """Raise InvalidRequestError if the request could not run even alone."""
    num_prompt, num_usable = request.num_prompt_tokens, manager.pool.num_usable_blocks
    if num_prompt == 0:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    is_pooling = request.pooling_params is not None
    if is_pooling and num_prompt > max_model_len:
        raise InvalidRequestError(
            f"prompt has {num_prompt} tokens, the model takes {max_model_len}; shorten it, pass truncate_prompt_tokens or raise "
            "--max-model-len",
            "prompt",
        )
    if num_prompt >= max_model_len and not is_pooling:
        raise InvalidRequestError(
            f"prompt has {num_prompt} tokens, the model takes {max_model_len} with at least 1 of output; "
            "shorten it or raise --max-model-len",
            "prompt",
        )
    # The last token is never computed, so it needs no slot.
    num_tokens = num_prompt if is_pooling else min(max_model_len, request.max_num_tokens) - 1
    num_blocks = manager.num_blocks_for(num_tokens)
    if num_blocks > num_usable:
        raise InvalidRequestError(
            f"prompt of {num_prompt} tokens with its output needs up to {num_blocks} blocks of the KV cache, which has "
            f"{num_usable}; shorten it, lower max_tokens or enlarge the cache",
            "prompt" if manager.num_blocks_for(num_prompt) > num_usable else "max_tokens",
        )


def check_room(
    request: Request, waiting: WaitingQueue, unfinished: Collection[Request], options: SchedulerOptions, num_seats: int
) -> None:
    """Raise OverloadedError if the waiting queue is full, or unfinished requests hold too many bytes of items. `num_seats` of the waiting
    requests fit into the next step."""
    num_queued, num_tokens = len(waiting) - num_seats, waiting.num_prompt_tokens
    most, most_tokens = options.max_num_queued_reqs, options.max_num_queued_tokens
    if most is not None and num_queued >= most:
        limit = "max_num_queued_reqs"
        what = f"{max(0, num_queued)} requests wait already and at most {most} may (--max-num-queued-reqs)"
    elif most_tokens is not None and len(waiting) and num_tokens + request.num_prompt_tokens > most_tokens:
        limit = "max_num_queued_tokens"
        what = (
            f"{num_tokens} prompt tokens wait already, the request has {request.num_prompt_tokens} "
            f"and at most {most_tokens} may wait (--max-num-queued-tokens)"
        )
    elif (found := excess_items(request.spec, (each.spec for each in unfinished), options.max_queued_image_gb)) is not None:
        limit, what = "max_queued_image_gb", found
    else:
        return
    # Estimate: a new request waits about as long as the first in the queue has waited.
    waited_seconds = time.monotonic() - waiting.peek().queued_at if len(waiting) else 0.0
    seconds = max(1, min(_MAX_RETRY_AFTER_SECONDS, round(waited_seconds)))
    raise OverloadedError(f"the engine is overloaded: {what}; try again in {seconds} s", seconds, limit)


def excess_items(request: EngineCoreRequest, unfinished: Iterable[EngineCoreRequest], most_gb: float | None) -> str | None:
    """Describe that the items of a request exceed most_gb GiB together with those of others; None: they do not. One request alone is never
    too large."""
    if not request.items or most_gb is None:
        return None
    before = [*unfinished]
    others, both, own = (_item_bytes(requests) for requests in (before, [*before, request], [request]))
    if not 0 < others < both > most_gb * 2**30:
        return None
    return (
        f"unfinished requests hold {others / 2**30:.1f} GiB of images, the request has {own / 2**30:.1f} GiB and at most "
        f"{most_gb:g} GiB may be held (--max-queued-image-gb)"
    )


def _item_bytes(requests: Iterable[EngineCoreRequest]) -> int:
    """Bytes of the contents of requests' items. Answers to one prompt may share them."""
    sizes = {id(item.payload): len(item.payload) for request in requests for item in request.items}
    return sum(sizes.values())
