"""Processes the results of a step: appends tokens to requests, ends those that are done, and makes their outputs."""

import time
from collections.abc import Callable, Iterable
from itertools import takewhile

from jaxllm.errors import GrammarError
from jaxllm.log import logger
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import ErrorKind, Request, RequestStatus
from jaxllm.scheduler.stop import check_stop
from jaxllm.scheduler_output import ModelRunnerOutput, RowStep, TokenLogprobs

_NOT_FINITE = "the model computed NaN or infinity for this request; check its weights, or choose a dtype with a larger range"

Share = tuple[Request, int, RowStep]
"""One request's part of a step: the request, the most tokens that it may sample (0 if the step does not reach the end of its known
tokens, else 1 and its drafts; a pooled vector counts as a token), its row. A plain tuple, because one is made for every request in
every step."""


def take_in(
    shares: Iterable[Share],
    result: ModelRunnerOutput,
    outputs: list[EngineCoreOutput],
    finish: Callable[[Request, RequestStatus], None],
) -> bool:
    """Append the outputs of a step to `outputs`, and call `finish` for each request that ends. Returns whether any did.

    Requests that have ended meanwhile are skipped. A failure while processing one request ends that request.
    """
    any_ended = False
    sampled_token_ids, errors = result.sampled_token_ids, result.errors
    logprobs, prompt_logprobs = result.logprobs, result.prompt_logprobs
    last_unfinished = RequestStatus.PREEMPTED
    for request, num_samples, row in shares:
        request.num_output_placeholders -= num_samples
        request.num_drafts_in_flight -= row.num_drafts
        if request.status > last_unfinished:
            continue
        request_id = request.request_id
        # A resumed request computes its prompt again; its prompt logprobs are reported once.
        is_first = len(request.token_ids) == request.num_prompt_tokens
        end: RequestStatus | None = None
        new_logprobs = new_prompt_logprobs = None
        if errors and request_id in errors:
            new_token_ids, end = _fail(request, errors[request_id])
        elif result.not_finite and request_id in result.not_finite:
            # With drafts, tokens may come before the one that could not be drawn.
            good = [*takewhile(lambda token_id: token_id >= 0, sampled_token_ids.get(request_id, ()))]
            new_token_ids, end = _append_until_stop(request, good) if request.matcher is None else ([], None)
            if end is None:
                _, end = _fail(request, _NOT_FINITE, ErrorKind.NOT_FINITE)
            if logprobs:
                new_logprobs = _first_rows(logprobs.get(request_id), len(new_token_ids))
        elif sampled := sampled_token_ids.get(request_id):
            if len(sampled) < num_samples and request.status == RequestStatus.RUNNING:
                request.num_computed_tokens -= num_samples - len(sampled)  # drafts that were wrong
            if row.num_drafts:
                request.note_drafts(row.num_drafts, len(sampled) - 1)
            num_known = request.num_tokens
            try:
                new_token_ids, end = _append_until_stop(request, sampled)
                if logprobs:
                    new_logprobs = _first_rows(logprobs.get(request_id), len(new_token_ids))
                if is_first and prompt_logprobs:
                    new_prompt_logprobs = prompt_logprobs.get(request_id)
            except GrammarError as error:
                _, end = _fail(request, str(error), ErrorKind.CONSTRAINT)
                new_token_ids = request.token_ids[num_known:]  # those before the one that could not be drawn
                if logprobs:
                    new_logprobs = _first_rows(logprobs.get(request_id), len(new_token_ids))
            except Exception as error:
                logger.exception("taking in the tokens of request %s failed", request_id)
                new_token_ids, end = _fail(request, f"the request failed in the engine ({type(error).__name__})")
        elif request_id in result.pooled:
            new_token_ids, end = [], RequestStatus.FINISHED_STOPPED
        elif num_samples:
            new_token_ids, end = _fail(request, "the request got no token in its step")
        else:
            continue
        if end is not None:
            finish(request, end)
            any_ended = True
        output = EngineCoreOutput(
            request_id,
            new_token_ids,
            None if end is None else end.finish_reason,
            request.stop_reason,
            new_logprobs,
            new_prompt_logprobs,
            request.num_cached_tokens,
            request.num_preemptions,
            error_kind=request.error_kind,
            pooled=result.pooled.get(request_id) if end is RequestStatus.FINISHED_STOPPED else None,
        )
        if request.num_draft_tokens:
            output.accepted_counts, output.num_draft_tokens = tuple(request.accepted_counts), request.num_draft_tokens
        if end is not None and request.kv_transfer_params is not None:
            output.kv_transfer_params = request.kv_transfer_params
        if is_first:
            output.loaded_tokens = request.loaded_tokens
            output.queue_seconds = request.scheduled_at - request.queued_at
            output.prefill_seconds = time.monotonic() - request.scheduled_at
        outputs.append(output)
    return any_ended


def last_output(request: Request) -> EngineCoreOutput:
    """The last output of a request that ended outside a step."""
    return EngineCoreOutput(
        request.request_id,
        [],
        request.status.finish_reason,
        request.stop_reason,
        num_cached_tokens=max(0, request.num_cached_tokens),
        num_preemptions=request.num_preemptions,
        error_kind=request.error_kind,
    )


def _fail(request: Request, message: str, kind: ErrorKind = ErrorKind.INTERNAL) -> tuple[list[int], RequestStatus]:
    """Record why a request ends with an error. Returns its new tokens (none) and its status."""
    request.stop_reason, request.error_kind = message, kind
    return [], RequestStatus.FINISHED_ERROR


def _append_until_stop(request: Request, sampled: list[int]) -> tuple[list[int], RequestStatus | None]:
    """Append sampled tokens up to the one that ends the request. Returns the appended tokens and the final status, if any.

    Raises GrammarError if the request cannot continue.
    """
    matcher, thinking = request.matcher, request.thinking
    for count, token_id in enumerate(sampled, 1):
        if token_id < 0:
            raise GrammarError("what the request allows, biases and forbids leaves no token to draw")
        if matcher is not None:
            matcher.advance(token_id)
        if thinking is not None:
            thinking.advance(token_id)
        end = check_stop(request) if request.append_output(token_id) else None
        if matcher is not None and matcher.is_done and end in (None, RequestStatus.FINISHED_LENGTH_CAPPED):
            end = RequestStatus.FINISHED_STOPPED  # it is complete, also with its last token
        if end is not None:
            return sampled[:count], end
    return sampled, None


def _first_rows(logprobs: TokenLogprobs | None, count: int) -> TokenLogprobs | None:
    if logprobs is None or len(logprobs.ranks) == count:
        return logprobs
    return TokenLogprobs(logprobs.token_ids[:count], logprobs.logprobs[:count], logprobs.ranks[:count])
