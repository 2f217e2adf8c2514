"""The methods of the gRPC service, over the same engine and under the same limits as HTTP."""

import asyncio
import contextlib
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from jaxllm import __version__
from jaxllm.request_options import Placement, RequestOptions, set_placement
from jaxllm.sampling_params import SamplingParams
from server.context import ServerContext
from server.endings import failure
from server.errors import ApiError, bad_request
from server.grpc import jaxllm_pb2 as pb
from server.grpc.interceptor import authorization_of, key_in
from server.grpc.messages import option_values, response_of, sampling_fields
from server.owner import owner_of_key
from server.prompts import check_length, check_max_tokens, check_text_length, encode_prompt, tokenizer_of
from server.sampling import sampling_params
from server.work import ORIGIN, Origin, Work, in_one_piece

MAX_REQUEST_ID_LENGTH = 128
_NEVER_SECONDS = 1e9


class Inference:
    """One instance per process, in the event loop of its API server."""

    def __init__(self, context: ServerContext):
        self._context = context
        self._engine = context.engine
        self._running: dict[tuple[str, str], str] = {}
        """(owner, caller's request id) to the engine's request id."""

    async def Generate(self, request: pb.GenerateRequest, call: Any) -> AsyncIterator[pb.GenerateResponse]:
        """Stream tokens. A call that is cancelled or passes its deadline aborts the request."""
        if self._context.refusal is not None:
            raise self._context.refusal
        limit = self._context.options.limits.request_timeout or None
        client = self._client(call)
        set_placement(Placement(client=client))  # in this call's own task
        with (
            self._context.clients.counted(client),
            self._context.running(),
            self._registered(request.request_id, call) as (request_id, engine_id),
        ):
            async with asyncio.timeout(limit):
                adapter = await self._context.adapter_of(request.model or None)
                ORIGIN.set(Origin(_owner(call), request.ByteSize()))
                params = await self._context.work.unless_small(in_one_piece(self._params, request))
                prompt = await self._context.work.run(self._prompt(request))
                options = RequestOptions(
                    queue_timeout_seconds=self._context.queue_timeout_seconds, adapter=adapter, **option_values(request)
                )
                prepared = await self._engine.prepare(prompt, params, engine_id, options)
                is_first = True
                async with contextlib.aclosing(self._engine.stream(prepared)) as outputs:
                    async for output in outputs:
                        for answer in output.outputs:
                            if answer.finish_reason == "error":
                                raise failure(answer.error_kind)
                        with self._aborted_unless_read(engine_id):
                            yield response_of(output, request_id, is_first=is_first)
                        is_first = False

    async def Abort(self, request: pb.AbortRequest, call: Any) -> pb.AbortResponse:
        """Abort requests of the same caller."""
        owner = _owner(call)
        ids = [self._running[owner, each] for each in dict.fromkeys(request.request_ids) if (owner, each) in self._running]
        if ids:
            await self._engine.abort(ids)
        return pb.AbortResponse(num_aborted=len(ids))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, call: Any) -> pb.GetModelInfoResponse:
        """Information about the served model."""
        model = self._engine.model_config
        adapters = [info.name for info in await self._context.adapters.infos()]
        return pb.GetModelInfoResponse(
            served_names=[*self._context.model_names, *adapters],
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_model_len=self._engine.max_model_len,
            eos_token_ids=self._engine.input_processor.eos_token_ids,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, call: Any) -> pb.GetServerInfoResponse:
        """The server's health."""
        return pb.GetServerInfoResponse(
            version=__version__, ready=self._engine.is_running, num_running=self._context.num_running
        )

    @contextlib.contextmanager
    def _aborted_unless_read(self, engine_id: str) -> Iterator[None]:
        """Abort the request if sending a response takes longer than clients have to read. The client finds that out when it reads on."""
        aborting: list[asyncio.Task[None]] = []
        seconds, loop = self._context.options.limits.unread_stream_timeout, asyncio.get_running_loop()
        timer = loop.call_later(
            seconds or _NEVER_SECONDS, lambda: aborting.append(loop.create_task(self._engine.abort(engine_id)))
        )
        try:
            yield
        finally:
            timer.cancel()

    def _client(self, call: Any) -> str:
        kind, _, rest = call.peer().partition(":")  # ipv4:127.0.0.1:50000, ipv6:[::1]:50000 or unix:
        host = urllib.parse.unquote(rest).rpartition(":")[0].strip("[]") if kind.startswith("ipv") else None
        return self._context.clients.label_of(key_in(authorization_of(call.invocation_metadata())), host)

    def _prompt(self, request: pb.GenerateRequest) -> Work[Any]:
        """The prompt as token ids, checked to fit the context. Raises ApiError."""
        max_model_len = self._engine.max_model_len
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids.ids)}
        if request.text:
            tokenizer = tokenizer_of(self._engine)
            yield from check_text_length(tokenizer, request.text, max_model_len)
            ids = encode_prompt(tokenizer, request.text, add_special_tokens=True)
            prompt = {"prompt": request.text, "prompt_token_ids": ids}
        if not prompt["prompt_token_ids"]:
            raise bad_request("prompt is empty, must have at least 1 token; set text or token_ids", "prompt")
        num_tokens = len(prompt["prompt_token_ids"])
        check_length(num_tokens, max_model_len)
        check_max_tokens(request.sampling.max_tokens, max_model_len)
        return prompt

    def _params(self, request: pb.GenerateRequest) -> SamplingParams:
        """The request's SamplingParams. Raises ApiError or InvalidRequestError."""
        sampling = request.sampling
        return sampling_params(
            sampling_fields(request),
            self._context.defaults,
            self._context.options.limits,
            max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else self._context.default_max_tokens,
            logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        )

    @contextlib.contextmanager
    def _registered(self, given: str, call: Any) -> Iterator[tuple[str, str]]:
        """Map the caller's request id to the engine's while the request runs. Raises ApiError for an id in use."""
        if len(given) > MAX_REQUEST_ID_LENGTH or not given.isprintable():
            raise bad_request(f"request_id must be at most {MAX_REQUEST_ID_LENGTH} printable characters", "request_id")
        request_id = given or uuid.uuid4().hex
        key = (_owner(call), request_id)
        if key in self._running:
            raise ApiError(409, f"request_id {request_id!r} is in use", param="request_id")
        engine_id = self._running[key] = f"grpc-{uuid.uuid4().hex}"
        try:
            yield request_id, engine_id
        finally:
            del self._running[key]


def _owner(call: Any) -> str:
    return owner_of_key(authorization_of(call.invocation_metadata()))
