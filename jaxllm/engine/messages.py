"""What fronts and the engine process say to each other: typed msgpack messages, never pickles. Fields are positional: only append.

A front sends `Hello`, `Add`, `Abort` and `Call`; the engine process sends `Status`, `Ready`, `Outputs`, `Refused`, `Failed`, `Reply`,
`WantMetrics` and `Dead`. What cannot be decoded raises MessageError, whatever it was.
"""

from typing import Any, Literal

import msgspec
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineSleepingError,
    InvalidRequestError,
    JaxLLMError,
    OverloadedError,
)
from jaxllm.kernel_verdicts import OpReport
from jaxllm.metrics.metric import Counter, Gauge, Histogram, Metric
from jaxllm.model_config import ModelConfig
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from jaxllm.scheduler.stats import SchedulerStats

MAX_MESSAGE_BYTES = 1 << 30
"""Longer messages end the connection that they come by. Prompt logprobs of a long prompt are the longest there are."""
State = Literal["loading", "compiling", "running", "idle"]
_ERROR_TYPES: dict[str, type[JaxLLMError]] = {
    "invalid": InvalidRequestError,
    "config": ConfigError,
    "dead": EngineDeadError,
    "overloaded": OverloadedError,
    "sleeping": EngineSleepingError,
}
_ARRAY_DTYPES = ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
_MAX_ARRAY_DIMENSIONS = 8


class MessageError(JaxLLMError):
    """A message that is not one of those that are expected."""


class _Message(msgspec.Struct, array_like=True):
    pass


# How processes are started: one message through the standard input of each


class EngineStart(_Message):
    """All that the engine process is told. `directory` is where its sockets lie; `core_factory` ("module:function", given the
    config and a Progress) makes another core than EngineCore, for tests."""

    config: EngineConfig
    directory: str
    log_level: str | None = None
    log_format: str | None = None
    step_timeout_seconds: float = 300.0
    compile_timeout_seconds: float = 3600.0
    core_factory: str | None = None


# From a front


class Hello(_Message, tag="hello"):
    """A front is there and listens at the socket of its name. Repeated until it is answered."""

    client: str
    pid: int


class Add(_Message, tag="add"):
    """Queue a request."""

    client: str
    request: EngineCoreRequest


class Abort(_Message, tag="abort"):
    """End requests of this front; ids that are not its own are ignored."""

    client: str
    request_ids: list[str]


class ResetPrefixCache(_Message, tag="reset_prefix_cache"):
    reset_running_requests: bool = False


class Sleep(_Message, tag="sleep"):
    level: int = 1
    mode: Literal["abort", "refuse"] = "abort"


class WakeUp(_Message, tag="wake_up"):
    tags: list[str] | None = None


class IsSleeping(_Message, tag="is_sleeping"):
    pass


class Pause(_Message, tag="pause"):
    mode: Literal["abort", "wait", "keep"] = "abort"


class Resume(_Message, tag="resume"):
    pass


class IsPaused(_Message, tag="is_paused"):
    pass


class IsDraining(_Message, tag="is_draining"):
    pass


class StartProfile(_Message, tag="start_profile"):
    pass


class StopProfile(_Message, tag="stop_profile"):
    pass


class CheckIntegrity(_Message, tag="check_integrity"):
    pass


class FinishCompiling(_Message, tag="finish_compiling"):
    pass


class MetricRecord(msgspec.Struct, array_like=True):
    """A Counter, Gauge or Histogram; `buckets` only for the last."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    labels: dict[str, str]
    help: str
    value: int | float
    """Of a histogram, the sum."""
    buckets: dict[str, int] | None = None


class ShareMetrics(_Message, tag="share_metrics"):
    """The metrics of this front so far; answered with those of all others together, which are asked for theirs first if `fresh`."""

    own: list[MetricRecord]
    fresh: bool = False


CoreCall = (
    ResetPrefixCache
    | Sleep
    | WakeUp
    | IsSleeping
    | Pause
    | Resume
    | IsPaused
    | IsDraining
    | StartProfile
    | StopProfile
    | CheckIntegrity
    | FinishCompiling
)
"""Each is a method or property of the engine core, named by its tag."""


class Call(_Message, tag="call"):
    """Something to be done between two steps and answered by a Reply with the same number."""

    client: str
    number: int
    call: CoreCall | ShareMetrics


# From the engine process


class Load(_Message):
    """What the engine has to do now, and totals since its start."""

    stats: SchedulerStats
    num_compiled_after_warmup: int = 0
    sleep_level: int = 0


class Status(_Message, tag="status"):
    """The heartbeat, a few times a second. `age_seconds`: how long the step (or phase of loading) has lasted that is under way."""

    state: State
    age_seconds: float
    phase: str = ""
    """While loading: what is being done, with `done` of `total` units (None: nobody knows)."""
    done: int = 0
    total: int | None = None
    unit: str = ""
    load: Load | None = None


class Ready(_Message, tag="ready"):
    """The engine serves: all that a front needs to know of it."""

    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    processor_arguments: dict[str, int]
    start_seconds: dict[str, float]
    """Where the time until now went, part by part."""
    kernels: dict[str, OpReport] = {}
    """What each op runs on, and how its check went."""


class Outputs(_Message, tag="outputs"):
    """The news of one step for one front."""

    outputs: list[EngineCoreOutput]
    load: Load


class Fault(_Message):
    """A JaxLLMError on its way."""

    kind: Literal["invalid", "config", "dead", "overloaded", "sleeping", "engine"]
    message: str
    param: str | None = None
    retry_after_seconds: int = 1


class Refused(_Message, tag="refused"):
    """A request that the core did not take."""

    request_id: str
    fault: Fault


class Failed(_Message, tag="failed"):
    """A step failed, or the front did not listen: all its requests have ended, the engine goes on."""

    message: str


class Reply(_Message, tag="reply"):
    """The result of a Call, or why there is none."""

    number: int
    result: bool | int | float | str | list[MetricRecord] | None = None
    fault: Fault | None = None
    load: Load | None = None
    """With metrics."""


class WantMetrics(_Message, tag="want_metrics"):
    """Another front is asked for the metrics of all: share yours now."""


class Dead(_Message, tag="dead"):
    """The engine cannot go on and its process ends."""

    message: str


FrontMessage = Hello | Add | Abort | Call
EngineMessage = Status | Ready | Outputs | Refused | Failed | Reply | WantMetrics | Dead


def encode(message: Any) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_front_message(frame: bytes) -> FrontMessage:
    """What a front said. Raises MessageError."""
    message = _decode(_front_decoder, frame)
    if isinstance(message, Add) and message.request.sampling_params.seed is None:
        message.request.sampling_params.seed = -1  # to callers -1 means none; the front has set it, as the seed of an answer
    return message


def decode_engine_message(frame: bytes) -> EngineMessage:
    """What the engine process said. Raises MessageError."""
    return _decode(_engine_decoder, frame)


def decode_engine_start(frame: bytes) -> EngineStart:
    """How the engine process is to be. Raises MessageError."""
    return _decode(_start_decoder, frame)


def sender_of_add(frame: bytes) -> tuple[str, str] | None:
    """Front and id of a request in an Add that could not be decoded, if they can be read: somebody waits for that request."""
    try:
        fields = msgspec.msgpack.decode(frame)
        tag, client, request = fields
        request_id = request["request_id"]
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, KeyError, OverflowError):
        return None
    return (client, request_id) if tag == "add" and isinstance(client, str) and isinstance(request_id, str) else None


def fault_of(error: BaseException) -> Fault:
    """An exception as it is sent. Of foreign ones only the type is told: their texts may hold anything."""
    for kind, of_type in _ERROR_TYPES.items():
        if isinstance(error, of_type):
            param, seconds = getattr(error, "param", None), getattr(error, "retry_after_seconds", 1)
            return Fault(kind, str(error), param, seconds)  # type: ignore[arg-type]
    if isinstance(error, JaxLLMError):
        return Fault("engine", str(error))
    return Fault("engine", f"the engine could not do it ({type(error).__name__}); its log has more")


def error_of(fault: Fault) -> JaxLLMError:
    """The exception that a fault describes."""
    if fault.kind == "invalid":
        return InvalidRequestError(fault.message, fault.param)
    if fault.kind == "overloaded":
        return OverloadedError(fault.message, fault.retry_after_seconds)
    return _ERROR_TYPES.get(fault.kind, EngineError)(fault.message)


def metric_records(metrics: list[Metric]) -> list[MetricRecord]:
    """Metrics in the form that they travel in."""
    records = []
    for metric in metrics:
        if isinstance(metric, Histogram):
            records.append(MetricRecord("histogram", metric.name, metric.labels, metric.help, metric.sum, metric.buckets))
        elif isinstance(metric, (Counter, Gauge)):
            kind: Literal["counter", "gauge"] = "counter" if isinstance(metric, Counter) else "gauge"
            records.append(MetricRecord(kind, metric.name, metric.labels, metric.help, metric.value))
    return records


def metrics_of(records: list[MetricRecord]) -> list[Metric]:
    """What `metric_records` was given."""
    found: list[Metric] = []
    for record in records:
        if record.kind == "histogram":
            buckets = record.buckets or {}
            found.append(
                Histogram(record.name, record.labels, record.help, buckets.get("+Inf", 0), float(record.value), buckets)
            )
        elif record.kind == "counter":
            found.append(Counter(record.name, record.labels, record.help, record.value))  # type: ignore[arg-type]
        else:
            found.append(Gauge(record.name, record.labels, record.help, record.value))
    return found


def _decode(decoder: Any, frame: bytes) -> Any:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"{len(frame)} bytes are no message: {type(error).__name__}: {str(error)[:200]}") from error


def _encode_other(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be sent")


def _decode_other(kind: type, value: Any) -> Any:
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


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_front_decoder: Any = msgspec.msgpack.Decoder(FrontMessage, dec_hook=_decode_other)  # type: ignore[arg-type]
_engine_decoder: Any = msgspec.msgpack.Decoder(EngineMessage, dec_hook=_decode_other)  # type: ignore[arg-type]
_start_decoder = msgspec.msgpack.Decoder(EngineStart)
