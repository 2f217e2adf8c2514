"""jaxllm: an LLM inference engine on JAX. Names are imported when first used, so `import jaxllm` costs nothing."""

import importlib
import typing

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "jaxllm.llm",
    "LLMEngine": "jaxllm.llm_engine",
    "AsyncLLM": "jaxllm.async_llm",
    "AsyncLLMEngine": "jaxllm.async_llm",
    "EngineArgs": "jaxllm.engine_args",
    "AsyncEngineArgs": "jaxllm.engine_args",
    "TextPrompt": "jaxllm.text.input_processor",
    "TokensPrompt": "jaxllm.text.input_processor",
    "SamplingParams": "jaxllm.sampling_params",
    "BeamSearchParams": "jaxllm.sampling_params",
    "PoolingParams": "jaxllm.pooling_params",
    "LoRARequest": "jaxllm.lora_request",
    "RequestOutputKind": "jaxllm.sampling_params",
    "StructuredOutputsParams": "jaxllm.structured_outputs",
    "GuidedDecodingParams": "jaxllm.structured_outputs",
    "EngineConfig": "jaxllm.config",
    "RequestOutput": "jaxllm.outputs",
    "CompletionOutput": "jaxllm.outputs",
    "Logprob": "jaxllm.outputs",
    "PoolingRequestOutput": "jaxllm.outputs",
    "EmbeddingRequestOutput": "jaxllm.outputs",
    "ScoringRequestOutput": "jaxllm.outputs",
}
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> typing.Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
