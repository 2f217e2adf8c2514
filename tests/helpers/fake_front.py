"""Fronts over a fake engine core whose requests say a given text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.request import EngineCoreRequest
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.fake_engine_core import FakeEngineCore


def fake_core(
    directory: Path, script: str | Callable[[EngineCoreRequest], Sequence[int]] = "one two three", **options: Any
) -> FakeEngineCore:
    """A core for the tokenizer of a directory. A script that is a text is said by every request, and then EOS."""
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
    """A script that says the prompt's last token, then EOS."""
    return [request.prompt_token_ids[-1], request.eos_token_ids[0]]
