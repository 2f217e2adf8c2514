"""Turns a step's plan into the padded buffer of the program that runs it. Pure host work on small arrays."""

from dataclasses import dataclass, field

import numpy as np

from jaxllm.log import logger
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.feature_inputs import Names
from jaxllm.runner.layout import FROM_ROW, Column, StepLayout, decode_layout, mixed_layout
from jaxllm.runner.program_choice import ProgramChoice
from jaxllm.runner.rows import NO_DECODE, LogprobsKind, Need, Row, Rows
from jaxllm.sampling.variants import Variant
from jaxllm.scheduler_output import RowStep, SchedulerOutput


@dataclass(frozen=True, slots=True)
class Chunk:
    """Known tokens of one request that a step computes: a part of its prompt, or of its tokens before it was preempted."""

    row: Row
    place: int
    """Index of the request among the rows of the step."""
    first_token: int
    """Index of the chunk among the tokens of the step."""
    start: int
    """Its position in the request."""
    count: int

    @property
    def stop(self) -> int:
        """The position after it."""
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether the known tokens end with it."""
        return self.stop >= self.row.num_known


@dataclass(frozen=True)
class Batch:
    """One step, ready to send."""

    buffer: np.ndarray
    layout: StepLayout
    is_decode: bool
    """Whether each row computes one token, and drafts."""
    samples_apart: bool
    """Whether another program samples. Of a step that is no decode, one always does."""
    width: int
    """Tokens that a row may sample: 1, and drafts."""
    next_width: int
    """`width` of the next step, for which drafts are proposed: 1 if none are wanted."""
    sampled: list[Row]
    """Requests that get a token, in the order of the device's rows."""
    variant: Variant
    """Variant of the program that samples."""
    logprobs: LogprobsKind
    sample_rows: int
    """Rows of the program that samples apart; 0 if the step samples itself."""
    features: Names
    """Optional features of the program that runs layers."""
    admitted: list[Row]
    chunks: list[Chunk]
    """Known tokens among those of the step."""
    extra_updates: tuple[np.ndarray, np.ndarray] | None
    """(flat index, block id) of block-table entries that do not fit into the buffer."""
    errors: dict[str, str] = field(default_factory=dict)
    """Requests that failed alone, with the reason. They have no row and are not part of the step."""


class BatchBuilder:
    """Gives rows to the requests of a plan and fills buffers."""

    def __init__(
        self,
        rows: Rows,
        buckets: Buckets,
        *,
        block_size: int,
        max_blocks: int,
        num_groups: int = 1,
        num_updates: int | None = None,
        choice: ProgramChoice | None = None,
    ):
        """max_blocks: of a request in each of the `num_groups` groups of layers. num_updates: most new blocks of a row in a decode.
        choice: chooses the programs; None: the smallest that holds a step, whether there or not."""
        self.rows = rows
        self.buckets = buckets
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.num_groups = num_groups
        self.num_updates = num_groups if num_updates is None else num_updates
        self.choice = choice or ProgramChoice(buckets)
        self.inputs = rows.inputs

    def apply(self, plan: SchedulerOutput) -> Batch:
        """Free the rows of requests that ended or were preempted, then `build`."""
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            self.rows.remove(request_id)
        return self.build(plan)

    def build(self, plan: SchedulerOutput) -> Batch:
        """Give rows to new requests, then lay out the step: rows that sample first, the others behind them.

        A request that can be given no row is left out, of this step and of the next, which may be planned already.
        """
        if not plan.new_requests:
            batch = self._build_decode(plan)
            if batch is not None:
                return batch
        return self._build_mixed(plan)

    def _build_decode(self, plan: SchedulerOutput) -> Batch | None:
        """Build a step in which each request computes its last token, and drafts, and samples; None if it must run as any other step.

        Fills whole columns at once: nearly every step is built here, and its cost grows with the number of requests.
        """
        ids, starts, counts, drafts, new_blocks = zip(*plan.rows, strict=True) if plan.rows else ((),) * 5
        rows, num_rows = self.rows, len(ids)
        num_drafts = plan.num_tokens - num_rows
        if num_drafts != (sum(drafts) if num_drafts else 0):
            return None
        try:
            scheduled = [rows.by_request[request_id] for request_id in ids]
        except KeyError:
            return None
        index_R = np.fromiter([row.index for row in scheduled], np.int32, num_rows)
        start_R = np.fromiter(starts, np.int32, num_rows)
        num_known_R, variant = rows.num_known_N[index_R], Variant(rows.variant_N[index_R].max(initial=Variant.GREEDY))
        need = Need.SAMPLE if plan.masked_request_ids else Need(rows.need_N[index_R].max(initial=Need.DECODE))
        if need >= Need.HIDDEN or (need == Need.SAMPLE and num_drafts) or (start_R + 1 < num_known_R).any():
            return None
        samples_apart, width = need == Need.SAMPLE, self.buckets.fit_width(plan.num_drafts)
        chunks = [  # the last token of a prompt, computed alone
            Chunk(scheduled[i], int(i), int(i) * width, int(start_R[i]), 1) for i in np.flatnonzero(start_R < num_known_R)
        ]
        features = self.inputs.of_decode(self.inputs.needed(rows.columns, index_R, chunks))
        if features is None:
            return None
        size: int | None
        if samples_apart:
            size = self.choice.rows_apart(num_rows, features)
            if size is None:
                return None
            logprobs = LogprobsKind.of(scheduled)
            if plan.masked_request_ids:
                variant = max(variant, Variant.MASKED)
            sample_rows, variant = self._sample(num_rows, variant, logprobs, width, features)
        else:
            size, variant = self.choice.decode(num_rows, variant, width, features)
            logprobs, sample_rows = LogprobsKind.NONE, 0
        update_index: list[int] = []
        update_block: list[int] = []
        for row, blocks in zip(scheduled, new_blocks, strict=True):
            if blocks:
                self._extend_table(row, blocks, update_index, update_block)
        layout = decode_layout(size, self.num_updates, self.inputs.num_columns)
        # A fresh buffer each step: the device may still be reading the last one.
        buffer = np.zeros(layout.size, np.int32)
        views = layout.views(buffer)
        columns = views.columns_RC
        columns[:num_rows] = rows.columns[index_R]
        columns[:num_rows, Column.START] = self._starts(start_R, num_known_R)
        columns[:num_rows, Column.NUM_TOKENS] = np.fromiter(counts, np.int32, num_rows) if num_drafts else 1
        columns[:num_rows, Column.TOKEN_ROW] = index_R
        if num_drafts:
            columns[:num_rows, Column.NUM_DRAFTS] = np.fromiter(drafts, np.int32, num_rows)
        columns[num_rows:] = rows.columns[rows.trash]
        views.token_ids_T[:num_rows] = FROM_ROW
        for chunk in chunks:
            views.token_ids_T[chunk.place] = chunk.row.data.token_ids[chunk.start]
        extra = self.fill_updates(layout, buffer, update_index, update_block)
        kind = (True, samples_apart, width, width, scheduled, variant, logprobs, sample_rows, features)
        return Batch(buffer, layout, *kind, [], chunks, extra)

    def _starts(self, start_R: np.ndarray, num_known_R: np.ndarray) -> np.ndarray:
        """The first positions of rows as sent to the device: with drafts, only the device knows how many of a row were right."""
        return start_R if self.buckets.widths == (1,) else np.where(start_R < num_known_R, start_R, FROM_ROW)

    def _build_mixed(self, plan: SchedulerOutput) -> Batch:
        """A step of any other kind."""
        rows = self.rows
        update_index: list[int] = []
        update_block: list[int] = []
        sampling: list[tuple[Row, RowStep]] = []
        partial: list[tuple[Row, RowStep]] = []
        num_known = len(plan.rows) - len(plan.new_requests)
        for step in plan.rows[:num_known]:
            row = rows.by_request.get(step.request_id)
            if row is None:
                continue
            if step.new_blocks:
                self._extend_table(row, step.new_blocks, update_index, update_block)
            (sampling if _samples(row, step) else partial).append((row, step))
        admitted = []
        errors: dict[str, str] = {}
        for data, step in zip(plan.new_requests, plan.rows[num_known:], strict=True):
            try:
                row = rows.add(data)
            except Exception as error:
                errors[data.request_id] = request_failed(data.request_id, error)
                continue
            admitted.append(row)
            self._extend_table(row, data.block_ids, update_index, update_block)
            (sampling if _samples(row, step) else partial).append((row, step))

        scheduled = sampling + partial
        sampled = [row for row, _ in sampling]
        num_tokens = sum(step.num_tokens for _, step in scheduled)
        variant = max((row.variant for row in sampled), default=Variant.GREEDY)
        if plan.masked_request_ids:
            variant = max(variant, Variant.MASKED)
        logprobs = LogprobsKind.of(sampled)
        most_drafts = max((step.num_drafts for _, step in sampling), default=0)
        can_decode = variant < NO_DECODE and logprobs == LogprobsKind.NONE and not plan.num_drafts
        chunks = _chunks(scheduled)
        needed = self.inputs.needed(rows.columns, [row.index for row, _ in scheduled], chunks)
        features = self.inputs.of_decode(needed)
        is_decode = can_decode and not partial and num_tokens == len(scheduled) and features is not None
        if features is None or not is_decode:
            features = self.inputs.of_mixed(needed)
        width, next_width = self.buckets.fit_width(most_drafts), self.buckets.fit_width(plan.num_drafts)
        sample_rows = 0
        if is_decode:
            size, variant = self.choice.decode(len(scheduled), variant, width, features)
            layout = decode_layout(size, self.num_updates, self.inputs.num_columns)
        else:
            num_tokens = self.choice.tokens(max(1, num_tokens), features)
            layout = self.mixed_layout(num_tokens, features)
            if sampled:
                sample_rows, variant = self._sample(len(sampled), variant, logprobs, width, features)
        buffer = self._fill(layout, scheduled, len(sampled))
        extra = self.fill_updates(layout, buffer, update_index, update_block)
        kind = (is_decode, not is_decode, width, next_width, sampled, variant, logprobs, sample_rows, features)
        return Batch(buffer, layout, *kind, admitted, chunks, extra, errors)

    def _sample(
        self, num_rows: int, variant: Variant, logprobs: LogprobsKind, width: int, features: Names
    ) -> tuple[int, Variant]:
        return self.choice.sample(num_rows, variant, logprobs, width, self.inputs.of_logits(features))

    def mixed_layout(self, num_tokens: int, features: Names) -> StepLayout:
        """The layout of a step of any kind but decode, which has one of the token sizes."""
        num_rows, num_inputs = self.buckets.rows_for_tokens(num_tokens), self.inputs.num_token_inputs(features)
        return mixed_layout(num_tokens, num_rows, self.block_size, self.num_groups, self.inputs.num_columns, num_inputs)

    def empty(self, layout: StepLayout) -> np.ndarray:
        """The buffer of an empty step."""
        buffer = self._fill(layout, [], 0)
        self.fill_updates(layout, buffer, [], [])
        return buffer

    def _extend_table(self, row: Row, blocks: list[int], update_index: list[int], update_block: list[int]) -> None:
        count = len(blocks) // self.num_groups
        first = row.index * self.num_groups * self.max_blocks + row.num_blocks
        row.num_blocks += count
        self.rows.columns[row.index, Column.LIMIT] = row.num_blocks * self.block_size
        assert row.num_blocks <= self.max_blocks, f"request {row.data.request_id} outgrew its block table"
        for start in range(first, first + self.num_groups * self.max_blocks, self.max_blocks):
            update_index.extend(range(start, start + count))
        update_block.extend(blocks)

    def _fill(self, layout: StepLayout, scheduled: list[tuple[Row, RowStep]], num_sampled: int) -> np.ndarray:
        # A fresh buffer each step: the device may still be reading the last one.
        buffer = np.zeros(layout.size, np.int32)
        views = layout.views(buffer)
        num_rows = len(scheduled)
        indices = np.fromiter([row.index for row, _ in scheduled], np.int32, num_rows)
        starts = np.fromiter([step.start for _, step in scheduled], np.int32, num_rows)
        columns = views.columns_RC
        columns[:num_rows] = self.rows.columns[indices]
        columns[:num_rows, Column.START] = self._starts(starts, self.rows.num_known_N[indices])
        columns[:num_rows, Column.NUM_TOKENS] = [step.num_tokens for _, step in scheduled]
        columns[:num_rows, Column.NUM_DRAFTS] = [step.num_drafts for _, step in scheduled]
        columns[:num_sampled, Column.TOKEN_ROW] = indices[:num_sampled]
        columns[num_rows:] = self.rows.columns[self.rows.trash]

        tokens = views.token_ids_T
        tokens[:] = FROM_ROW
        position = 0
        for i, (row, step) in enumerate(scheduled):
            if step.start < row.num_known:
                stop = step.start + step.num_tokens
                known = row.data.token_ids[step.start : stop]
                tokens[position : position + len(known)] = known
                if stop < row.num_known:
                    columns[i, Column.NEXT_TOKEN] = row.data.token_ids[stop]
            position += step.num_tokens
        tokens[position:] = 0
        return buffer

    def fill_updates(
        self, layout: StepLayout, buffer: np.ndarray, index: list[int], block: list[int]
    ) -> tuple[np.ndarray, np.ndarray] | None:
        views = layout.views(buffer)
        room = min(layout.num_updates, len(index))
        views.update_index_U[:room] = index[:room]
        views.update_index_U[room:] = np.iinfo(np.int32).max
        views.update_block_U[:room] = block[:room]
        if room == len(index):
            return None
        return np.asarray(index[room:], np.int32), np.asarray(block[room:], np.int32)


def _samples(row: Row, step: RowStep) -> bool:
    """Whether computing these tokens of a request gives a new one."""
    return row.pooling is None and step.start + step.num_tokens >= row.num_known


def _chunks(scheduled: list[tuple[Row, RowStep]]) -> list[Chunk]:
    chunks, first = [], 0
    for place, (row, step) in enumerate(scheduled):
        if step.start < row.num_known:
            chunks.append(Chunk(row, place, first, step.start, step.num_tokens))
        first += step.num_tokens
    return chunks


def request_failed(request_id: str, error: Exception) -> str:
    """Log the error of one request. Returns the message for its client."""
    logger.error("request %s failed in the engine", request_id, exc_info=error)
    return f"the request failed in the engine ({type(error).__name__})"
