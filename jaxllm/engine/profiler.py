"""Traces of what host and device do, by JAX's profiler, started and ended while the engine serves."""

import jax

from jaxllm.errors import ConfigError, EngineError


class Profiler:
    """Writes one trace at a time below a directory. Without a directory, raises ConfigError."""

    def __init__(self, directory: str | None):
        self._directory = directory
        self.is_running = False

    def start(self) -> None:
        """Start a trace. Raises ConfigError without a directory, EngineError during a trace."""
        if self._directory is None:
            raise ConfigError("there is no place for traces; start the engine with --profiler-dir DIRECTORY")
        if self.is_running:
            raise EngineError("a trace is being written already; stop it first")
        jax.profiler.start_trace(self._directory)
        self.is_running = True

    def stop(self) -> None:
        """End the trace and write it. Raises EngineError if there is none."""
        if not self.is_running:
            raise EngineError("no trace is being written; start one first")
        self.is_running = False
        jax.profiler.stop_trace()
