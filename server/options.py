"""Every option of the server, once: the command line, its help, the YAML file and the environment are generated from these.

Imports neither FastAPI nor JAX. Names are those of `vllm serve` where it has the same option.
"""

import json
import os
import re
import ssl
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxllm.config import Flag, Range, at_least, flags, flat_options, in_groups, range_faults, type_faults
from jaxllm.errors import ConfigError
from jaxllm.hub import short_name
from jaxllm.replicas.roles import Roles

API_KEY_VARIABLE = "JAXLLM_API_KEY"
ErrorFormat = Literal["openai", "vllm"]
ADMIN_KEY_VARIABLE = "JAXLLM_ADMIN_API_KEY"


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """Network"""

    host: Annotated[str, "address to listen on; 0.0.0.0: every network of this machine, for clients on other machines"] = (
        "127.0.0.1"
    )
    port: Annotated[int, "port to listen on; 0: any free one"] = 8000
    grpc_port: Annotated[int | None, "port of the gRPC service in addition to HTTP; 0: any free one; default: no gRPC"] = None
    uds: Annotated[str | None, "path of a Unix socket to listen on instead"] = None
    root_path: Annotated[str, "path under which a proxy serves this server"] = ""
    middleware: Annotated[
        list[str] | None,
        "import path (package.module.name) of an ASGI middleware class, or of a function of request and call_next, that each "
        "request passes once it is let in; may be given several times, the last is outermost",
    ] = None
    ssl_keyfile: Annotated[str | None, "file of the TLS key"] = None
    ssl_certfile: Annotated[str | None, "file of the TLS certificate"] = None
    ssl_ca_certs: Annotated[str | None, "file of the certificates that clients' are checked against"] = None
    ssl_cert_reqs: Annotated[int, "client certificates: 0 none, 1 optional, 2 required"] = int(ssl.CERT_NONE)
    ssl_ciphers: Annotated[str | None, "TLS ciphers in OpenSSL's format; default: Python's"] = None
    timeout_keep_alive: Annotated[int, "seconds that an idle connection is kept open"] = 5
    max_connections: Annotated[int, "most open connections; more are answered with 503"] = 10_000
    api_server_count: Annotated[int, "processes that speak HTTP"] = 1
    shutdown_timeout: Annotated[float, "seconds that running requests get to end after SIGTERM"] = 30.0


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Access"""

    api_key: Annotated[
        list[str] | None,
        f"key that clients must send as a Bearer token; may be given several times; default: ${API_KEY_VARIABLE} "
        "(several with commas)",
    ] = None
    admin_api_key: Annotated[
        str | None, f"key for the endpoints of operators; default: ${ADMIN_KEY_VARIABLE}, else those of --api-key"
    ] = None
    metrics_require_key: Annotated[bool, "require the key for /metrics too, which names the model and its adapters"] = False
    enable_dev_endpoints: Annotated[
        bool,
        "offer reset_prefix_cache, sleep, wake_up, is_sleeping, pause, resume, is_paused, server_info, start_profile and stop_profile",
    ] = False
    enable_scale_out: Annotated[
        bool,
        "offer /inference/v1/generate, which takes and returns token ids, and render and derender for completions and chats, which "
        "do the rest without the model",
    ] = False
    enable_tokenizer_info_endpoint: Annotated[
        bool, "offer tokenizer_info: the tokenizer's configuration, with the chat template"
    ] = False
    allowed_origins: Annotated[
        list[str] | None,
        "origin whose pages may call this server (CORS); may be given several times; '*': any; default: none, and without a key others "
        "are refused",
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        "name that clients may call this server by, as well as localhost and IP addresses; may be given several times; *.NAME: those below "
        "it; '*': any; default: none where it listens to this machine alone and has no key, else any",
    ] = None
    allowed_methods: Annotated[list[str] | None, "method that such a page may use; default: any"] = None
    allowed_headers: Annotated[list[str] | None, "header that such a page may send; default: any"] = None
    allow_credentials: Annotated[bool, "let such a page send cookies"] = False


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Adapters of the server"""

    lora_modules: Annotated[
        list[str] | None,
        "LoRA adapter to load at the start, as NAME=PATH or a JSON object with name, path and base_model_name; several after one "
        "flag; requests choose it by their `model`; needs enable_lora",
    ] = None
    lora_dir: Annotated[
        str | None,
        "directory of LoRA adapters: a `model` that is the name of one in it is loaded with its first request; "
        "/v1/load_lora_adapter then reads from it alone; needs enable_lora",
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool, "offer /v1/load_lora_adapter and /v1/unload_lora_adapter, with the operator's key; needs enable_lora"
    ] = False


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits"""

    max_request_body_bytes: Annotated[int, "largest body of a request"] = 32 << 20
    request_body_timeout: Annotated[float, "seconds in which the headers, and then the body, of a request must arrive"] = 30.0
    request_timeout: Annotated[
        float, "seconds after which a request ends with 408; a request may ask for less with `timeout`; 0: no limit"
    ] = 0.0
    queue_timeout: Annotated[float, "seconds that a request may wait for its first step, then 503; 0: no limit"] = 0.0
    max_concurrent_requests_per_key: Annotated[
        int,
        "most requests of one key, or without keys of one address, that are answered at the same time; one more is refused with 429; "
        "each API server counts its own; 0: no limit",
    ] = 0
    unread_stream_timeout: Annotated[
        float,
        "seconds after which a connection is closed whose client reads nothing of an answer that waits for it; 0: never",
    ] = 300.0
    max_n: Annotated[int, "most answers to one prompt"] = 128
    max_prompts_per_request: Annotated[int, "most prompts in one request"] = 1024
    max_sequences_per_request: Annotated[int, "most answers in one request, all prompts together"] = 4096
    max_stop_strings: Annotated[int, "most stop strings of a request"] = 64
    ignore_unknown_fields: Annotated[
        bool, "ignore fields of requests that look like misspelt ones, as those that look like none; the log names them"
    ] = False
    max_stored_responses: Annotated[
        int,
        "responses of /v1/responses kept for previous_response_id and retrieval; 0: none (as with several --api-server-count)",
    ] = 1000
    max_stored_response_bytes: Annotated[int, "memory that they may take, as JSON; the least recently used go first"] = 64 << 20


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Chat"""

    response_role: Annotated[str, "role of the answers"] = "assistant"
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        "whether the chat template takes a message's content as a string or a list of parts; auto: as the template looks",
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None, "JSON object of values for the chat template's variables; a request's own values win"
    ] = None
    trust_request_chat_template: Annotated[bool, "let requests bring their own chat_template"] = False
    chat_template_timeout: Annotated[float, "seconds that rendering a conversation may take"] = 5.0
    chat_template_memory_bytes: Annotated[int, "memory that rendering a conversation may take"] = 1 << 30
    enable_auto_tool_choice: Annotated[bool, "let the model decide to call tools (tool_choice auto)"] = True
    tool_call_parser: Annotated[
        str | None, "how the model writes tool calls; default: as its chat template shows; none: tools are refused"
    ] = None
    reasoning_parser: Annotated[str | None, "how the model marks reasoning; default: as its chat template shows; none: not"] = (
        None
    )
    tool_parser_plugin: Annotated[
        str | None,
        "Python file (its name ends with .py) or module whose TOOL_DIALECTS --tool-call-parser may name; it is run, so it is trusted "
        "like code",
    ] = None
    reasoning_parser_plugin: Annotated[
        str | None, "Python file or module whose REASONING_DIALECTS --reasoning-parser may name; it is run too"
    ] = None
    exclude_tools_when_tool_choice_none: Annotated[bool, "leave tools out of the prompt when tool_choice is none"] = False

    @property
    def names_dialects(self) -> bool:
        """Whether an option names a dialect or a plugin."""
        given = (self.tool_call_parser, self.reasoning_parser, self.tool_parser_plugin, self.reasoning_parser_plugin)
        return any(given)


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """Replies"""

    served_model_name: Annotated[
        list[str] | None,
        "name of the model for clients; may be given several times, the first is used in replies; default: the name of its directory or "
        "GGUF file, or its hub id",
    ] = None
    return_tokens_as_token_ids: Annotated[bool, "write the tokens of logprobs as 'token_id:N'"] = False
    enable_prompt_tokens_details: Annotated[
        bool, "tell in usage how many prompt tokens came from the prefix cache, and how many were written to it"
    ] = False
    enable_force_include_usage: Annotated[bool, "tell usage in every stream"] = False
    enable_per_request_metrics: Annotated[
        bool,
        "tell times in every reply: timings, and metrics in vLLM's form; a request may ask for timings with include_timings",
    ] = False
    enable_request_id_headers: Annotated[bool, "send x-request-id"] = True
    fingerprint_mode: Annotated[
        Literal["full", "hash", "none"], "system_fingerprint: version and model's configuration, only a hash of them, or none"
    ] = "full"
    error_format: Annotated[
        ErrorFormat, "shape of errors: OpenAI's, or vLLM's, whose code is the HTTP status and whose types have other names"
    ] = "openai"
    sse_keep_alive_interval: Annotated[float, "seconds of silence after which a stream gets a comment; 0: never"] = 0.0
    disable_fastapi_docs: Annotated[bool, "do not serve /docs and /openapi.json"] = False
    web: Annotated[bool, "serve the web page at /"] = True

    def names_of(self, model: str) -> list[str]:
        """The names of the model for clients."""
        return self.served_model_name or [short_name(model)]


@dataclass(frozen=True, kw_only=True)
class LoggingOptions:
    """Server log"""

    log_format: Annotated[
        Literal["text", "json"] | None, "lines for people or JSON objects; default: $JAXLLM_LOG_FORMAT, else text"
    ] = None
    uvicorn_log_level: Annotated[Literal["critical", "error", "warning", "info", "debug"], "of the HTTP library"] = "warning"
    disable_uvicorn_access_log: Annotated[bool, "log no line for each HTTP request"] = False
    disable_access_log_for_endpoints: Annotated[
        list[str] | None,
        "path without such lines; may be given several times, or several with commas; default: probes and /metrics",
    ] = None
    enable_log_requests: Annotated[
        bool, "log each request's parameters, and at its end where its prompt came from; its text only at debug level"
    ] = False
    max_log_len: Annotated[int | None, "most characters or token ids of a prompt in the log; default: all"] = None
    otlp_traces_endpoint: Annotated[
        str | None,
        "URL that a trace span of each request is sent to, e.g. http://127.0.0.1:4317; $OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is grpc "
        "(the default) or http/protobuf, whose URL ends in /v1/traces; needs the extra otel",
    ] = None
    metrics_prefix: Annotated[
        Literal["jaxllm", "vllm"], "first word of the metrics' names; vllm: for dashboards that were made for it"
    ] = "jaxllm"
    enable_server_load_tracking: Annotated[bool, "count running requests for /load"] = True


@dataclass(frozen=True, kw_only=True)
class ProcessOptions:
    """Processes"""

    stall_timeout: Annotated[
        float,
        "seconds without a sign of life from the engine's process, or in one step (on a CPU six times as long), after which /ready is "
        "503 until it goes on; 0: never",
    ] = 10.0
    step_timeout: Annotated[
        float,
        "seconds after which a step, or an engine process without a sign of life, counts as hung, and the engine as dead; 0: never",
    ] = 300.0
    compile_timeout: Annotated[
        float, "the same while a step waits for a program to be compiled, or the engine falls asleep or wakes up"
    ] = 3600.0
    retry_on_engine_death: Annotated[
        bool,
        "compute requests of a replica that has ended again on another, as far as nothing was sent to their clients "
        "(with --data-parallel-size)",
    ] = False
    keep_alive_on_engine_death: Annotated[
        bool, "go on after the engine's death and answer 503, instead of ending with an exit code for who supervises"
    ] = False
    prefill: Annotated[
        int | None,
        "engine processes that compute long prompts for those of --decode (docs/PREFILL_DECODE.md), each on its own GPUs; needs "
        "kv_offloading_size; default: every engine does both",
    ] = None
    decode: Annotated[int | None, "engine processes that compute answers, with --prefill"] = None
    prefill_threshold: Annotated[
        int, "with --prefill: a prompt of which a decode engine must compute fewer tokens is computed there alone"
    ] = 1024
    prefill_hosts: Annotated[
        Literal["all", "first"],
        "with --prefill and --nnodes: which hosts have prefill engines: all, dealt out in turn, so that most blocks stay on a host, or the "
        "first, as few as can have them",
    ] = "all"
    headless: Annotated[bool, "serve no HTTP: what hosts above 0 do anyway, with --nnodes and --node-rank"] = False

    @property
    def roles(self) -> Roles | None:
        """The roles of engines; None: every engine does both."""
        if self.prefill is None or self.decode is None:
            return None
        return Roles(self.prefill, self.decode, self.prefill_hosts)


_GROUPS: dict[str, Any] = {
    "network": NetworkOptions,
    "processes": ProcessOptions,
    "access": AccessOptions,
    "adapters": AdapterOptions,
    "limits": LimitOptions,
    "chat": ChatOptions,
    "replies": ReplyOptions,
    "logging": LoggingOptions,
}


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """All options, by group. `ServerOptions.from_options(port=0, …)` takes them flat."""

    network: NetworkOptions = field(default_factory=NetworkOptions)
    processes: ProcessOptions = field(default_factory=ProcessOptions)
    access: AccessOptions = field(default_factory=AccessOptions)
    adapters: AdapterOptions = field(default_factory=AdapterOptions)
    limits: LimitOptions = field(default_factory=LimitOptions)
    chat: ChatOptions = field(default_factory=ChatOptions)
    replies: ReplyOptions = field(default_factory=ReplyOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)

    @classmethod
    def from_options(cls, **options: Any) -> "ServerOptions":
        """Sort flat options into their groups; keys that are not given come from the environment. Raises ConfigError."""
        if options.get("api_key") is None and (keys := os.environ.get(API_KEY_VARIABLE)):
            options["api_key"] = [key.strip() for key in keys.split(",") if key.strip()]
        if options.get("admin_api_key") is None:
            options["admin_api_key"] = os.environ.get(ADMIN_KEY_VARIABLE) or None
        for name in ("allowed_origins", "allowed_hosts", "allowed_methods", "allowed_headers"):
            if options.get(name) is not None:
                options[name] = _flattened(options[name])
        if options.get("disable_access_log_for_endpoints") is not None:
            texts = options["disable_access_log_for_endpoints"]
            options["disable_access_log_for_endpoints"] = [path for text in texts for path in text.split(",")]
        found = cls(**in_groups(_GROUPS, options, "server option"))
        flat = found.flat()
        faults = [*type_faults(server_flags(), flat), *range_faults(_RANGES, flat, secret={"api_key"})]
        if found.network.ssl_certfile is None:
            wanting = [name for name in _NEED_CERTIFICATE if flat[name] is not None and flat[name] != int(ssl.CERT_NONE)]
            faults += [f"{name} needs ssl_certfile beside it" for name in wanting]
        faults += _role_faults(found.processes)
        if found.access.metrics_require_key and not found.access.api_key:
            faults.append("metrics_require_key needs api_key beside it")
        if faults:
            raise ConfigError("; ".join(faults))
        return found

    def flat(self) -> dict[str, Any]:
        """Every option by its flat name."""
        return flat_options(self)


def server_flags() -> list[Flag]:
    """Every option of the server as the command line, the YAML file and the environment see it."""
    return flags(*_GROUPS.values())


def _role_faults(options: ProcessOptions) -> list[str]:
    """Describe contradictions of the options of prefill and decode engines."""
    if (options.prefill is None) != (options.decode is None):
        given, wanting = ("prefill", "decode") if options.decode is None else ("decode", "prefill")
        return [f"{given} is {getattr(options, given)} without {wanting}: give both, or neither for engines that do both"]
    if options.prefill is not None:
        return []
    return [
        f"{name} is {getattr(options, name)} without prefill and decode engines; give prefill and decode too"
        for name in ("prefill_threshold", "prefill_hosts")
        if getattr(options, name) != getattr(ProcessOptions, name)
    ]


def _flattened(values: list[str]) -> list[str]:
    """Texts one by one; a text may itself be a JSON list, as `vllm serve` has it."""
    found: list[str] = []
    for value in values:
        if value.startswith("["):
            try:
                found += [str(item) for item in json.loads(value)]
                continue
            except ValueError:
                raise ConfigError(f"{value!r} is neither a text nor a JSON list of texts") from None
        found.append(value)
    return found


_NEED_CERTIFICATE = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
_ORIGIN = re.compile(r"\*|null|file://|[a-z][a-z0-9+.-]*://[^/A-Z\s]+")
_HOST = re.compile(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_ABOVE_ZERO: Range = (lambda value: value > 0), "above 0"
_RANGES: dict[str, Range] = {
    "port": (lambda value: 0 <= value <= 65535, "0 to 65535"),
    "grpc_port": (lambda value: 0 <= value <= 65535, "0 to 65535"),
    "ssl_cert_reqs": (lambda value: value in (0, 1, 2), "0, 1 or 2"),
    "timeout_keep_alive": at_least(1),
    "max_connections": at_least(1),
    "api_server_count": at_least(1),
    "shutdown_timeout": at_least(0),
    "prefill": at_least(1),
    "decode": at_least(1),
    "prefill_threshold": at_least(0),
    "stall_timeout": at_least(0),
    "step_timeout": at_least(0),
    "compile_timeout": _ABOVE_ZERO,
    "max_request_body_bytes": at_least(1024),
    "request_body_timeout": _ABOVE_ZERO,
    "request_timeout": at_least(0),
    "queue_timeout": at_least(0),
    "max_concurrent_requests_per_key": at_least(0),
    "unread_stream_timeout": at_least(0),
    "max_n": at_least(1),
    "max_prompts_per_request": at_least(1),
    "max_sequences_per_request": at_least(1),
    "max_stop_strings": at_least(1),
    "max_stored_responses": at_least(0),
    "max_stored_response_bytes": at_least(0),
    "chat_template_timeout": _ABOVE_ZERO,
    "chat_template_memory_bytes": at_least(256 << 20),
    "sse_keep_alive_interval": at_least(0),
    "max_log_len": at_least(0),
    "root_path": (lambda value: not value or (value.startswith("/") and not value.endswith("/")), "like /path"),
    "response_role": (lambda value: bool(value), "a role such as assistant"),
    "lora_modules": (lambda value: bool(value), "NAME=PATH, at least one"),
    "served_model_name": (lambda value: value and all(value), "texts that are not empty"),
    "allowed_origins": (
        lambda value: all(_ORIGIN.fullmatch(origin) for origin in value),
        "like http://name:3000, in small letters and without a path, or 'null' or '*'",
    ),
    "allowed_hosts": (
        lambda value: all(_HOST.fullmatch(host) for host in value),
        "a name without a port, *.NAME for those below it, or '*'",
    ),
    "api_key": (lambda value: all(key.isascii() and key.isprintable() and key for key in value), "ASCII and not empty"),
}
