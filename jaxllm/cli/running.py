"""The engine for `generate`, `chat` and `bench`: created with progress output; takes prompts in its own form."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from jaxllm.cli.planning import meant_model
from jaxllm.config import EngineConfig
from jaxllm.errors import ModelLoadError
from jaxllm.log import info_once
from jaxllm.lora_request import LoRARequest
from jaxllm.progress import Progress
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.llm import LLM

Engine = TypeVar("Engine")
DEFAULT_MAX_TOKENS = 256


def open_llm(options: Mapping[str, Any], progress: Progress) -> "LLM":
    """Load the model and make the engine."""
    from jaxllm.llm import LLM

    return _opened(LLM.from_config, options, progress)


@contextlib.contextmanager
def opened_llm(options: Mapping[str, Any], progress: Progress, lora_request: LoRARequest | None = None) -> Iterator["LLM"]:
    """The engine with an adapter; at the end it is shut down and the progress display removed."""
    llm = open_llm(options, progress)
    try:
        if lora_request is not None:
            llm.add_lora(lora_request)
        yield llm
    finally:
        progress.finish()
        llm.shutdown()


def open_async_llm(options: Mapping[str, Any], progress: Progress) -> "AsyncLLM":
    """Load the model and make the engine for asyncio."""
    from jaxllm.async_llm import AsyncLLM

    return _opened(AsyncLLM, options, progress)


def _opened(open_engine: Callable[..., Engine], options: Mapping[str, Any], progress: Progress) -> Engine:
    config = EngineConfig.from_options(**options)
    try:
        return open_engine(config, progress=progress)
    except ModelLoadError as error:
        raise ModelLoadError(f"{error}{meant_model(config.model.model, error)}") from error
    finally:
        progress.finish()  # remove the bar before an error is printed


def default_sampling(llm: "LLM", *, chat: bool) -> SamplingParams:
    """The sampling defaults of a text or a chat, with max_tokens for a few paragraphs where the model gives none."""
    params = chat_sampling(llm) if chat else llm.get_default_sampling_params()
    if params.max_tokens == SamplingParams().max_tokens:
        return dataclasses.replace(params, max_tokens=DEFAULT_MAX_TOKENS)
    return params


def chat_sampling(llm: "LLM") -> SamplingParams:
    """The sampling defaults of a chat, which the log tells."""
    info_once(f"default sampling: {llm.llm_engine.input_processor.generation_config.describe_chats()}")
    return llm.get_default_sampling_params(chat=True)
