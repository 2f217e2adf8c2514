"""Fills the masks of a step from the grammars and thinking budgets of its requests. Does not import JAX."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxllm.request import Request
from jaxllm.thinking import force_token

if TYPE_CHECKING:
    from jaxllm.engine.executor import PendingStep


def fill(step: "PendingStep", requests: Mapping[str, Request]) -> None:
    """Write what each request may sample, behind its last token and behind each of its drafts, and its drafts for the next step. All
    tokens before the step are known.

    requests: the unfinished ones that are masked, by id. Other rows of the step may sample anything; their tokens are dropped.
    """
    mask_TW, width = step.mask_TW, step.width
    assert mask_TW is not None, "a step without masked requests"
    found = enumerate(map(requests.get, step.sampled_ids))
    rows = [(row, request) for row, request in found if request is not None]
    if any(request.matcher is not None for _, request in rows):
        from jaxllm.structured.matcher import Matcher, fill_masks  # imports llguidance

        drafts = step.drafts()
        masked = [(row, r.matcher) for row, r in rows if isinstance(r.matcher, Matcher)]
        fill_masks([(matcher, row * width, drafts[row]) for row, matcher in masked], mask_TW)
        if next_drafts := {row: tokens for row, matcher in masked if (tokens := matcher.next_drafts(drafts[row]))}:
            step.set_next_drafts(next_drafts)
    for row, request in rows:
        if request.thinking is not None and (token_id := request.thinking.forced_token_id) is not None:
            force_token(mask_TW[row * width], token_id)
