"""Collects the logprobs of a prompt over the steps that compute it, and returns them once they are complete."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxllm.runner.rows import Row
from jaxllm.runner.step import Logprobs
from jaxllm.runner.step_programs import PROMPT_LOGPROBS_CHUNK
from jaxllm.scheduler_output import TokenLogprobs


@dataclass(frozen=True)
class PendingPromptLogprobs:
    """Scores of `count` prompt tokens of a request, in flight from the device. `count` may be 0 in the last part."""

    row: Row
    count: int
    scores: list[Logprobs]
    """Of PROMPT_LOGPROBS_CHUNK tokens each, the last one padded."""
    is_last: bool
    """Whether the prompt ends with it."""

    def collect(self) -> TokenLogprobs | None:
        """Add this part to the earlier ones (waits for the device). Returns the whole if this was the last part.

        Parts belong to the row, not to the request: a preempted request starts again in a new row.
        """
        row = self.row
        assert row.num_prompt_logprobs is not None, "a part of a request that asked for none"
        for first, scores in zip(range(0, self.count, PROMPT_LOGPROBS_CHUNK), self.scores, strict=True):
            row.prompt_parts.append(trim(scores, slice(0, self.count - first), row.num_prompt_logprobs))
        if not self.is_last:
            return None
        parts = row.prompt_parts or [_no_logprobs(row.num_prompt_logprobs)]
        return TokenLogprobs(
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )


def _no_logprobs(num_logprobs: int) -> TokenLogprobs:
    """Those of a prompt of one token."""
    shape = (0, 1 + max(0, num_logprobs))
    return TokenLogprobs(np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(0, np.int32))


def trim(scores: Logprobs, rows: slice, num_logprobs: int) -> TokenLogprobs:
    """Some rows of the device's scores, with as many likeliest tokens as were asked for (-1: all)."""
    token_ids, logprobs, ranks = jax.device_get(scores)
    columns = slice(0, None if num_logprobs == -1 else num_logprobs + 1)
    return TokenLogprobs(token_ids[rows, columns], logprobs[rows, columns], ranks[rows])
