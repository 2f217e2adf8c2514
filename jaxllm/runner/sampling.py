"""Samples a token for each row of a step that has computed all its tokens, with the logprobs that requests ask for."""

import functools
from collections.abc import Iterator, Sequence
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
from jaxllm.sampling.state import num_words as state_words
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import MAX_LOGPROB_TOKEN_IDS
from jaxllm.scheduler_output import NOT_FINITE, ModelRunnerOutput, TokenLogprobs


@dataclass(frozen=True)
class PendingTokens:
    """Sampled tokens of a step in flight, of one data-parallel rank."""

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
        """Masks that allow every token, by number of draws in each rank."""

    def key(self, batch: Batch) -> ProgramKey:
        """The program that samples for a batch, the same for those of all ranks."""
        features = self._device.inputs.of_logits(batch.features)
        return ProgramKey("sample", batch.sample_rows, batch.variant, batch.logprobs, batch.width, features)

    def launch(self, batches: Sequence[Batch], hidden: Hidden, mask_TW: np.ndarray | None) -> list[PendingTokens]:
        """Start to sample for the batches of all ranks. mask_TW: what each draw of each request may give, as of `StepInFlight`; None: any
        token."""
        device, key = self._device, self.key(batches[0])
        program = device.program(key)
        state = self.state() if key.variant == Variant.FULL else None
        named_ids = self._named_ids(batches, key.size) if key.logprobs == LogprobsKind.NAMED else None
        mask = None if mask_TW is None else device.put(self._by_rank(mask_TW, batches))
        if mask is None and key.variant >= Variant.MASKED:
            mask = self._open_mask(batches)
        device.row_arrays, drawn, state, scores = program(
            device.params, device.row_arrays, hidden.hidden_NWD, hidden.columns_NC, state, named_ids, mask, device.workspace
        )
        if state is not None:
            self._state = state
        return self.pending(batches, drawn, scores)

    def pending(self, batches: Sequence[Batch], drawn: jax.Array, scores: Scores) -> list[PendingTokens]:
        """Pending tokens that a program sampled for the batches of all ranks, of each rank of this process."""
        ranks = self._device.ranks
        return [
            PendingTokens(batches[i].sampled, *found) for i, found in zip(ranks.own, ranks.split((drawn, scores)), strict=True)
        ]

    def new_mask(self, batches: Sequence[Batch]) -> np.ndarray:
        """A mask on the host that allows every token."""
        num_draws = sum(batch.sample_rows * batch.width for batch in batches)
        return np.full((num_draws, num_words(self._vocab_size)), -1, np.int32)

    def _by_rank(self, mask_TW: np.ndarray, batches: Sequence[Batch]) -> np.ndarray:
        """The joint mask: the draws of each rank's requests are followed by its padding."""
        if len(batches) == 1:
            return mask_TW
        joint, first = self.new_mask(batches), 0
        for part, batch in zip(np.split(joint, len(batches)), batches, strict=True):
            count = batch.width * len(batch.sampled)
            part[:count] = mask_TW[first : first + count]
            first += count
        return joint

    def _open_mask(self, batches: Sequence[Batch]) -> jax.Array:
        """A mask on the devices that allows every token, for full sampling of rows without a grammar."""
        num_draws = batches[0].sample_rows * batches[0].width
        if num_draws not in self._open_masks:
            self._open_masks[num_draws] = self._device.put(self.new_mask(batches))
        return self._open_masks[num_draws]

    def _named_ids(self, batches: Sequence[Batch], num_rows: int) -> jax.Array:
        found = [np.full((num_rows, MAX_LOGPROB_TOKEN_IDS), -1, np.int32) for _ in batches]
        for ids, batch in zip(found, batches, strict=True):
            for i, row in enumerate(batch.sampled):
                ids[i, : len(row.named_ids or ())] = row.named_ids or ()
        return self._device.put(self._device.ranks.joined(found))  # type: ignore[no-any-return]

    # State of full sampling

    def admit(self, batches: Sequence[Batch], errors: dict[str, str]) -> None:
        """Send the part of the state of each new request that needs one. Adds the reasons of those that fail to `errors`."""
        if not any(row.needs_state for batch in batches for row in batch.admitted):
            return
        device, program = self._device, self._device.program(ProgramKey("admit"))
        nothing = np.int32(self._num_rows - 1), np.zeros(state_words(self.state()), np.int32)
        for row, packed in device.ranks.rounds([self._packed(batch.admitted, errors) for batch in batches], nothing):
            self._state = program(self.state(), device.put(row), device.put(packed))

    def _packed(self, admitted: Sequence[Row], errors: dict[str, str]) -> Iterator[tuple[np.int32, Any]]:
        """The rows of one rank that need state, with their parts of it."""
        for row in admitted:
            if row.needs_state:
                try:
                    packed = self.pack_admission(row)
                except Exception as error:
                    errors[row.data.request_id] = request_failed(row.data.request_id, error)
                else:
                    yield np.int32(row.index), packed

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
