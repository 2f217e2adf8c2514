"""Injects failures at named places of a running engine, for tests and rehearsals: JAXLLM_FAULT=step:50:oom (docs/FAULTS.md).

Without faults nothing is wrapped, so there is no cost.
"""

import ctypes
import errno
import fnmatch
import functools
import importlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxllm import env
from jaxllm.engine import features
from jaxllm.errors import ConfigError
from jaxllm.fault_place import Place, Side
from jaxllm.log import logger

_OF_ENGINES: dict[str, Place] = {
    "add": Place("core", "jaxllm.scheduler.scheduler", "Scheduler.add_request", lambda self, request: request.request_id),
    "grammar": Place("core", "jaxllm.engine.grammars", "Grammars._start", lambda self, request, template: request.request_id),
    "adapter.read": Place("core", "jaxllm.lora.manager", "LoRAManager._read", lambda self, adapter, packs: adapter.name),
    "adapter.stage": Place("core", "jaxllm.lora.manager", "LoRAManager._stage", lambda self, adapter, *args: adapter.name),
    "op": Place("core", "jaxllm.device_ops", "run_op", lambda op, run: type(op).__name__),
    "mask": Place("core", "jaxllm.structured.matcher", "fill_masks"),
    "schedule": Place("core", "jaxllm.scheduler.scheduler", "Scheduler.schedule"),
    "allocate": Place(
        "core",
        "jaxllm.scheduler.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        lambda self, request, *args, **kwargs: request.request_id,
    ),
    "free": Place(
        "core",
        "jaxllm.scheduler.kv_cache_manager",
        "KVCacheManager.free",
        lambda self, request, *args, **kwargs: request.request_id,
    ),
    "step": Place("core", "jaxllm.runner.batch", "BatchBuilder.build"),
    "row": Place("core", "jaxllm.runner.rows", "Rows.add", lambda self, data: data.request_id),
    "launch": Place("core", "jaxllm.runner.runner", "ModelRunner.prepare"),
    "draw": Place("core", "jaxllm.runner.sampling", "Sampling.launch"),
    "admit": Place("core", "jaxllm.runner.sampling", "Sampling.pack_admission", lambda self, row: row.data.request_id),
    "result": Place("core", "jaxllm.runner.pending", "StepInFlight.read"),
    "sampler": Place("core", "jaxllm.runner.sampling", "PendingTokens.scores_of", lambda self, row, index: row.data.request_id),
    "stop": Place("core", "jaxllm.request", "Request.append_output", lambda self, token_id: self.request_id),
    "caches": Place("core", "jaxllm.runner.runner", "ModelRunner.start_over"),
    "detokenizer": Place("client", "jaxllm.text.output_processor", "_Answer.update", lambda self, output: self.engine_id),
    "logprobs": Place("client", "jaxllm.text.output_processor", "_Answer._append", lambda self, output, *args: self.engine_id),
    "output": Place("client", "jaxllm.text.output_processor", "_Answer.completion", lambda self, **kwargs: self.engine_id),
}
"""By name. A wrapped function is replaced in its module or class, so every object has the fault."""


@functools.cache
def places() -> dict[str, Place]:
    """All places, by name: those above, and those of packages that this build has."""
    return _OF_ENGINES | features.fault_places()


_KINDS: dict[str, Callable[[], Exception]] = {
    "error": lambda: RuntimeError("injected fault"),
    "oom": lambda: RuntimeError("RESOURCE_EXHAUSTED: injected fault"),
    "fatal": lambda: RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: injected fault"),
    "eio": lambda: OSError(errno.EIO, "injected fault"),
    "enospc": lambda: OSError(errno.ENOSPC, "injected fault"),
    "enomem": lambda: OSError(errno.ENOMEM, "injected fault"),
}


@dataclass(frozen=True)
class Fault:
    """`place:when:kind`."""

    place: str
    first: int | None
    """The call with this number (from 1) fails, and with `last` those up to it; None: the calls about matching requests."""
    last: int
    request_pattern: str
    kind: str
    seconds: float | None
    """Duration of a "hang" or "hold", in seconds; None: unlimited."""

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Parse a fault. Raises ConfigError with the reason."""
        parts = text.strip().split(":")
        if len(parts) != 3:
            raise ConfigError(f"{env.FAULT} has {text!r}, must be place:when:kind, e.g. step:50:oom")
        place, when, kind = parts
        if place not in places():
            raise ConfigError(f"{env.FAULT} names the place {place!r}, must be one of {', '.join(places())}")
        kind, _, seconds = kind.partition("=")
        if kind not in (*_KINDS, "hang", "hold", "exit", "corrupt"):
            raise ConfigError(
                f"{env.FAULT} names the kind {kind!r}, must be one of {', '.join(_KINDS)}, hang, hang=SECONDS, hold, "
                "hold=SECONDS, exit, corrupt"
            )
        if kind == "corrupt" and places()[place].corrupt is None:
            able = ", ".join(name for name, found in places().items() if found.corrupt)
            raise ConfigError(f"{env.FAULT} has corrupt at {place}, which reads no stored bytes; use {able}")
        first, last, pattern = None, 0, ""
        try:
            if when.startswith("id="):
                pattern = when[3:]
            else:
                low, dash, high = when.partition("-")
                first = int(low)
                last = first if not dash else int(high) if high else 1 << 62
            duration = float(seconds) if seconds else None
        except ValueError:
            raise ConfigError(f"{env.FAULT} has {text!r}; when is a number, FIRST-LAST, FIRST- or id=PATTERN") from None
        return cls(place, first, last, pattern, kind, duration)

    def applies(self, number: int, request_id: str | None) -> bool:
        """Whether a call with this number, about this request, fails."""
        if self.first is not None:
            return self.first <= number <= self.last
        return request_id is not None and fnmatch.fnmatchcase(request_id, self.request_pattern)

    def happen(self) -> None:
        """Cause this fault's kind of failure."""
        logger.warning("injected fault: %s at %s", self.kind, self.place)
        if self.kind == "hang":
            threading.Event().wait(self.seconds)
        elif self.kind == "hold":
            hold_interpreter(math.inf if self.seconds is None else self.seconds)
        elif self.kind == "exit":
            os._exit(1)
        else:
            raise _KINDS[self.kind]()


def hold_interpreter(seconds: float) -> None:
    """Keep every other thread of this process from running Python, as a long call into C that does not release the interpreter."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ctypes.PyDLL(None).poll(None, 0, int(1000 * min(left, 1e6)))  # a PyDLL keeps the interpreter's lock


def faults_of(text: str) -> list[Fault]:
    """The faults of a comma-separated list. Raises ConfigError."""
    return [Fault.parse(part) for part in text.split(",") if part.strip()]


@functools.cache
def install_from_environment(side: Side) -> None:
    """Wrap the places of one side that JAXLLM_FAULT names, once in a process. Raises ConfigError."""
    if text := os.environ.get(env.FAULT):
        install(side, faults_of(text))


def install(side: Side, faults: Sequence[Fault]) -> Callable[[], None]:
    """Wrap the places of one side that have faults. Returns a function that undoes it."""
    undo: list[Callable[[], None]] = []
    for name in dict.fromkeys(fault.place for fault in faults if places()[fault.place].side == side):
        undo.append(_wrap(places()[name], [fault for fault in faults if fault.place == name]))

    def uninstall() -> None:
        for call in reversed(undo):
            call()

    return uninstall


@contextmanager
def injected(text: str) -> Iterator[None]:
    """Install these faults, on both sides, within the context."""
    faults = faults_of(text)
    undo = [install(side, faults) for side in ("core", "client")]  # type: ignore[arg-type]
    try:
        yield
    finally:
        for call in reversed(undo):
            call()


def _wrap(place: Place, faults: list[Fault]) -> Callable[[], None]:
    owner: Any = importlib.import_module(place.module)
    *path, name = place.function.split(".")
    for part in path:
        owner = getattr(owner, part)
    function = getattr(owner, name)
    numbers = itertools.count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        request_id = place.request_id(*args, **kwargs)
        for fault in faults:
            if not fault.applies(number, request_id):
                continue
            if fault.kind == "corrupt" and place.corrupt is not None:
                place.corrupt(*args, **kwargs)
            else:
                fault.happen()
        return function(*args, **kwargs)

    setattr(owner, name, failing)
    return lambda: setattr(owner, name, function)
