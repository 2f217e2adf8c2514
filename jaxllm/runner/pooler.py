"""Pools the pooling requests of a step, and returns each request's vectors when its prompt is computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.batch import PoolingChunk
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.pooling_step import POOL_COLUMNS
from jaxllm.runner.step_programs import ProgramKey

_SHORTEST = np.float32(1e-12)


@dataclass(frozen=True)
class PendingVectors:
    """Vectors of a step in flight: of whole prompts, and of each token of a chunk."""

    finished: Sequence[PoolingChunk]
    vectors_RD: jax.Array | None
    """Of the finished requests, in order."""
    by_token: Sequence[PoolingChunk]
    hidden_TD: jax.Array | None
    """Of all tokens of the step."""

    def collect(self) -> dict[str, np.ndarray]:
        """The vectors of requests that are done (waits for the device); those of earlier tokens are kept in the row.

        Parts belong to the row, not to the request: a preempted request starts again in a new row.
        """
        done: dict[str, np.ndarray] = {}
        if self.vectors_RD is not None:
            vectors = np.asarray(self.vectors_RD)
            for i, chunk in enumerate(self.finished):
                params = chunk.row.pooling
                assert params is not None
                done[chunk.row.data.request_id] = vectors[i][: params.dimensions].copy()
        if self.hidden_TD is not None:
            hidden = np.asarray(self.hidden_TD)
            for chunk in self.by_token:
                row, part = chunk.row, slice(chunk.first_token, chunk.first_token + chunk.count)
                assert row.pooling is not None
                row.pooled_parts.append(_token_vectors(hidden[part], row.pooling))
                if chunk.is_last:
                    done[row.data.request_id] = np.concatenate(row.pooled_parts)
        return done


class Pooler:
    """Holds the running sums of requests that use mean pooling."""

    def __init__(
        self,
        model: ModelConfig,
        buckets: Buckets,
        program: Callable[[ProgramKey], jax.stages.Compiled],
        put: Callable[[Any], Any],
    ):
        self._is_mean = model.pooling.pooling_type == "mean"
        self._width = model.hidden_size
        self._buckets = buckets
        self._program = program
        self._put = put
        self._sums_ND: jax.Array | None = None

    def keys(self, chunks: Sequence[PoolingChunk], num_tokens: int) -> list[ProgramKey]:
        """The programs that `run` will call."""
        whole = [chunk for chunk in chunks if not _is_by_token(chunk)]
        num_finished = sum(chunk.is_last for chunk in whole)
        keys = [ProgramKey("add_up", num_tokens)] if whole and self._is_mean else []
        return [*keys, ProgramKey("pool", self._buckets.fit_sample(num_finished))] if num_finished else keys

    def run(self, chunks: Sequence[PoolingChunk], hidden_TD: jax.Array, hidden_ND: jax.Array) -> PendingVectors:
        """Start what these chunks need of a step's hidden states: of all its tokens, and of the last token of each of its rows."""
        by_token = [chunk for chunk in chunks if _is_by_token(chunk)]
        whole = [chunk for chunk in chunks if not _is_by_token(chunk)]
        finished = [chunk for chunk in whole if chunk.is_last]
        source = hidden_ND
        if self._is_mean and whole:
            source = self._add_up(whole, hidden_TD)
        vectors_RD = self._pool(finished, source) if finished else None
        return PendingVectors(finished, vectors_RD, by_token, hidden_TD if by_token else None)

    def _add_up(self, chunks: Sequence[PoolingChunk], hidden_TD: jax.Array) -> jax.Array:
        num_tokens, num_rows = hidden_TD.shape[0], self._buckets.max_rows
        if self._sums_ND is None:
            self._sums_ND = self._put(np.zeros((num_rows, self._width), np.float32))
        packed = np.zeros(num_tokens + num_rows, np.int32)
        owner_T, first_N = packed[:num_tokens], packed[num_tokens:]
        owner_T[:] = num_rows
        for chunk in chunks:
            owner_T[chunk.first_token : chunk.first_token + chunk.count] = chunk.row.index
            first_N[chunk.row.index] = chunk.start == 0
        self._sums_ND = self._program(ProgramKey("add_up", num_tokens))(self._sums_ND, hidden_TD, self._put(packed))
        return self._sums_ND

    def _pool(self, finished: Sequence[PoolingChunk], source_XD: jax.Array) -> jax.Array:
        size = self._buckets.fit_sample(len(finished))
        requests = np.zeros((size, POOL_COLUMNS), np.int32)
        for i, chunk in enumerate(finished):
            row, params = chunk.row, chunk.row.pooling
            assert params is not None
            index, divisor = (row.index, row.num_known) if self._is_mean else (chunk.place, 1)
            requests[i] = index, divisor, params.dimensions or self._width, bool(params.use_activation)
        return self._program(ProgramKey("pool", size))(source_XD, self._put(requests))

    def delete_arrays(self) -> None:
        """Release the memory of the sums. They are allocated again on next use."""
        if self._sums_ND is not None and not self._sums_ND.is_deleted():
            self._sums_ND.delete()
        self._sums_ND = None


def _is_by_token(chunk: PoolingChunk) -> bool:
    assert chunk.row.pooling is not None
    return chunk.row.pooling.task == "token_embed"


def _token_vectors(hidden_TD: np.ndarray, params: PoolingParams) -> np.ndarray:
    """Float32 [T, width]: what `pool` does, for rows that are on the host already."""
    vectors = hidden_TD[:, : params.dimensions].astype(np.float32)
    if params.use_activation:
        vectors /= np.maximum(np.sqrt(np.sum(vectors * vectors, axis=1, keepdims=True)), _SHORTEST)
    return vectors
