"""Calls of `LLM` that compute vectors: embed, encode, score."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxllm.batches import one_each, prompt_list
from jaxllm.errors import InvalidRequestError
from jaxllm.lora_request import LoRARequest
from jaxllm.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxllm.pooling_params import PoolingParams, PoolingTask
from jaxllm.scoring import as_texts, cosine, pairs
from jaxllm.text.input_processor import Prompt


class PoolingCalls:
    """Needs `_requests_or_later` and `_finish`, which check prompts and run their requests."""

    _requests_or_later: Callable[..., list[Any]]
    _finish: Callable[..., list[Any]]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute one vector per prompt, in order. Prompts and errors: as for `generate`."""
        return [
            EmbeddingRequestOutput(
                output.request_id,
                output.prompt_token_ids,
                EmbeddingOutput(output.outputs.data.tolist()),
                output.num_cached_tokens,
            )
            for output in self.encode(
                prompts, pooling_params, pooling_task="embed", use_tqdm=use_tqdm, lora_request=lora_request
            )
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Compute the vector of each prompt (task embed) or of each of its tokens (token_embed), as NumPy arrays.

        The parameters or `pooling_task` set the task. Prompts and errors: as for `generate`.
        """
        all_prompts = prompt_list(prompts)
        params_list = one_each(pooling_params or PoolingParams(), len(all_prompts), "pooling_params")
        tasks = [_with_task(params, pooling_task) for params in params_list]
        requests = self._requests_or_later(all_prompts, tasks, None, lora_request)
        return self._finish(requests, use_tqdm)

    def score(
        self,
        data_1: str | Sequence[Prompt],
        data_2: str | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ScoringRequestOutput]:
        """Compute the cosine of the vectors of two texts: one text with each of many, or pair by pair."""
        first, second = as_texts(data_1, "data_1"), as_texts(data_2, "data_2")
        wanted = pairs(len(first), len(second), ("data_1", "data_2"))
        found = self.encode(
            [*first, *second], pooling_params, pooling_task="embed", use_tqdm=use_tqdm, lora_request=lora_request
        )
        scores = []
        for i, j in wanted:
            a, b = found[i], found[len(first) + j]
            score = ScoringOutput(cosine(a.outputs.data, b.outputs.data))
            ids = [*a.prompt_token_ids, *b.prompt_token_ids]
            scores.append(ScoringRequestOutput(b.request_id, ids, score, a.num_cached_tokens + b.num_cached_tokens))
        return scores


def _with_task(params: PoolingParams, task: PoolingTask | None) -> PoolingParams:
    if not isinstance(params, PoolingParams):
        raise InvalidRequestError(f"pooling_params is a {type(params).__name__}, must be PoolingParams", "pooling_params")
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise InvalidRequestError(f"pooling_params has the task {params.task}, but {task} is asked for", "pooling_params")
    return replace(params, task=task)
