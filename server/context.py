"""State shared by all routes: engine, options, model names, and counters over all requests."""

import contextlib
import functools
import hashlib
import time
import uuid
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from jaxllm import __version__
from jaxllm.async_llm import AsyncLLM
from jaxllm.hub import short_name
from jaxllm.log import info_once
from jaxllm.sampling_params import MODEL_DEFAULTS, SamplingParams
from jaxllm.text.input_processor import ParentRequest
from jaxllm.text.tokenizer import Tokenizer
from server.adapters import ServedAdapters, some_of
from server.chat_service import ChatService
from server.clients import Clients
from server.errors import ApiError, shortened
from server.http_metrics import HttpMetrics
from server.logs import RequestLog
from server.ollama.about import Checkpoint
from server.options import ServerOptions
from server.prompts import tokenizer_of
from server.protocol.common import SamplingFields
from server.protocol.sizes import BodyLimits
from server.work import WorkPool


class ServerContext:
    """One per application, as `app.state.context`."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions, *, operators_paths: frozenset[str] = frozenset()):
        self.engine = engine
        self.options = options
        self.clients = Clients(options, operators_paths)
        self.model_names = options.replies.names_of(engine.config.model.model)
        self._unlisted_name = None if options.replies.served_model_name else engine.config.model.model
        """Requests may name a local model by its path too."""
        self.adapters = ServedAdapters(engine, options.adapters, self.model_names)
        self.created = int(time.time())
        self.num_running = 0
        """Number of requests that are being answered."""
        self.refusal: ApiError | None = None
        """Why requests are refused now, e.g. because the server is stopping; set from outside."""
        own = engine.get_default_sampling_params()
        self.defaults: dict[str, Any] = {name: getattr(own, name) for name in MODEL_DEFAULTS}
        self.default_max_tokens = own.max_tokens if own.max_tokens != SamplingParams().max_tokens else None
        """Defaults from the model's generation config."""
        in_chats = engine.get_default_sampling_params(chat=True)
        self.chat_defaults = {
            name: value for name in MODEL_DEFAULTS if (value := getattr(in_chats, name)) != self.defaults[name]
        }
        """Further defaults of ollama's API and of the web page."""
        info_once(f"sampling of the web page and ollama's API: {engine.input_processor.generation_config.describe_chats()}")
        self.http_metrics = HttpMetrics(short_name(engine.config.model.model))
        self.http_metrics.num_rate_limited = lambda: self.clients.num_refused
        engine.add_metrics(self.http_metrics.snapshot)
        self.request_log = RequestLog(options.logging)
        self.queue_timeout_seconds = options.limits.queue_timeout or None
        self.work = WorkPool()
        self.body_limits = BodyLimits(engine.max_model_len, engine.model_config.vocab_size)
        self.chat = ChatService(
            engine, options.chat, options.limits, self.work, queue_timeout_seconds=self.queue_timeout_seconds
        )
        self.chat.note_request = self.request_log.write
        if engine.input_processor.tokenizer is not None:
            self.chat.speech.note_tool_parser = self.http_metrics.tool_calls_parsed
        self.fingerprint = _fingerprint(engine, options.replies.fingerprint_mode)

    @functools.cached_property
    def checkpoint(self) -> Checkpoint:
        """Description of the model by its files. Reading them takes a moment, and may raise ModelLoadError."""
        return Checkpoint.of(self.engine)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ApiError if there is none."""
        return tokenizer_of(self.engine)

    @property
    def model_name(self) -> str:
        """The name of the model without adapters in replies."""
        return self.model_names[0]

    def name_for(self, request: ParentRequest) -> str:
        """The model name in the reply to a request."""
        return request.children[0].options.adapter or self.model_name

    async def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request names by its model; None: the model without one, which null or empty mean too.

        Raises ApiError for a model that is not served, AdapterError for an adapter that cannot be loaded.
        """
        if not name or name in self.model_names or name == self._unlisted_name:
            return None
        if await self.adapters.has(name):
            return name
        known = some_of([*self.model_names, *(info.name for info in await self.adapters.infos())])
        raise ApiError(
            404,
            f"the model {shortened(name, 100)!r} does not exist; this server has {known}",
            param="model",
            code="model_not_found",
        )

    def time_limit(self, asked: float | None) -> float | None:
        """Time limit of a request in seconds: the requested one, capped by the server's; None: no limit."""
        allowed = self.options.limits.request_timeout or None
        return min(filter(None, (asked, allowed)), default=None)

    def writes_ids(self, body: SamplingFields) -> bool:
        """Whether the reply writes tokens of logprobs as 'token_id:N'."""
        asked, usual = body.return_tokens_as_token_ids, self.options.replies.return_tokens_as_token_ids
        return usual if asked is None else asked

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


def context_of(request: Request) -> ServerContext:
    """The context of the application that received a request."""
    return request.app.state.context


def request_id_of(request: Request, given: str | None) -> str:
    """The id of a request: from the body, else from the header x-request-id, else a new one."""
    return given or getattr(request.state, "request_id", None) or uuid.uuid4().hex


def _fingerprint(engine: AsyncLLM, mode: str) -> str | None:
    """Equal for equal answers to a seeded request: made of version, model and the settings that affect numbers."""
    if mode == "none":
        return None
    config = engine.config
    parallel = config.parallel
    sizes = f"{parallel.tensor_parallel_size}" + (
        f"-pp{parallel.pipeline_parallel_size}" if parallel.pipeline_parallel_size > 1 else ""
    )
    sizes += f"-pcp{parallel.prefill_context_parallel_size}" if parallel.prefill_context_parallel_size > 1 else ""
    parts = [__version__, engine.model_config.digest, config.model.dtype, sizes]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return digest if mode == "hash" else f"jaxllm-{__version__}-tp{sizes}-{digest}"
