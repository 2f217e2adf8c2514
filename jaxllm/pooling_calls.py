"""Calls of `LLM` that compute vectors, classes and scores: embed, encode, classify, score."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jaxllm.batches import one_each, prompt_list
from jaxllm.errors import InvalidRequestError
from jaxllm.lora_request import LoRARequest
from jaxllm.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxllm.pooling_params import PoolingParams, PoolingTask
from jaxllm.scoring import as_texts, cosine, pairs
from jaxllm.text.input_processor import Prompt
from jaxllm.text.pairs import PairCut


class PoolingCalls:
    """Needs `_requests_or_later` and `_finish`, which check prompts and run their requests, and the engine's input processor."""

    llm_engine: Any
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
        return self._encoded(prompts, pooling_params, "embed", use_tqdm, lora_request, _embedding)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Compute the vector of each prompt (task embed), of each of its tokens (token_embed), or a number for each class (classify), as
        NumPy arrays.

        The parameters or `pooling_task` set the task. Prompts and errors: as for `generate`.
        """
        return self._encoded(prompts, pooling_params, pooling_task, use_tqdm, lora_request)

    def _encoded(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask | None,
        use_tqdm: bool | Callable[..., Any] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        make: Callable[[PoolingRequestOutput], Any] | None = None,
    ) -> list[Any]:
        """As `encode`; with what `make` returns for each output, called while the device computes later ones."""
        all_prompts = prompt_list(prompts)
        params_list = one_each(pooling_params or PoolingParams(), len(all_prompts), "pooling_params")
        with_task = {id(params): _with_task(params, task) for params in params_list}  # often one for all
        tasks = [with_task[id(params)] for params in params_list]
        requests = self._requests_or_later(all_prompts, tasks, None, lora_request)
        return self._finish(requests, use_tqdm, make=make)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Compute the probability of each class for each prompt, in order. Prompts and errors: as for `generate`."""
        return self._encoded(prompts, pooling_params, "classify", use_tqdm, lora_request, _classes)

    def score(
        self,
        data_1: str | Sequence[Prompt],
        data_2: str | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[ScoringRequestOutput]:
        """Compute the score of two texts, one text with each of many, or pair by pair: the cosine of their vectors, or with a model that
        scores pairs (a cross-encoder or reranker) what its head gives."""
        first, second = as_texts(data_1, "data_1"), as_texts(data_2, "data_2")
        wanted = pairs(len(first), len(second), ("data_1", "data_2"))
        if self.llm_engine.input_processor.classifier is not None:
            params = pooling_params or PoolingParams()
            cut = PairCut(params.truncate_prompt_tokens, side=params.truncation_side)
            prompts = self.llm_engine.input_processor.pair_prompts([(first[i], second[j]) for i, j in wanted], cut)
            classified = self.classify(prompts, pooling_params=pooling_params, use_tqdm=use_tqdm, lora_request=lora_request)
            return [
                ScoringRequestOutput(
                    each.request_id, each.prompt_token_ids, ScoringOutput(each.outputs.probs[0]), each.num_cached_tokens
                )
                for each in classified
            ]
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


def _embedding(output: PoolingRequestOutput) -> EmbeddingRequestOutput:
    vector = EmbeddingOutput(output.outputs.data.tolist())
    return EmbeddingRequestOutput(output.request_id, output.prompt_token_ids, vector, output.num_cached_tokens)


def _classes(output: PoolingRequestOutput) -> ClassificationRequestOutput:
    probabilities = ClassificationOutput(output.outputs.data.tolist())
    return ClassificationRequestOutput(output.request_id, output.prompt_token_ids, probabilities, output.num_cached_tokens)


def _with_task(params: PoolingParams, task: PoolingTask | None) -> PoolingParams:
    if not isinstance(params, PoolingParams):
        raise InvalidRequestError(f"pooling_params is a {type(params).__name__}, must be PoolingParams", "pooling_params")
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise InvalidRequestError(f"pooling_params has the task {params.task}, but {task} is asked for", "pooling_params")
    return replace(params, task=task)
