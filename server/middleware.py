"""Middleware named by --middleware. It runs inside the guard: only for admitted requests."""

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware

from jaxllm.errors import ConfigError


def load_middleware(paths: Sequence[str]) -> list[Any]:
    """Import classes and coroutine functions by path. Raises ConfigError that names the path."""
    return [_load(path) for path in paths]


def install_middleware(app: FastAPI, paths: Sequence[str]) -> None:
    """Wrap the application in the middleware at the import paths, the last outermost. Raises ConfigError."""
    for found in load_middleware(paths):
        is_function = inspect.iscoroutinefunction(found)
        app.add_middleware(BaseHTTPMiddleware, dispatch=found) if is_function else app.add_middleware(found)


def _load(path: str) -> Any:
    module, dot, name = path.rpartition(".")
    if not dot or not module:
        raise ConfigError(f"middleware is {path!r}, must be package.module.name")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the operator's own code
        raise ConfigError(f"middleware {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
        raise ConfigError(f"middleware {path!r} is a {type(found).__name__}, must be a class or a coroutine function")
    return found
