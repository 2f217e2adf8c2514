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
    "PromptType": "jaxllm.text.input_processor:Prompt",
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
    "PoolingOutput": "jaxllm.outputs",
    "PoolingRequestOutput": "jaxllm.outputs",
    "EmbeddingOutput": "jaxllm.outputs",
    "EmbeddingRequestOutput": "jaxllm.outputs",
    "ClassificationOutput": "jaxllm.outputs",
    "ClassificationRequestOutput": "jaxllm.outputs",
    "ScoringOutput": "jaxllm.outputs",
    "ScoringRequestOutput": "jaxllm.outputs",
}
"""The module of each name, and the name there if it differs."""
_NOT_HERE = {
    "ModelRegistry": "model classes of PyTorch cannot be registered; a family is added by an entry point of the group jaxllm.models "
    "or by LLM(model_class='module:name') (docs/HOW_TO_ADD.md)",
    "initialize_ray_cluster": "an engine joins Ray's cluster itself, with distributed_executor_backend='ray'",
}
"""Names of vLLM's package without a counterpart, with the reason."""
__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> typing.Any:
    if name in _NOT_HERE:  # of an AttributeError, `from jaxllm import …` would drop the text
        raise ImportError(f"jaxllm has no {name}: {_NOT_HERE[name]}", name="jaxllm")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    module, _, attribute = _EXPORTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)
