"""Samples a token for each row of a step that has computed all its tokens, with the logprobs that requests ask for."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxllm.parallel.arrays import delete
from jaxllm.parallel.shards import PEERS_LOST
from jaxllm.runner.batch import Batch, request_failed
from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.runner.heads import Device, Hidden, alone, trim
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.row_arrays import Scores
from jaxllm.runner.rows import LogprobsKind, Row
from jaxllm.sampling.mask import num_words
from jaxllm.sampling.state import SamplingState, pack_admission
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS
from jaxllm.scheduler_output import NOT_FINITE, ModelRunnerOutput, TokenLogprobs


@dataclass(frozen=True)
class PendingTokens:
    """Sampled tokens of a step in flight."""

    rows: Sequence[Row]
    drawn: jax.Array
    """int32[R], or with a drafter [R, W + 1]: see `drafts.accept`."""
    scores: Scores

    @property
    def arrays(self) -> Any:
        return self.drawn, self.scores

    def collect(self, output: ModelRunnerOutput) -> None:
        drawn = np.asarray(self.drawn)[: len(self.rows)]
        if PEERS_LOST in drawn:
            for shard in self.drawn.addressable_shards:
                shard.data.block_until_ready()  # raises a device's own error, if that made the others wait
            raise RuntimeError("a device waited too long for its part of a sum from another: the step's results are lost")
        width = 1 if drawn.ndim == 1 else drawn.shape[1] - 1
        for i, (row, tokens) in enumerate(zip(self.rows, _tokens_of_rows(drawn, output, self.rows), strict=True)):
            request_id = row.data.request_id
            output.sampled_token_ids[request_id] = tokens
            if NOT_FINITE in tokens:
                output.not_finite.add(request_id)
            if row.named_ids is None and row.num_logprobs is None:
                continue
            with alone(request_id, output):
                output.logprobs[request_id] = self.scores_of(row, slice(i * width, i * width + len(tokens)))

    def scores_of(self, row: Row, at: slice) -> TokenLogprobs:
        """The logprobs of these draws that their request asked for."""
        scores = self._host_scores
        if row.named_ids is not None:
            assert scores.named is not None
            return trim(scores.named, at, len(row.named_ids))
        assert scores.top is not None and row.num_logprobs is not None
        return trim(scores.top, at, row.num_logprobs)

    @functools.cached_property
    def _host_scores(self) -> Scores:
        """The scores of all rows, read once: one read takes longer than the rest of a row."""
        return jax.device_get(self.scores)  # type: ignore[no-any-return]


def _tokens_of_rows(drawn: np.ndarray, output: ModelRunnerOutput, rows: Sequence[Row]) -> list[list[int]]:
    """The tokens of each row. Adds the numbers of its drafts to the output."""
    if drawn.ndim == 1:
        return [[token] for token in drawn.tolist()]
    counts = (drawn[:, :-1] != NO_DRAFT).sum(axis=1).tolist()
    output.num_drafts.update(zip((row.data.request_id for row in rows), drawn[:, -1].tolist(), strict=True))
    return [tokens[:count] for tokens, count in zip(drawn[:, :-1].tolist(), counts, strict=True)]


class Sampling:
    """Runs the programs that sample, and holds what full sampling keeps of its requests on the device."""

    def __init__(self, device: Device, *, num_rows: int, vocab_size: int, processors: tuple[Any, ...]):
        """num_rows: with that of padding."""
        self._device = device
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._processors = processors
        self._state: SamplingState | None = None
        self._open_masks: dict[int, jax.Array] = {}
        """Masks that allow every token, by number of draws."""

    def key(self, batch: Batch) -> ProgramKey:
        """The program that samples for a batch."""
        adapted = batch.adapted and self._device.adapts_logits
        return ProgramKey("sample", batch.sample_rows, batch.variant, batch.logprobs, batch.width, adapted)

    def launch(self, batch: Batch, hidden: Hidden, mask_TW: np.ndarray | None) -> PendingTokens:
        """Start to sample. mask_TW: what each draw of each row may give; None: any token."""
        device, key = self._device, self.key(batch)
        program = device.program(key)
        state = self.state() if batch.variant == Variant.FULL else None
        named_ids = self._named_ids(batch.sampled, key.size) if batch.logprobs == LogprobsKind.NAMED else None
        mask = None if mask_TW is None else device.put(mask_TW)
        if mask is None and batch.variant >= Variant.MASKED:
            mask = self._open_mask(key.size * key.width)
        device.row_arrays, drawn, state, scores = program(
            device.params, device.row_arrays, hidden.hidden_NWD, hidden.columns_NC, state, named_ids, mask, device.workspace
        )
        if state is not None:
            self._state = state
        return PendingTokens(batch.sampled, drawn, scores)

    def new_mask(self, batch: Batch) -> np.ndarray:
        """A mask on the host that allows every token."""
        return self._all_allowed(batch.sample_rows * batch.width)

    def _open_mask(self, num_draws: int) -> jax.Array:
        """A mask on the device that allows every token, for full sampling of rows without a grammar."""
        if num_draws not in self._open_masks:
            self._open_masks[num_draws] = self._device.put(self._all_allowed(num_draws))
        return self._open_masks[num_draws]

    def _all_allowed(self, num_draws: int) -> np.ndarray:
        return np.full((num_draws, num_words(self._vocab_size)), -1, np.int32)

    def _named_ids(self, sampled: Sequence[Row], num_rows: int) -> jax.Array:
        ids = np.full((num_rows, MAX_LOGPROB_TOKEN_IDS), -1, np.int32)
        for i, row in enumerate(sampled):
            ids[i, : len(row.named_ids or ())] = row.named_ids or ()
        return self._device.put(ids)  # type: ignore[no-any-return]

    # State of full sampling

    def admit(self, row: Row, errors: dict[str, str]) -> None:
        """Send one request's part of the state. On failure, adds the reason to `errors`."""
        try:
            packed = self.pack_admission(row)
        except Exception as error:
            errors[row.data.request_id] = request_failed(row.data.request_id, error)
            return
        program, put = self._device.program(ProgramKey("admit")), self._device.put
        self._state = program(self.state(), put(np.int32(row.index)), put(packed))

    def pack_admission(self, row: Row) -> Any:
        """A request's part of the state, on the host."""
        data = row.data
        return pack_admission(
            data.sampling_params,
            data.token_ids,
            data.num_prompt_tokens,
            data.eos_token_ids,
            vocab_size=self._vocab_size,
            processors=self._processors,
        )

    def state(self) -> SamplingState:
        """The arrays of full sampling, made for the first request that needs them."""
        if self._state is None:
            self._state = self._device.program(ProgramKey("new_state"))()
        return self._state

    def new_state(self) -> SamplingState:
        """Zeros, as the program "new_state" makes them."""
        return SamplingState.zeros(self._num_rows, self._vocab_size, self._processors)

    def delete_arrays(self) -> None:
        """Release the memory of the state and of masks. They are made again on next use."""
        delete((self._state, self._open_masks))
        self._state, self._open_masks = None, {}
