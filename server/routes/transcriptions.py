"""POST /v1/audio/transcriptions and /v1/audio/translations: what is said in a file of audio."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxllm.errors import InvalidRequestError
from jaxllm.media import Media
from jaxllm.media.audio_clips import Clip, cut
from jaxllm.model_parts.audio import SAMPLE_RATE
from jaxllm.outputs import CompletionOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams
from jaxllm.text.input_processor import ParentRequest
from jaxllm.text.transcripts import Segment, TranscriptTokens, as_srt, as_vtt
from server.body import parsing
from server.context import ServerContext, context_of, request_id_of
from server.deadline import Deadline
from server.endings import end_of
from server.errors import bad_request
from server.multipart import Form, read_form
from server.openapi import form_body
from server.prompts import tokenizer_of
from server.protocol.common import engine_options
from server.protocol.transcriptions import SAMPLING, TranscriptionRequest
from server.sse import DONE, EventStream, event, unless_disconnected

router = APIRouter(tags=["OpenAI"])
_FORM = form_body(TranscriptionRequest)
_SUBTITLES = {"srt": as_srt, "vtt": as_vtt}
_json = msgspec.json.encode


@router.post("/v1/audio/transcriptions", openapi_extra=_FORM)
async def create_transcription(request: Request) -> Response:
    """Write down what is said in a file of audio."""
    return await _answer(request, "transcribe")


@router.post("/v1/audio/translations", openapi_extra=_FORM)
async def create_translation(request: Request) -> Response:
    """Write down in English what is said in a file of audio."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: str) -> Response:
    context = context_of(request)
    raw = b"".join([piece async for piece in request.stream() if piece])
    form = read_form(request.headers.get("content-type", ""), raw)
    del raw
    body = await _read_body(form, context)
    async with Deadline(context.time_limit(body.timeout)) as limit:
        await context.adapter_of(body.model)
        reply = await _prepare(body, form.files["file"], task, context, request_id_of(request, body.request_id))
    form.files.clear()
    if body.stream:
        return EventStream(limit.applied(reply.stream()), keep_alive_seconds=context.options.replies.sse_keep_alive_interval)
    async with limit:
        with context.running():
            return await unless_disconnected(request.receive, reply.whole())


async def _read_body(form: Form, context: ServerContext) -> TranscriptionRequest:
    """The fields, checked. Raises ApiError."""
    values: dict[str, Any] = {}
    for name, texts in form.fields.items():
        own = name.removesuffix("[]")
        if own != name or own == "timestamp_granularities":
            values[own] = [*values.get(own, []), *texts]
        elif len(texts) > 1:
            raise bad_request(f"{name} is sent {len(texts)} times", name)
        else:
            values[name] = texts[0]
    work = parsing(_json(values), TranscriptionRequest, context.body_limits, context.options.limits.ignore_unknown_fields)
    body = await context.work.unless_small(work)
    if "file" not in form.files:
        raise bad_request("file is missing: send the audio as a part with a filename", "file")
    if "word" in body.timestamp_granularities:
        raise bad_request(
            "timestamp_granularities has word, times of words are not known here; use segment", "timestamp_granularities"
        )
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise bad_request("timestamp_granularities needs the response_format verbose_json", "timestamp_granularities")
    if body.stream and body.response_format not in ("json", "text"):
        raise bad_request(f"{body.response_format} is not streamed; use json, or set stream to false", "response_format")
    if body.stream_include_usage and not body.stream:
        raise bad_request("stream_include_usage needs stream to be true", "stream_include_usage")
    return body


async def _prepare(
    body: TranscriptionRequest, data: bytes, task: str, context: ServerContext, request_id: str
) -> "TranscriptionReply":
    """Decode the file, cut it, and check a request for each clip. Raises ApiError or InvalidRequestError."""
    engine = context.engine
    speech = engine.input_processor.media.speech
    assert speech is not None, "there are no routes for models that write down no speech"
    tokens = TranscriptTokens.of(tokenizer_of(engine), is_multilingual=speech.is_multilingual)
    tokens.check(body.language, task)
    # In the few threads of media: long files would hold up other requests, and several take much memory.
    samples = await asyncio.wrap_future(engine.input_processor.media.samples(Media("audio", data, name="file")))
    clips = await asyncio.to_thread(cut, samples, speech.audio.num_samples)
    options = engine_options(body, queue_timeout_seconds=context.queue_timeout_seconds, adapter=None)
    with_timestamps = body.response_format in ("verbose_json", "srt", "vtt")
    values = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    params = SamplingParams(**values, max_tokens=body.max_completion_tokens, output_kind=kind)

    async def prepare(clip: Clip, prompt: list[int], params: SamplingParams, own_id: str) -> ParentRequest:
        given: Any = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": (clip.samples, SAMPLE_RATE)}}
        try:
            request = await engine.prepare(given, params, own_id, options)
        except InvalidRequestError as error:
            raise bad_request(str(error), "prompt" if error.param == "prompt_token_ids" else error.param) from None
        context.request_log.write(request)
        return request

    language = body.language
    if language is None and tokens.languages:
        allowed = sorted(tokens.languages.values())
        one = SamplingParams(temperature=0.0, max_tokens=1, allowed_token_ids=allowed, output_kind=RequestOutputKind.FINAL_ONLY)
        asked = await prepare(clips[0], [tokens.start], one, f"lang-{request_id}")
        language = tokens.language_of((await _last(context, asked)).token_ids[0])
    # Of logits alone no probability follows.
    reports_silence = body.response_format == "verbose_json" and engine.config.model.logprobs_mode.endswith("logprobs")
    requests, silence_requests = [], []
    for number, clip in enumerate(clips):
        prompt = tokens.prompt(
            language=language,
            task=task,
            with_timestamps=with_timestamps,
            previous=body.prompt if number == 0 else "",
            max_previous=engine.max_model_len // 2 - 1,
        )
        own_id = f"trsc-{request_id}" if len(clips) == 1 else f"trsc-{request_id}-{number}"
        requests.append(await prepare(clip, prompt, params, own_id))
        if reports_silence and (no_speech := tokens.no_speech) is not None:
            kind = RequestOutputKind.FINAL_ONLY
            one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, logprob_token_ids=[no_speech], output_kind=kind)
            silence_requests.append(await prepare(clip, tokens.until_start(prompt), one, f"{own_id}-no-speech"))
    times = [(clip.start, clip.seconds) for clip in clips]
    reply_id = f"trsc-{request_id}"
    return TranscriptionReply(reply_id, body, task, language or "en", tokens, times, requests, silence_requests, context)


async def _last(context: ServerContext, request: ParentRequest) -> CompletionOutput:
    """The whole answer to a request. Raises ApiError for failures."""
    last: CompletionOutput | None = None
    async with contextlib.aclosing(context.engine.stream(request)) as outputs:
        async for output in outputs:
            last = output.outputs[0]
    assert last is not None
    end_of(last)
    return last


@dataclass(frozen=True)
class TranscriptionReply:
    """Writes the reply to one request, whole or in chunks."""

    request_id: str
    body: TranscriptionRequest
    task: str
    language: str
    tokens: TranscriptTokens
    times: Sequence[tuple[float, float]]
    """Start and length of each clip, in seconds."""
    requests: Sequence[ParentRequest]
    """One for each clip."""
    silence_requests: Sequence[ParentRequest]
    """One for each clip, whose only token has the log probability of no speech; none if that is not reported."""
    context: ServerContext

    @property
    def seconds(self) -> float:
        """Length of the audio."""
        start, length = self.times[-1]
        return start + length

    async def whole(self) -> Response:
        """Return the reply as one."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks, silences = (
                    [group.create_task(_last(self.context, request)) for request in requests]
                    for requests in (self.requests, self.silence_requests)
                )
        except ExceptionGroup as faults:
            raise faults.exceptions[0] from None  # the others were aborted because of it
        answers, kind = [task.result() for task in tasks], self.body.response_format
        if kind in ("json", "text"):
            text = "".join(answer.text for answer in answers).strip()
            usage = {"type": "duration", "seconds": math.ceil(self.seconds)}
            return PlainTextResponse(text + "\n") if kind == "text" else _as_json({"text": text, "usage": usage})
        by_clip = [
            self.tokens.segments(answer.token_ids, start, length)
            for answer, (start, length) in zip(answers, self.times, strict=True)
        ]
        if kind in _SUBTITLES:
            return PlainTextResponse(_SUBTITLES[kind]([segment for segments in by_clip for segment in segments]))
        return _as_json(self._verbose(by_clip, [self._no_speech_prob(task.result()) for task in silences]))

    def _no_speech_prob(self, answer: CompletionOutput) -> float:
        """The probability of the token of silence in place of an answer's first."""
        assert answer.logprobs is not None and self.tokens.no_speech is not None
        first = answer.logprobs[0]
        assert first is not None
        return math.exp(first[self.tokens.no_speech].logprob)

    def _verbose(self, by_clip: Sequence[Sequence[Segment]], no_speech_probs: Sequence[float]) -> dict[str, Any]:
        segments = [segment for of_clip in by_clip for segment in of_clip]
        probs = [{"no_speech_prob": prob} for prob in no_speech_probs] or [{}] * len(by_clip)
        of_segments = [prob for prob, of_clip in zip(probs, by_clip, strict=True) for _ in of_clip]
        described = [
            {
                "id": number,
                "start": each.start,
                "end": each.end,
                "text": each.text,
                "tokens": each.token_ids,
                "temperature": self.body.temperature,
                **of_segments[number],
            }
            for number, each in enumerate(segments)
        ]
        return {
            "task": self.task,
            "language": self.language,
            "duration": round(self.seconds, 2),
            "text": "".join(each.text for each in segments).strip(),
            "segments": described,
            "usage": {"type": "duration", "seconds": math.ceil(self.seconds)},
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the reply as events, clip by clip."""
        head = {
            "id": self.request_id,
            "object": "transcription.chunk",
            "created": int(time.time()),
            "model": self.context.model_name,
        }
        num_prompt = num_answered = 0
        with self.context.running():
            for number, request in enumerate(self.requests):
                num_prompt += len(request.prompt_token_ids)
                is_last, reason = number == len(self.requests) - 1, None
                async with contextlib.aclosing(self.context.engine.stream(request)) as outputs:
                    async for output in outputs:
                        answer = output.outputs[0]
                        num_answered += len(answer.token_ids)
                        reason = end_of(answer)
                        choice = {"delta": {"content": answer.text}, "finish_reason": reason if is_last else None}
                        yield event(_json({**head, "choices": [choice]}))
            if self.body.stream_include_usage:
                usage = {
                    "prompt_tokens": num_prompt,
                    "completion_tokens": num_answered,
                    "total_tokens": num_prompt + num_answered,
                }
                yield event(_json({**head, "choices": [], "usage": usage}))
        yield DONE


def _as_json(value: Any) -> Response:
    return Response(_json(value), media_type="application/json")
