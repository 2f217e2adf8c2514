"""Fake engine cores whose requests say a given text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler_output import TokenLogprobs
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.fake_engine_core import FakeEngineCore


def fake_core(
    directory: Path, script: str | Callable[[EngineCoreRequest], Sequence[int]] = "one two three", **options: Any
) -> FakeEngineCore:
    """A core for the tokenizer of a directory. If the script is a text, every request outputs it, and then EOS."""
    tokenizer = load_tokenizer(directory)
    core_options = {name: options.pop(name) for name in ("max_model_len", "tokens_per_step") if name in options}
    if isinstance(script, str):
        assert tokenizer.eos_token_id is not None
        ids = [*tokenizer.encode(script, add_special_tokens=False), tokenizer.eos_token_id]
        say: Callable[[EngineCoreRequest], Sequence[int]] = lambda request: ids  # noqa: E731
    else:
        say = script
    config = EngineConfig.from_options(model=str(directory), **options)
    return FakeEngineCore(say, vocab_size=tokenizer.vocab_size, config=config, **core_options)


def echo(request: EngineCoreRequest) -> Sequence[int]:
    """A script that outputs the prompt's last token, then EOS."""
    return [request.prompt_token_ids[-1], request.eos_token_ids[0]]


def guessing_core(directory: Path, text: str = "", **options: Any) -> FakeEngineCore:
    """A core whose requests say the likeliest token after their prompt, by logprobs that depend on all of it; EOS is often likely.

    By far the likeliest way to go on from the first prompt that comes is `text`.
    """

    def ranked(request: EngineCoreRequest) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, likeliest first, with their logprobs; of those alone that are allowed, if not all are."""
        token_ids, allowed = request.prompt_token_ids, request.sampling_params.allowed_token_ids
        logits = np.random.default_rng(token_ids).normal(size=core.model_config.vocab_size).astype(np.float32)
        logits[eos_token_id] += 2.5
        place = len(token_ids) - len(core.requests[0].prompt_token_ids)
        if 0 <= place < len(wanted):
            logits[wanted[place]] += 30
        logprobs = logits - np.log(np.exp(logits).sum())
        order = np.argsort(-logprobs)
        order = order if allowed is None else order[np.isin(order, allowed)]
        return order.astype(np.int32), logprobs[order]

    def logprobs(request: EngineCoreRequest, new_token_ids: list[int], count: int) -> TokenLogprobs:
        ids, values = (np.concatenate([row[:1], row[:count]])[None] for row in ranked(request))
        return TokenLogprobs(ids, values, np.ones(1, np.int32))

    core = fake_core(directory, lambda request: [int(ranked(request)[0][0])], **options)
    tokenizer = load_tokenizer(directory)
    eos_token_id = tokenizer.eos_token_id
    wanted = [*tokenizer.encode(text, add_special_tokens=False), eos_token_id] if text else []
    core.logprobs = logprobs  # type: ignore[method-assign]
    return core
