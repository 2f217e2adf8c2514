"""The exceptions of the project. Each message says what was wrong, with both numbers, and what to do.

JaxLLMError
├── ConfigError            (ValueError)  an engine option is wrong, unknown or contradicts another
├── InvalidRequestError    (ValueError)  one request cannot be served; names the parameter
├── ModelLoadError                       a checkpoint is missing, incomplete, corrupt or of an unknown kind
├── OutOfMemoryError                     the device cannot hold what was asked for; names the flag to change
└── EngineError                          a step failed; the requests of that step end with it
    └── EngineDeadError                  the engine cannot go on; every later call fails at once
"""


class JaxLLMError(Exception):
    """Base of every error that jaxllm raises on purpose."""


class ConfigError(JaxLLMError, ValueError):
    """An engine option is wrong, unknown or contradicts another."""


class InvalidRequestError(JaxLLMError, ValueError):
    """One request cannot be served. `param` is the offending parameter, or None."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class ModelLoadError(JaxLLMError):
    """A checkpoint is missing, incomplete, corrupt or of an unknown kind."""


class OutOfMemoryError(JaxLLMError):
    """The device cannot hold what was asked for."""


class EngineError(JaxLLMError):
    """A step failed."""


class EngineDeadError(EngineError):
    """The engine met an error that it cannot recover from."""
