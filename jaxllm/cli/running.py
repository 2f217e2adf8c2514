"""The engine of the commands, created with progress output or planned for --dry-run, and a model's default sampling."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxllm.config import EngineConfig
from jaxllm.log import info_once
from jaxllm.progress import Progress
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.async_llm import AsyncLLM
    from jaxllm.llm import LLM
    from jaxllm.lora_request import LoRARequest

DEFAULT_MAX_TOKENS = 256


@contextlib.contextmanager
def opened_llm(options: Mapping[str, Any], progress: Progress, lora_request: "LoRARequest | None" = None) -> Iterator["LLM"]:
    """The engine with an adapter; at the end it is shut down."""
    llm = open_llm(options, progress)
    try:
        if lora_request is not None:
            llm.add_lora(lora_request)
        with progress:
            yield llm
    finally:
        llm.shutdown()


def open_llm(options: Mapping[str, Any], progress: Progress) -> "LLM":
    """Load the model and make the engine."""
    from jaxllm.llm import LLM

    with progress:
        return LLM.from_config(EngineConfig.from_options(**options), progress=progress)


def open_async_llm(options: Mapping[str, Any], progress: Progress) -> "AsyncLLM":
    """Load the model and make the engine for asyncio."""
    from jaxllm.async_llm import AsyncLLM

    with progress:
        return AsyncLLM(EngineConfig.from_options(**options), progress=progress)


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


def dry_run(options: Mapping[str, Any]) -> int:
    """Print what an engine would be, without loading weights. Returns the exit code."""
    from jaxllm.engine_plan import plan_engine

    if options.get("chat_template") is not None:
        from jaxllm.text.chat_template import load_chat_template  # imports Jinja

        load_chat_template(options["chat_template"])
    plan = plan_engine(EngineConfig.from_options(**options))
    print(f"model: {plan.config.model.model} ({plan.model_config.architecture}, {plan.model_config.dtype})")
    defaults = EngineConfig().flat()
    for name, value in plan.config.flat().items():
        if value != defaults[name]:
            print(f"{name}: {value}")
    print(plan.describe_memory())
    if plan.fault is not None:
        raise plan.fault
    return 0
