"""The exceptions of the project. Each message says what was wrong, with both numbers, and what to do.

JaxLLMError
├── ConfigError            (ValueError)  an engine option is wrong, unknown or contradicts another
├── InvalidRequestError    (ValueError)  one request cannot be served; names the parameter
├── AdapterNotFoundError  (InvalidRequestError)  the adapter that a request names is not loaded
├── MediaFetchError       (InvalidRequestError)  an image that a request names by its URL cannot be fetched; has an HTTP status
├── AdapterError                         a LoRA adapter is missing, faulty, or does not fit the model or the options
├── GrammarError           (ValueError)  an output's form cannot be compiled, or the output cannot go on in it
├── ModelLoadError                       a checkpoint is missing, incomplete, corrupt or of an unknown kind
├── KernelCheckError                     no implementation of an op gives right results on this device
├── OutOfMemoryError                     the device cannot hold what was asked for; names the flag to change
└── EngineError                          the engine failed in what it was asked; the message says whether to try again
    ├── RequestFailedError               one request ended with an error; has its kind
    ├── ReplicaLostError                 the replica that computed a request has ended; the others go on
    ├── EngineDeadError                  the engine cannot go on; every later call fails at once
    ├── OverloadedError                  too many requests wait; says when to try again
    └── EngineSleepingError              the engine sleeps; wake it up first
"""

import itertools
from collections.abc import Iterable


def shortened(text: str, length: int = 200) -> str:
    """The text, without its middle if it is longer: messages name values of files, which may be of any size."""
    if len(text) <= length:
        return text
    start = length * 2 // 3
    return f"{text[:start]} … {text[start + 3 - length :]}"


def joined(faults: Iterable[str], length: int = 800) -> str:
    """The distinct faults in a text of about this length: each shortened, and the number of those that are left out."""
    told = [shortened(fault) for fault in dict.fromkeys(faults)]
    ends = list(itertools.accumulate(len(fault) + 2 for fault in told))
    count = max(1, sum(end <= length for end in ends))
    return "; ".join(told[:count] + ([f"and {len(told) - count} more"] if count < len(told) else []))


class JaxLLMError(Exception):
    """Base of every error that jaxllm raises on purpose."""


class ConfigError(JaxLLMError, ValueError):
    """An engine option is wrong, unknown or contradicts another."""


class InvalidRequestError(JaxLLMError, ValueError):
    """One request cannot be served. `param` is the offending parameter, or None."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class AdapterNotFoundError(InvalidRequestError):
    """The adapter that a request or a call names is not loaded."""


class MediaFetchError(InvalidRequestError):
    """An image cannot be fetched. `status` is that of an HTTP reply: 422 if its server refuses, 502 if to try again may help."""

    def __init__(self, message: str, param: str | None, status: int):
        super().__init__(message, param)
        self.status = status


class AdapterError(JaxLLMError):
    """A LoRA adapter is missing or faulty, or does not fit the model or the options."""


class GrammarError(JaxLLMError, ValueError):
    """An output's form cannot be compiled, or the output cannot go on in it; the message is for callers."""


class ModelLoadError(JaxLLMError):
    """A checkpoint is missing, incomplete, corrupt or of an unknown kind."""


class KernelCheckError(JaxLLMError):
    """No implementation of an op gives right results on this device, or the one that was asked for does not."""


class OutOfMemoryError(JaxLLMError):
    """The device cannot hold what was asked for."""


class EngineError(JaxLLMError):
    """The engine failed in what it was asked."""


class RequestFailedError(EngineError):
    """One request ended with an error. `kind` is one of jaxllm.request.ErrorKind."""

    def __init__(self, message: str, kind: str = "internal"):
        super().__init__(message)
        self.kind = kind


class ReplicaLostError(EngineError):
    """The replica that computed a request has ended, and the others go on. `may_retry`: whether it may run again on another."""

    def __init__(self, message: str, *, may_retry: bool = False):
        super().__init__(message)
        self.may_retry = may_retry


class EngineDeadError(EngineError):
    """The engine failed with an error that it cannot recover from."""


class OverloadedError(EngineError):
    """The queue is full. `retry_after_seconds` estimates when it has space again; `limit` names the exceeded option."""

    def __init__(self, message: str, retry_after_seconds: int, limit: str = ""):
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        self.limit = limit


class EngineStalledError(EngineError):
    """The engine seems to hang. It may go on by itself."""


class EngineSleepingError(EngineError):
    """The engine sleeps and takes no requests."""
