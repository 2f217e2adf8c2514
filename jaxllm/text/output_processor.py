"""Converts the engine core's outputs to RequestOutputs: text, stop strings, logprobs, the n answers of a prompt combined."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxllm import clock
from jaxllm.kv_transfer import KVTransfer
from jaxllm.log import logger
from jaxllm.metrics.engine_metrics import EngineMetrics
from jaxllm.outputs import (
    CompletionOutput,
    EngineCoreOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.detokenizer import Detokenizer
from jaxllm.text.input_processor import ParentRequest
from jaxllm.text.logprobs import FlatLogprobs, positions
from jaxllm.text.tokenizer import Tokenizer

_NO_VECTORS = np.zeros(0, np.float32)


@dataclass(frozen=True)
class ProcessedStep:
    """The results of a step for the callers."""

    outputs: list[tuple[str, Any]] = field(default_factory=list)
    """RequestOutputs (of pooling requests PoolingRequestOutputs), each with the internal id of its request, because callers' ids
    may repeat."""
    engine_ids_to_abort: list[str] = field(default_factory=list)
    """Requests that ended here by a stop string or an error, so that the engine core must abort them."""


class _Answer:
    """One of the n sequences of a request, while it grows."""

    def __init__(self, index: int, request: EngineCoreRequest, tokenizer: Tokenizer | None, stream_interval: int):
        self.index = index
        self.engine_id = request.request_id
        self.params: SamplingParams = request.sampling_params
        self.stream_interval = max(stream_interval, self.params.stream_interval or 1)
        self.detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, self.params)
        self.tokenizer = tokenizer if self.params.detokenize else None
        self.prompt_token_ids = request.prompt_token_ids
        self.token_ids: list[int] = []
        self.logprobs: Any = None
        self.cumulative_logprob: float | None = None
        if self.params.logprobs is not None or self.params.logprob_token_ids is not None:
            self.logprobs = FlatLogprobs() if self.params.flat_logprobs else []
            self.cumulative_logprob = 0.0
        self.is_plain = self.tokenizer is None and self.logprobs is None
        """Whether the caller receives only token ids."""
        self.grammar_ends: frozenset[int] | None = None
        """The tokens that may end an answer with a grammar."""
        if request.grammar is not None:
            eos_token_ids = () if self.params.ignore_eos else request.eos_token_ids
            self.grammar_ends = frozenset((*eos_token_ids, *(self.params.stop_token_ids or ())))
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error_kind: ErrorKind | None = None
        self.num_preemptions = 0
        self.first_token_time: float | None = None
        self.prefill_seconds: float | None = None
        self.last_token_time = 0.0
        self.num_sent_tokens = 0
        self.num_sent_characters = 0

    def update(self, output: EngineCoreOutput) -> bool:
        """Process a new output. Returns whether a stop string ended the answer; the caller must then abort it in the core."""
        if self.is_plain and output.finish_reason is None:
            self.token_ids += output.new_token_ids
            return False
        stop, num_kept = None, 0
        stopped_by_token = output.finish_reason is FinishReason.STOP
        for place, token_id in enumerate(output.new_token_ids):
            is_last = place == len(output.new_token_ids) - 1
            is_stop_token = stopped_by_token and is_last and self._ends_request(token_id)
            stop = self.detokenizer.push_stop_token(token_id) if is_stop_token else self.detokenizer.push(token_id)
            num_kept += 1
            if stop is not None:
                break
        self._append(output, num_kept)
        if stop is None and output.finish_reason is not None:
            stop = self.detokenizer.finish()
        if stop is not None:
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
            return output.finish_reason is None
        self.finish_reason, self.stop_reason, self.error_kind = output.finish_reason, output.stop_reason, output.error_kind
        return False

    def _ends_request(self, token_id: int) -> bool:
        """Whether the last token of a stopped answer ended it; if not, its grammar ended after an ordinary token."""
        if self.grammar_ends is None:
            return True
        return token_id in self.grammar_ends

    def _append(self, output: EngineCoreOutput, num_tokens: int) -> None:
        if self.logprobs is not None and output.new_logprobs is not None and num_tokens:
            params = self.params
            count = params.logprobs if params.logprob_token_ids is None else len(params.logprob_token_ids)
            previous = self.token_ids[-4:] if len(self.token_ids) >= 4 else self.prompt_token_ids[-4:] + self.token_ids
            rows = positions(output.new_logprobs, count or 0, previous, self.tokenizer, ranked=params.logprob_token_ids is None)
            self.logprobs.extend(rows[:num_tokens])
            gained = sum(output.new_logprobs.logprobs[:num_tokens, 0].tolist())
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + gained
        self.token_ids += output.new_token_ids[:num_tokens]

    def abort(self) -> None:
        self.finish_reason = FinishReason.ABORT
        self.detokenizer.finish()

    def fail(self, error: Exception) -> None:
        """End with an error and the output so far, whose ids, text and logprobs may differ in length."""
        self.finish_reason, self.error_kind = FinishReason.ERROR, ErrorKind.INTERNAL
        self.stop_reason = f"the output of the request could not be assembled ({type(error).__name__})"

    @property
    def is_due(self) -> bool:
        """Whether an output to the caller is due now."""
        num_new = len(self.token_ids) - self.num_sent_tokens
        return self.finish_reason is not None or (
            num_new > 0 and (self.num_sent_tokens == 0 or num_new >= self.stream_interval)
        )

    def completion(self, *, delta: bool) -> CompletionOutput:
        """The output for the caller; with `delta` only what was not sent yet."""
        text, token_ids, logprobs = self.detokenizer.text, self.token_ids, self.logprobs
        if delta:
            text, token_ids = text[self.num_sent_characters :], token_ids[self.num_sent_tokens :]
            logprobs = None if logprobs is None else logprobs[self.num_sent_tokens :]
        elif self.finish_reason is None:
            token_ids = list(token_ids)
            logprobs = None if logprobs is None else logprobs[:]
        self.num_sent_tokens, self.num_sent_characters = len(self.token_ids), len(self.detokenizer.text)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
            error_kind=self.error_kind,
        )


class _Live:
    """An unfinished request."""

    def __init__(self, request: ParentRequest, tokenizer: Tokenizer | None, stream_interval: int):
        self.request = request
        self.kind = request.params.output_kind
        self.answers = [_Answer(index, child, tokenizer, stream_interval) for index, child in enumerate(request.children)]
        self.num_unfinished = len(self.answers)
        self.prompt_logprobs: Any = None
        self.has_prompt_logprobs = False
        """Whether they have arrived, even if they were sent on already."""
        self.num_cached_tokens: int | None = None
        self.num_cache_creation_tokens = 0
        self.transfer = request.children[0].options.kv_transfer
        self.kv_transfer_params: dict[str, Any] | None = None
        self.vectors = _NO_VECTORS
        """The result of a finished pooling request."""
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.counted_by: EngineMetrics | None = None
        """The counters of the replica that computes it."""

    @property
    def is_finished(self) -> bool:
        return self.num_unfinished == 0

    def cached_tokens_of(self, first: EngineCoreOutput) -> int:
        """Prompt tokens that were cached where the prompt was computed: in the engine of its first output, or in a prefill engine."""
        if self.transfer is None or self.transfer.num_cached_tokens is None:
            return first.num_cached_tokens
        return min(self.transfer.num_cached_tokens, len(self.request.prompt_token_ids))

    def take_prompt_logprobs(self, output: EngineCoreOutput) -> None:
        tokenizer = self.answers[0].tokenizer
        params = self.request.params
        self.has_prompt_logprobs = True
        assert output.new_prompt_logprobs is not None and params.prompt_logprobs is not None
        prompt_logprobs: Any = FlatLogprobs() if params.flat_logprobs else []
        prompt_logprobs.append(None)
        first = self.request.prompt_token_ids[:1]
        prompt_logprobs.extend(positions(output.new_prompt_logprobs, params.prompt_logprobs, first, tokenizer))
        self.prompt_logprobs = prompt_logprobs

    def output(self, changed: Sequence[_Answer]) -> RequestOutput | PoolingRequestOutput | None:
        """The output after some answers changed, or None if none is due."""
        if self.request.pooling_params is not None:
            return self._pooling_output()
        finished = self.is_finished
        if self.kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        due = [answer for answer in changed if answer.is_due]
        if not due:
            return None
        delta = self.kind is RequestOutputKind.DELTA
        shown = sorted(due, key=lambda answer: answer.index) if delta else self.answers
        prompt_logprobs = self.prompt_logprobs
        if delta:
            self.prompt_logprobs = None
        return self._request_output([answer.completion(delta=delta) for answer in shown], prompt_logprobs)

    def failed_output(self) -> RequestOutput | PoolingRequestOutput:
        """The last output when all answers have failed. Reads nothing that may have caused the failure."""
        if self.request.pooling_params is not None:
            self.vectors = _NO_VECTORS
            return self._pooling_output()
        return self._request_output(
            [
                CompletionOutput(
                    answer.index, "", [], finish_reason="error", stop_reason=answer.stop_reason, error_kind=answer.error_kind
                )
                for answer in self.answers
            ],
            None,
        )

    def _request_output(self, outputs: list[CompletionOutput], prompt_logprobs: Any) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_cache_creation_tokens=self.num_cache_creation_tokens,
            kv_transfer_params=self.kv_transfer_params if self.is_finished else None,
            metrics=self.metrics,
        )

    def _pooling_output(self) -> PoolingRequestOutput:
        end = self.answers[0]
        is_error = end.finish_reason is FinishReason.ERROR
        return PoolingRequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=PoolingOutput(self.vectors),
            finish_reason=str(end.finish_reason),
            error=str(end.stop_reason) if is_error else None,
            error_kind=end.error_kind,
            num_cached_tokens=self.num_cached_tokens or 0,
            metrics=self.metrics,
        )


class OutputProcessor:
    """The unfinished requests, and their outputs so far."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        metrics: Sequence[EngineMetrics] = (),
        stream_interval: int = 1,
        cached_block_tokens: int | None = None,
    ):
        """metrics: of each replica of the engine; none: nothing is counted. cached_block_tokens: tokens of a block of the prefix
        cache; None: there is none."""
        self._cached_block_tokens = cached_block_tokens
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._stream_interval = stream_interval
        self._live: dict[str, _Live] = {}
        self._answers: dict[str, tuple[_Live, _Answer]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def add(self, request: ParentRequest, replica: int = 0) -> None:
        """Register a request whose outputs will arrive from a replica of the engine."""
        live = _Live(request, self._tokenizer, self._stream_interval)
        self._live[request.internal_id] = live
        for answer in live.answers:
            self._answers[answer.engine_id] = (live, answer)
        if self._metrics:
            live.counted_by = self._metrics[replica]
            if request.pooling_params is None:
                live.counted_by.request_arrived(request.params)

    def moved(self, engine_id: str, replica: int, transfer: KVTransfer | None) -> None:
        """Count a request from now on at another replica. transfer: where blocks of its prompt come from."""
        live, _ = self._answers.get(engine_id, (None, None))
        if live is not None:
            is_prompt_counted = live.transfer is not None or live.metrics.first_token_time is not None  # answers share it
            if transfer is not None and not is_prompt_counted and live.counted_by is not None:
                live.counted_by.prompt_handed_over(len(live.request.prompt_token_ids) - (transfer.num_cached_tokens or 0))
            live.transfer = transfer
            live.counted_by = self._metrics[replica] if self._metrics else None

    def process(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedStep:
        """Process the outputs of a replica's step, except those of requests that have ended. An error in one answer ends only that
        answer."""
        now = clock.now()
        metrics: EngineMetrics | None = None
        step = ProcessedStep()
        changed: dict[str, list[_Answer]] = {}
        num_new_tokens = 0
        latest: dict[float, int] = {}
        """Number of answers by the time of their previous token. There are few such times, because a step serves many answers."""
        for output in outputs:
            live, answer = self._answers.get(output.request_id, (None, None))
            if live is None or answer is None:
                continue
            num_before = len(answer.token_ids)
            metrics = live.counted_by
            try:
                if output.new_prompt_logprobs is not None and not live.has_prompt_logprobs:
                    live.take_prompt_logprobs(output)
                if answer.update(output):
                    step.engine_ids_to_abort.append(answer.engine_id)
            except Exception as error:
                self._fail(answer, error, step)
            if num_new := len(answer.token_ids) - num_before:
                num_new_tokens += num_new
                if answer.first_token_time is None:
                    self._note_first_token(live, answer, output, now)
                else:
                    latest[answer.last_token_time] = latest.get(answer.last_token_time, 0) + 1
                answer.last_token_time = now
                live.metrics.num_generation_tokens += num_new
            if output.pooled is not None:
                live.vectors, live.num_cached_tokens = output.pooled, output.num_cached_tokens
                live.metrics.num_cached_tokens, live.metrics.loaded_tokens = output.num_cached_tokens, output.loaded_tokens
                if metrics is not None:
                    metrics.prefill_done(
                        len(answer.prompt_token_ids),
                        output.num_cached_tokens,
                        None,
                        loaded_tokens=output.loaded_tokens,
                        queue_seconds=output.queue_seconds,
                        prefill_seconds=output.prefill_seconds,
                    )
            if output.kv_transfer_params is not None:
                live.kv_transfer_params = output.kv_transfer_params
            if output.accepted_counts is not None and len(live.answers) == 1:
                live.metrics.accepted_counts, live.metrics.num_draft_tokens = output.accepted_counts, output.num_draft_tokens
            if output.num_preemptions != answer.num_preemptions:
                live.metrics.num_preemptions += output.num_preemptions - answer.num_preemptions
                answer.num_preemptions = output.num_preemptions
            if answer.finish_reason is not None:
                self._note_end(live, answer, now)
            elif live.kind is RequestOutputKind.FINAL_ONLY:
                continue
            changed.setdefault(live.request.internal_id, []).append(answer)
        if metrics is not None:
            for before, count in latest.items():
                metrics.tokens_done(now - before, count)
            metrics.add_generation_tokens(num_new_tokens)
        for internal_id, answers in changed.items():
            self._emit(self._live[internal_id], answers, step)
        return step

    def abort(self, request_ids: Iterable[str], *, internal: bool = False) -> ProcessedStep:
        """End requests with their output so far. `request_ids` are the callers' ids, each of which may name several requests."""
        wanted = set(request_ids)
        now = clock.now()
        step = ProcessedStep()
        found = [
            live
            for live in self._live.values()
            if (live.request.internal_id if internal else live.request.request_id) in wanted
        ]
        for live in found:
            unfinished = [answer for answer in live.answers if answer.finish_reason is None]
            for answer in unfinished:
                try:
                    answer.abort()
                except Exception:
                    logger.exception("the last text of request %s is lost", answer.engine_id)
                step.engine_ids_to_abort.append(answer.engine_id)
                self._note_end(live, answer, now)
            self._emit(live, unfinished, step)
        return step

    def internal_id_of(self, engine_id: str) -> str | None:
        """The request that an answer belongs to, by the engine's id of the answer; None if it has ended."""
        live, _ = self._answers.get(engine_id, (None, None))
        return None if live is None else live.request.internal_id

    def internal_ids(self) -> list[str]:
        """All requests in flight."""
        return list(self._live)

    def _emit(self, live: _Live, changed: list[_Answer], step: ProcessedStep) -> None:
        try:
            output = live.output(changed)
        except Exception as error:
            for answer in live.answers:
                is_live = answer.finish_reason is None
                self._fail(answer, error, step)
                if is_live:
                    self._note_end(live, answer, clock.now())
            output = live.failed_output()
        if output is not None:
            step.outputs.append((live.request.internal_id, output))
        if live.is_finished:
            del self._live[live.request.internal_id]

    def _fail(self, answer: _Answer, error: Exception, step: ProcessedStep) -> None:
        logger.error("the output of request %s failed", answer.engine_id, exc_info=error)
        answer.fail(error)
        step.engine_ids_to_abort.append(answer.engine_id)

    def _note_first_token(self, live: _Live, answer: _Answer, item: EngineCoreOutput, now: float) -> None:
        answer.first_token_time = now
        answer.prefill_seconds = item.prefill_seconds
        if live.metrics.first_token_time is None:
            live.metrics.first_token_time = now
            live.metrics.queue_seconds, live.metrics.prefill_seconds = item.queue_seconds, item.prefill_seconds
            live.num_cached_tokens = live.cached_tokens_of(item)
            live.metrics.num_cached_tokens, live.metrics.loaded_tokens = item.num_cached_tokens, item.loaded_tokens
            if (size := self._cached_block_tokens) is not None:
                num_full = len(answer.prompt_token_ids) // size * size
                live.num_cache_creation_tokens = max(0, num_full - live.num_cached_tokens)
        if live.counted_by is not None:
            live.counted_by.prefill_done(
                len(answer.prompt_token_ids),
                item.num_cached_tokens,
                now - live.request.arrival_time,
                loaded_tokens=item.loaded_tokens,
                queue_seconds=item.queue_seconds,
                prefill_seconds=item.prefill_seconds,
            )

    def _note_end(self, live: _Live, answer: _Answer, now: float) -> None:
        del self._answers[answer.engine_id]
        live.num_unfinished -= 1
        live.metrics.finished_time = now
        if live.counted_by is not None:
            live.counted_by.request_finished(
                str(answer.finish_reason),
                num_prompt_tokens=len(answer.prompt_token_ids),
                num_generation_tokens=len(answer.token_ids),
                seconds=now - live.request.arrival_time,
                decode_seconds=None if answer.first_token_time is None else answer.last_token_time - answer.first_token_time,
                prefill_seconds=answer.prefill_seconds,
                num_preemptions=answer.num_preemptions,
            )
            if live.is_finished:
                live.counted_by.all_answers_finished(max(len(each.token_ids) for each in live.answers))
