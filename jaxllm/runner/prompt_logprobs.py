"""Gathers the logprobs of a prompt over the steps that compute it, and hands them over once, whole."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxllm.runner.rows import Row
from jaxllm.runner.step import Logprobs
from jaxllm.scheduler_output import TokenLogprobs


@dataclass(frozen=True)
class PendingPromptLogprobs:
    """Scores of `count` prompt tokens of a request, on their way from the device."""

    row: Row
    count: int
    scores: Logprobs

    def collect(self) -> TokenLogprobs | None:
        """Add this part to the earlier ones (waits for the device). Returns the whole if this was the last part.

        Parts belong to the row, not to the request: a preempted request starts again in a new row.
        """
        row = self.row
        assert row.num_prompt_logprobs is not None, "a part of a request that asked for none"
        row.prompt_parts.append(trim(self.scores, slice(0, self.count), row.num_prompt_logprobs))
        if sum(len(part.ranks) for part in row.prompt_parts) < row.data.num_prompt_tokens - 1:
            return None
        return TokenLogprobs(
            np.concatenate([part.token_ids for part in row.prompt_parts]),
            np.concatenate([part.logprobs for part in row.prompt_parts]),
            np.concatenate([part.ranks for part in row.prompt_parts]),
        )


def trim(scores: Logprobs, rows: slice, num_logprobs: int) -> TokenLogprobs:
    """Some rows of the device's scores, with as many likeliest tokens as were asked for (-1: all)."""
    token_ids, logprobs, ranks = jax.device_get(scores)
    columns = slice(0, None if num_logprobs == -1 else num_logprobs + 1)
    return TokenLogprobs(token_ids[rows, columns], logprobs[rows, columns], ranks[rows])
