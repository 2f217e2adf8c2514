"""The host's record of the rows: the request in each row, its known tokens, its blocks, its sampling columns."""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from jaxllm.pooling_params import PoolingParams
from jaxllm.runner.feature_inputs import FeatureInputs
from jaxllm.runner.layout import NUM_ROW_COLUMNS, SAMPLING_COLUMNS, Column
from jaxllm.sampling.columns import pack_columns
from jaxllm.sampling.variants import Variant, needs_logprobs, needs_state, variant_of
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NO_ADAPTER, NewRequestData, TokenLogprobs

NO_DECODE = Variant.MASKED
"""From this variant on, the decode program does not serve a row: it has neither masks nor states."""


class Need(enum.IntEnum):
    """Needs of a row in a step in which every row computes one token; each includes the lower ones."""

    DECODE = 0
    """The program that also samples."""
    SAMPLE = 1
    """A program that samples apart: for logprobs, state or masks."""
    HIDDEN = 2
    """Hidden states, of which vectors are pooled."""


class LogprobsKind(enum.IntEnum):
    """The tokens whose logprobs a step reports in addition to the sampled ones; each kind includes the lower ones."""

    NONE = 0
    TOP = 1
    """The likeliest tokens."""
    NAMED = 2
    """Also tokens that requests name."""

    @classmethod
    def of(cls, rows: "Iterable[Row]") -> "LogprobsKind":
        """The kind that serves all these rows."""
        kind = cls.NONE
        for row in rows:
            if row.named_ids is not None:
                return cls.NAMED
            if row.num_logprobs is not None:
                kind = cls.TOP
        return kind


@dataclass(slots=True)
class Row:
    """A request while it has a row."""

    index: int
    data: NewRequestData
    num_known: int
    """Number of tokens that the host knew when the row was assigned. Later tokens are on the device."""
    num_blocks: int
    """Length of its block tables, one for each group of layers."""
    variant: Variant
    needs_state: bool
    """Whether full sampling needs state of the request, such as its tokens and masks."""
    num_logprobs: int | None
    """Likeliest tokens to report in addition to each sampled one; None: no logprobs."""
    named_ids: list[int] | None
    """Tokens to report in place of the likeliest."""
    num_prompt_logprobs: int | None
    prompt_parts: list[TokenLogprobs] = field(default_factory=list)
    """Prompt logprobs computed so far."""
    pooling: PoolingParams | None = None
    """Set: the row samples nothing."""
    pooled_parts: list[np.ndarray] = field(default_factory=list)
    """Vectors of prompt tokens computed so far."""


class Rows:
    """Rows 0 … max_rows-1 hold requests; row max_rows is the trash row that padding writes to."""

    def __init__(self, max_rows: int, *, full_logprobs: bool = False, inputs: FeatureInputs | None = None):
        """full_logprobs: requests for logprobs take full sampling. inputs: of the engine's features."""
        self.trash = max_rows
        self.full_logprobs = full_logprobs
        self.inputs = inputs or FeatureInputs()
        self.by_request: dict[str, Row] = {}
        self.columns = np.zeros((max_rows + 1, self.inputs.num_columns), np.int32)
        """Columns of each row, sent to the device in every step; START, NUM_TOKENS and TOKEN_ROW are set step by step."""
        self.columns[:, Column.ROW] = np.arange(max_rows + 1)
        self.columns[:, Column.TOKEN_ROW] = max_rows
        self.columns[:, Column.ADAPTER] = NO_ADAPTER
        self.num_known_N = np.zeros(max_rows + 1, np.int32)
        """`Row.num_known` by row, for the whole batch at once."""
        self.variant_N = np.zeros(max_rows + 1, np.int32)
        """`Row.variant` by row."""
        self.need_N = np.zeros(max_rows + 1, np.int32)
        """The `Need` of each row."""
        self._free = list(range(max_rows - 1, -1, -1))

    def add(self, data: NewRequestData) -> Row:
        """Give a row to a request."""
        assert data.request_id not in self.by_request, f"request {data.request_id} has a row already"
        params = data.sampling_params
        sampling_columns, own_columns = pack_columns(params), self.inputs.row_columns(data)
        variant, _ = sampled_by(params, full_logprobs=self.full_logprobs, is_masked=data.is_masked)
        row = Row(
            index=self._free[-1],
            data=data,
            num_known=len(data.token_ids),
            num_blocks=0,
            variant=variant,
            needs_state=needs_state(params),
            num_logprobs=params.logprobs,
            named_ids=params.logprob_token_ids,
            num_prompt_logprobs=params.prompt_logprobs,
            pooling=data.pooling_params,
        )
        self._free.pop()  # only now: nothing of this request can fail any more
        self.by_request[data.request_id] = row
        self.num_known_N[row.index] = row.num_known
        self.variant_N[row.index] = row.variant
        self.need_N[row.index] = _need(row)
        self.columns[row.index, Column.WRITE_FROM] = data.num_cached_tokens
        self.columns[row.index, Column.ADAPTER] = data.adapter_slot
        self.columns[row.index, SAMPLING_COLUMNS] = sampling_columns
        self.columns[row.index, NUM_ROW_COLUMNS:] = own_columns
        return row

    def remove(self, request_id: str) -> None:
        """Free the row of a request; a request without one is fine (it ended while waiting)."""
        row = self.by_request.pop(request_id, None)
        if row is not None:
            self._free.append(row.index)

    def clear(self) -> None:
        """Free all rows."""
        for request_id in list(self.by_request):
            self.remove(request_id)

    def check_idle(self, finished_ids: Iterable[str]) -> None:
        """Raise AssertionError if any request other than `finished_ids`, whose rows the next step frees, holds a row."""
        self.check_integrity()
        lost = set(self.by_request) - set(finished_ids)
        assert not lost, f"rows are held by requests that are gone: {', '.join(sorted(lost))}"

    def check_integrity(self) -> None:
        """Every row is either free or held by one request."""
        held = [row.index for row in self.by_request.values()]
        assert sorted(held + self._free) == list(range(self.trash)), "a row is lost or held twice"


def sampled_by(params: SamplingParams, *, full_logprobs: bool, is_masked: bool) -> tuple[Variant, LogprobsKind]:
    """The variant that a request's steps need at least, and the logprobs that they report."""
    variant, kind = variant_of(params, full_logprobs=full_logprobs), LogprobsKind.NONE
    if needs_logprobs(params):
        variant = max(variant, Variant.RANDOM)
        kind = LogprobsKind.TOP if params.logprob_token_ids is None else LogprobsKind.NAMED
    return max(variant, Variant.MASKED) if is_masked else variant, kind


def _need(row: Row) -> Need:
    if row.pooling is not None:
        return Need.HIDDEN
    is_plain = row.variant < NO_DECODE and row.num_logprobs is None and row.named_ids is None
    return Need.DECODE if is_plain else Need.SAMPLE
