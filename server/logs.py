"""The server's log lines: for people or as JSON, one line each, whatever a client puts into them."""

import logging
from typing import Any

import msgspec
from starlette.types import Scope

from jaxllm.log import logger
from server.options import LoggingOptions

QUIET_PATHS = frozenset({"/live", "/ready", "/health", "/ping", "/metrics", "/load", "/version"})
_FIELDS = ("method", "path", "status", "milliseconds", "client", "request_id")


def escaped(text: str) -> str:
    """A text without line breaks and control characters, which could forge lines or steer a terminal."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


class EscapingFormatter(logging.Formatter):
    """Text lines whose message stays on its line; tracebacks follow it."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """A JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """time, level, logger and message; for requests also method, path, status, milliseconds, request_id."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((name, getattr(record, name)) for name in _FIELDS if hasattr(record, name))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def formatter(options: LoggingOptions) -> logging.Formatter:
    """What --log-format asks for."""
    return JsonFormatter() if options.log_format == "json" else EscapingFormatter()


class AccessLog:
    """A line for each HTTP request."""

    escaped = staticmethod(escaped)

    def __init__(self, options: LoggingOptions):
        self._is_off = options.disable_uvicorn_access_log
        given = options.disable_access_log_for_endpoints
        self._quiet = QUIET_PATHS if given is None else frozenset(given)

    def write(self, scope: Scope, status: int, seconds: float) -> None:
        """Log a request that was answered."""
        if self._is_off or not logger.isEnabledFor(logging.INFO) or (scope["path"] in self._quiet and status < 400):
            return
        path, client = escaped(scope["path"]), scope.get("client")
        milliseconds = round(1000 * seconds, 1)
        extra = {
            "method": scope["method"],
            "path": path,
            "status": status,
            "milliseconds": milliseconds,
            "client": f"{client[0]}:{client[1]}" if client else None,
            "request_id": scope.get("state", {}).get("request_id"),
        }
        line = "%s %s %d %.1f ms %s"
        logger.info(line, extra["method"], path[:200], status, milliseconds, extra["request_id"] or "", extra=extra)
