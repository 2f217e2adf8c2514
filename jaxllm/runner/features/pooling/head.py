"""Pools the pooling requests of a step, and returns each request's vectors when its prompt is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxllm.model_config import ModelConfig
from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.batch import Chunk
from jaxllm.runner.features.pooling.step import POOL_COLUMNS
from jaxllm.runner.heads import Device, Hidden
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.scheduler_output import ModelRunnerOutput

_SHORTEST = np.float32(1e-12)


@dataclass(frozen=True)
class PendingVectors:
    """Vectors of a step in flight, of one data-parallel rank: of whole prompts, and of each token of a chunk."""

    finished: Sequence[Chunk]
    vectors_RD: jax.Array | None
    """Vectors of the finished requests, in order."""
    by_token: Sequence[Chunk]
    hidden_TD: jax.Array | None
    """Hidden states of all tokens of the step."""

    @property
    def arrays(self) -> Any:
        return self.vectors_RD, self.hidden_TD

    def collect(self, output: ModelRunnerOutput) -> None:
        """Add the vectors of requests that are done; those of earlier tokens are kept in the row.

        Parts belong to the row, not to the request: a preempted request starts again in a new row.
        """
        done = output.pooled
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
        output.not_finite.update(request_id for request_id, vector in done.items() if not np.isfinite(vector).all())


class Pooling:
    """Holds the running sums of requests that are pooled by the mean of their tokens, or by the first: its sum has no others."""

    def __init__(self, device: Device, model: ModelConfig):
        self._type, self._adds_up = model.pooling.pooling_type, model.pooling.pooling_type != "last"
        self._kind = "pool" if model.classifier is None else "classify"
        self._width = model.hidden_size
        self._buckets = device.buckets
        self._device = device
        self._sums_ND: jax.Array | None = None

    def select(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks of pooling requests."""
        return [chunk for chunk in chunks if chunk.row.pooling is not None]

    def keys(self, work: Sequence[Sequence[Chunk]], num_tokens: int) -> list[ProgramKey]:
        """The programs that `launch` calls."""
        num_finished = max(len(_finished(of_rank)) for of_rank in work)
        keys = [ProgramKey("add_up", num_tokens)] if any(map(_whole, work)) and self._adds_up else []
        return [*keys, ProgramKey(self._kind, self._buckets.fit_sample(num_finished))] if num_finished else keys

    def launch(self, work: Sequence[Sequence[Chunk]], hidden: Hidden | None) -> list[PendingVectors]:
        """Start what these chunks need of a step's hidden states: of all its tokens, and of the last token of each of its rows."""
        assert hidden is not None, "pooling requests never decode"
        ranks, source = self._device.ranks, hidden.hidden_NWD
        whole, finished = [*map(_whole, work)], [*map(_finished, work)]
        by_token = [[chunk for chunk in of_rank if _is_by_token(chunk)] for of_rank in work]
        if self._adds_up and any(whole):
            source = self._add_up(whole, hidden.hidden_TD)
        vectors_RD = self._pool(finished, source) if any(finished) else None
        results = ranks.split((vectors_RD, hidden.hidden_TD if any(by_token) else None))
        return [
            PendingVectors(finished[rank], vectors, by_token[rank], of_tokens)
            for rank, (vectors, of_tokens) in zip(ranks.own, results, strict=True)
        ]

    def _add_up(self, chunks: Sequence[Sequence[Chunk]], hidden_TD: jax.Array) -> jax.Array:
        ranks, num_rows = self._device.ranks, self._buckets.max_rows
        num_tokens = hidden_TD.shape[0] // ranks.num
        if self._sums_ND is None:
            self._sums_ND = self._device.put(ranks.repeated(np.zeros((num_rows, self._width), np.float32)))
        packed = ranks.joined([self._owners(of_rank, num_tokens) for of_rank in chunks])
        self._sums_ND = self._device.program(ProgramKey("add_up", num_tokens))(
            self._sums_ND, hidden_TD, self._device.put(packed)
        )
        return self._sums_ND

    def _owners(self, chunks: Sequence[Chunk], num_tokens: int) -> np.ndarray:
        """What `add_up` takes of the chunks of one rank."""
        num_rows = self._buckets.max_rows
        packed = np.zeros(num_tokens + num_rows, np.int32)
        owner_T, first_N = packed[:num_tokens], packed[num_tokens:]
        owner_T[:] = num_rows
        for chunk in chunks:
            count = chunk.count if self._type == "mean" else int(chunk.start == 0)
            owner_T[chunk.first_token : chunk.first_token + count] = chunk.row.index
            first_N[chunk.row.index] = chunk.start == 0
        return packed

    def _pool(self, finished: Sequence[Sequence[Chunk]], source_XD: jax.Array) -> jax.Array:
        size = self._buckets.fit_sample(max(map(len, finished)))
        requests = self._device.ranks.joined([self._requests(of_rank, size) for of_rank in finished])
        weights = () if self._kind == "pool" else (self._device.params,)
        return self._device.program(ProgramKey(self._kind, size))(*weights, source_XD, self._device.put(requests))

    def _requests(self, finished: Sequence[Chunk], size: int) -> np.ndarray:
        """What `pool` takes of the requests of one rank."""
        requests = np.zeros((size, POOL_COLUMNS), np.int32)
        for i, chunk in enumerate(finished):
            row, params = chunk.row, chunk.row.pooling
            assert params is not None
            index, divisor = row.index if self._adds_up else chunk.place, row.num_known if self._type == "mean" else 1
            requests[i] = index, divisor, params.dimensions or self._width, bool(params.use_activation)
        return requests

    def delete_arrays(self) -> None:
        """Release the memory of the sums. They are allocated again on next use."""
        if self._sums_ND is not None and not self._sums_ND.is_deleted():
            self._sums_ND.delete()
        self._sums_ND = None


def _whole(work: Sequence[Chunk]) -> list[Chunk]:
    """The chunks of requests for one vector of the whole prompt."""
    return [chunk for chunk in work if not _is_by_token(chunk)]


def _finished(work: Sequence[Chunk]) -> list[Chunk]:
    """The last of them."""
    return [chunk for chunk in _whole(work) if chunk.is_last]


def _is_by_token(chunk: Chunk) -> bool:
    assert chunk.row.pooling is not None
    return chunk.row.pooling.task == "token_embed"


def _token_vectors(hidden_TD: np.ndarray, params: PoolingParams) -> np.ndarray:
    """Float32 [T, width]: what `pool` does, for rows that are on the host already."""
    vectors = hidden_TD[:, : params.dimensions].astype(np.float32)
    if params.use_activation:
        vectors /= np.maximum(np.sqrt(np.sum(vectors * vectors, axis=1, keepdims=True)), _SHORTEST)
    return vectors
