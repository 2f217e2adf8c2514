"""Messages between API servers and the engine process: typed msgpack, never pickles. Fields are positional: only append.

An API server sends `Hello`, `Add`, `Abort`, `Continue`, `EndLease`, `Meet`, `Call`, `NoMore` and `Bye`; the engine process sends
`Status`, `Ready`, `Outputs`, `Refused`, `Failed`, `Reply`, `WantMetrics`, `Update`, `Draining` and `Dead`. The process that started it
may send `Drain`. Anything that cannot be decoded raises MessageError.
"""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

import msgspec
import numpy as np

from jaxllm.adapters import AdapterInfo, AdapterState
from jaxllm.cache_events import CacheEvents
from jaxllm.config import EngineConfig
from jaxllm.core_interface import ControlCalls, PauseCalls
from jaxllm.errors import (
    AdapterNotFoundError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineSleepingError,
    InvalidRequestError,
    JaxLLMError,
    OverloadedError,
)
from jaxllm.kernel_verdicts import OpReport
from jaxllm.kv_transfer import KVTransfer
from jaxllm.metrics.metric import Metric
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler_stats import SchedulerStats
from jaxllm.served_model import ServedModel

MAX_MESSAGE_BYTES = 1 << 30
"""A longer message ends its connection. Prompt logprobs of a long prompt are the longest messages."""
State = Literal["loading", "compiling", "running", "calling", "idle"]
"""State of the engine's loop. running: in a step or a short call; calling: in one of LONG_CALLS, which may take minutes."""
_ERROR_TYPES: dict[str, type[JaxLLMError]] = {
    "no_adapter": AdapterNotFoundError,
    "invalid": InvalidRequestError,
    "config": ConfigError,
    "dead": EngineDeadError,
    "overloaded": OverloadedError,
    "sleeping": EngineSleepingError,
}
_ARRAY_DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
_MAX_ARRAY_DIMENSIONS = 8
ProcessId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class MessageError(JaxLLMError):
    """A message that is malformed or not expected."""


class _Message(msgspec.Struct, array_like=True):
    pass


# How processes are started: one message through the standard input of each


class EngineStart(_Message):
    """The parameters of the engine process. `directory` contains its sockets; `core_factory` ("module:function", called with
    the config and a Progress) makes a core other than EngineCore, for tests."""

    config: EngineConfig
    directory: str
    log_level: str | None = None
    log_format: str | None = None
    step_timeout_seconds: float = 300.0
    compile_timeout_seconds: float = 3600.0
    core_factory: str | None = None
    replica: int = 0
    num_replicas: int = 1
    """With more than one, the engine publishes what a balancer needs to know."""
    has_remote_clients: bool = False
    """Whether API servers on another host use the engine, for which its process id means nothing."""
    stall_timeout_seconds: float = 10.0


# From an API server


class Hello(_Message, tag="hello"):
    """An API server listens at the socket of its name. Repeated until answered."""

    client: str
    pid: ProcessId


class Add(_Message, tag="add"):
    """Queue a request."""

    client: str
    request: EngineCoreRequest
    items_of: str = ""
    """If set, the request has the items of the request of this id, the latest of this API server that was sent with its own."""


class Bye(_Message, tag="bye"):
    """The last message of an API server that closes its sockets, while its process may go on."""

    client: str


class Abort(_Message, tag="abort"):
    """End requests of this API server. Other ids are ignored."""

    client: str
    request_ids: list[str]


class Continue(_Message, tag="continue"):
    """Let a request of this API server run that awaits its first token: behind these tokens, or without. Other ids are ignored."""

    client: str
    request_id: str
    output_token_ids: list[int]


class EndLease(_Message, tag="end_lease"):
    """Blocks that a prefill engine keeps for a request will not be fetched."""

    client: str
    transfer: KVTransfer


class Meet(_Message, tag="meet"):
    """The `prefill_address` of an engine whose blocks requests will be sent for."""

    client: str
    transfer: KVTransfer


class Drain(_Message, tag="drain"):
    """End once every API server has said `NoMore`; `Draining` notifies them."""

    client: str


class NoMore(_Message, tag="no_more"):
    """This API server sends no more requests and has received all that it waited for. Answers `Draining` once that is so."""

    client: str


class ShareMetrics(_Message, tag="share_metrics"):
    """Metrics of this API server so far. Answered with those of all others combined; `fresh` queries them first."""

    own: list[Metric]
    fresh: bool = False
    asked: int = 0
    """The number of the latest WantMetrics that came before `own` was counted."""


def _call_type(name: str) -> type[msgspec.Struct]:
    """The message of a control call: its parameters as fields."""
    parameters = list(inspect.signature(getattr(PauseCalls, name)).parameters.values())[1:]
    fields = [(parameter.name, parameter.annotation, parameter.default) for parameter in parameters]
    return msgspec.defstruct(name, fields, bases=(_Message,), tag=name, array_like=True)


_CALL_TYPES = {
    name: _call_type(name)
    for base in (ControlCalls, PauseCalls)
    for name in vars(base)
    if name[0] != "_" and name != "call_core"
}
_AnyCall: Any = Union[tuple(_CALL_TYPES.values())]  # noqa: UP007


class Call(_Message, tag="call"):
    """A call to run between two steps. Answered by a Reply with the same number."""

    client: str
    number: int
    call: _AnyCall | ShareMetrics  # type: ignore[valid-type]

    @property
    def name(self) -> str:
        """Name of the core's method, for a control call."""
        return str(type(self.call).__struct_config__.tag)


# From the engine process


class Load(_Message):
    """The current load of the engine, and totals since its start."""

    stats: SchedulerStats
    num_compiled_after_warmup: int = 0
    sleep_level: int = 0
    received: dict[str, int] = {}
    """Number of requests received from each API server, including refused ones. Empty if the engine is the only one."""


class Status(_Message, tag="status"):
    """The heartbeat, sent a few times a second. `age_seconds`: the age of the current step, call or loading phase."""

    state: State
    age_seconds: float
    phase: str = ""
    """While loading: the current phase, with `done` of `total` units (None: unknown). While calling: the call."""
    done: int = 0
    total: int | None = None
    unit: str = ""
    load: Load | None = None
    is_stalled: bool = False
    """Whether the current step or short call takes so long that the engine seems to hang."""


class Ready(_Message, tag="ready"):
    """The engine serves. Contains everything that an API server needs to know about it."""

    config: EngineConfig
    model_config: ServedModel
    max_model_len: int
    processor_arguments: dict[str, int]
    start_seconds: dict[str, float]
    """Durations of the parts of the start, in seconds."""
    kernels: dict[str, OpReport] = {}
    """The implementation of each op and the result of its check."""
    pid: ProcessId = 0
    """Id of the engine process; 0 if API servers are on another host."""
    prefill_address: KVTransfer | None = None
    """Where decode engines find a prefill engine."""


class Outputs(_Message, tag="outputs"):
    """The outputs of one step for one API server."""

    outputs: list[EngineCoreOutput]
    load: Load | None = None
    """None if it was collected a short time ago and no request has come or ended since."""


class Update(_Message, tag="update"):
    """The load of an engine of several, and the changes of its prefix cache, for all API servers."""

    load: Load
    cache: CacheEvents | None = None


class Fault(_Message):
    """A JaxLLMError in serialized form."""

    kind: Literal["no_adapter", "invalid", "config", "dead", "overloaded", "sleeping", "engine"]
    message: str
    param: str | None = None
    retry_after_seconds: int = 1


class Refused(_Message, tag="refused"):
    """A request that the core rejected."""

    request_id: str
    fault: Fault


class Failed(_Message, tag="failed"):
    """A step failed, or the API server did not read its outputs. All its requests have ended; the engine continues."""

    message: str


class Reply(_Message, tag="reply"):
    """The result of a Call, or its error."""

    number: int
    result: bool | int | float | str | Sequence[Metric | AdapterInfo] | AdapterState | None = None
    fault: Fault | None = None
    load: Load | None = None
    """The load, in replies with metrics."""


class WantMetrics(_Message, tag="want_metrics"):
    """Asks an API server to share its metrics now, because another one collects the metrics of all."""

    number: int
    """Grows with each collection."""


class Draining(_Message, tag="draining"):
    """The engine ends once all API servers have said `NoMore`."""


class Dead(_Message, tag="dead"):
    """The engine cannot continue and its process ends."""

    message: str


ClientMessage = Hello | Add | Abort | Continue | EndLease | Meet | Call | Bye | Drain | NoMore
EngineMessage = Status | Ready | Outputs | Refused | Failed | Reply | WantMetrics | Update | Draining | Dead


def call_of(name: str, *arguments: Any) -> Any:
    """The message of a control call, for `Call`."""
    return _CALL_TYPES[name](*arguments)


def encode(message: Any) -> bytes:
    """Encode a message to bytes."""
    return _encoder.encode(message)


def decode_client_message(frame: bytes | memoryview) -> ClientMessage:
    """Decode a message from an API server. Raises MessageError."""
    message = _decode(_client_decoder, frame)
    if isinstance(message, Add) and message.request.sampling_params.seed is None:
        message.request.sampling_params.seed = -1  # the API server has set it, as an answer's seed; to callers -1 means none
    return message


def decode_engine_message(frame: bytes) -> EngineMessage:
    """Decode a message from the engine process. Raises MessageError."""
    return _decode(_engine_decoder, frame)


def decode_engine_start(frame: bytes) -> EngineStart:
    """Decode the parameters of the engine process. Raises MessageError."""
    return _decode(_start_decoder, frame)


def sender_of_add(frame: bytes | memoryview) -> tuple[str, str] | None:
    """API server and request id of an Add that could not be decoded, if readable, so that the sender gets an answer."""
    try:
        fields = msgspec.msgpack.decode(frame)
        tag, client, request, *_ = fields
        request_id = request["request_id"]
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, KeyError, OverflowError):
        return None
    return (client, request_id) if tag == "add" and isinstance(client, str) and isinstance(request_id, str) else None


def fault_of(error: BaseException) -> Fault:
    """Convert an exception to a Fault. Of foreign exceptions only the type is sent: their texts may contain anything."""
    for kind, of_type in _ERROR_TYPES.items():
        if isinstance(error, of_type):
            param, seconds = getattr(error, "param", None), getattr(error, "retry_after_seconds", 1)
            return Fault(kind, str(error), param, seconds)  # type: ignore[arg-type]
    if isinstance(error, JaxLLMError):
        return Fault("engine", str(error))
    return Fault("engine", f"the engine could not do it ({type(error).__name__}); its log has more")


def error_of(fault: Fault) -> JaxLLMError:
    """The exception that a fault describes."""
    if fault.kind == "no_adapter":
        return AdapterNotFoundError(fault.message, fault.param)
    if fault.kind == "invalid":
        return InvalidRequestError(fault.message, fault.param)
    if fault.kind == "overloaded":
        return OverloadedError(fault.message, fault.retry_after_seconds)
    return _ERROR_TYPES.get(fault.kind, EngineError)(fault.message)


def _decode(decoder: Any, frame: bytes | memoryview) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"{len(frame)} bytes are no message: {type(error).__name__}: {str(error)[:200]}") from error


def encode_other(value: Any) -> Any:
    """Convert a numpy array or number to what msgpack can send."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def decode_other(kind: type, value: Any) -> Any:
    """The array that `encode_other` was given, read-only. Raises ValueError or TypeError if it is none."""
    if kind is not np.ndarray:
        raise TypeError(f"a {kind.__name__} cannot be received")
    dtype, shape, data = value
    if dtype not in _ARRAY_DTYPES:
        raise ValueError("an array of unknown type")
    if len(shape) > _MAX_ARRAY_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("an array of impossible shape")
    count = 1
    for size in shape:
        count *= size
    if not isinstance(data, bytes) or count * np.dtype(dtype).itemsize != len(data):
        raise ValueError("an array whose shape and bytes disagree")
    return np.frombuffer(data, dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
_client_decoder: Any = msgspec.msgpack.Decoder(ClientMessage, dec_hook=decode_other)  # type: ignore[arg-type]
_engine_decoder: Any = msgspec.msgpack.Decoder(EngineMessage, dec_hook=decode_other)  # type: ignore[arg-type]
_start_decoder = msgspec.msgpack.Decoder(EngineStart)
