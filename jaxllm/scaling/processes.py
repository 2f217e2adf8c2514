"""Starts and ends the measuring processes, and reads their results."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.rows import AllReduce, Breakdown, Row, SizeResult, Skipped, from_json, to_json
from jaxllm.scaling.trace import COMMAND_BUFFERS_WHILE_PROFILING

MODULE = "jaxllm.scaling.child"
PROBE_SECONDS = 300.0
END_SECONDS = 10.0
"""Seconds between asking a process to end and killing it."""
_LISTS: Mapping[type, str] = {Row: "rows", Breakdown: "breakdowns", AllReduce: "all_reduces", Skipped: "skipped"}
"""Classes of results, whose names are kinds of lines, and the list of a SizeResult for each."""

Hear = Callable[[Any], None]
"""Receives each result, and a str that names the current activity."""


def environment_of(num_cpu_devices: int | None) -> dict[str, str]:
    """The environment of a process that measures; with `num_cpu_devices` so many devices that share this machine's CPU."""
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    flags = [variables.get("XLA_FLAGS", ""), COMMAND_BUFFERS_WHILE_PROFILING]
    if num_cpu_devices is not None:
        variables["JAX_PLATFORMS"] = "cpu"
        variables.pop("JAX_NUM_CPU_DEVICES", None)  # JAX refuses it together with the flag
        flags.append(f"--xla_force_host_platform_device_count={num_cpu_devices}")
    variables["XLA_FLAGS"] = " ".join(filter(None, flags))
    return variables


def find_devices(variables: Mapping[str, str]) -> dict[str, Any]:
    """Platform, kind and count of the devices that JAX finds in a process that ends at once. Raises ConfigError."""
    # It must not reserve the devices' memory: another process may be using them.
    variables = {**variables, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with _started({"find_devices": True}, variables, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"JAX finds no devices within {PROBE_SECONDS:.0f} s; `jaxllm env` asks it directly") from None
    for line in map(json.loads, out.splitlines()):
        if line["kind"] == "devices":
            return dict(line["value"])
    reason = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    raise ConfigError(f"JAX finds no devices ({reason[0]}); `jaxllm env` tells what is there")


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C while a size was measured. `result` is the partial result."""

    def __init__(self, result: SizeResult):
        super().__init__()
        self.result = result


def measure_size(
    plan: Plan,
    size: int,
    *,
    variables: Mapping[str, str],
    timeout_seconds: float | None,
    log_path: Path,
    log_level: str,
    hear: Hear,
) -> SizeResult:
    """Measure one tensor-parallel size in a separate process, whose stderr goes to `log_path`.

    A process that fails, is killed or times out leaves the results reported so far, and a `failure`. Raises Interrupted for a
    KeyboardInterrupt, after which the process has ended.
    """
    result = SizeResult(size)
    task = {"plan": to_json(plan), "tensor_parallel_size": size, "log_level": log_level}
    start = time.monotonic()
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        _end(process)

    try:
        with log_path.open("wb") as log, _started(task, variables, stderr=log) as process:
            timer = threading.Timer(timeout_seconds or threading.TIMEOUT_MAX, stop)
            timer.daemon = True
            timer.start()
            try:
                is_done = _listen(process, result, hear)
            finally:
                timer.cancel()
            if is_late.is_set() and not is_done:
                result.failure = f"stopped after {timeout_seconds:g} s (--timeout)"
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        if not is_done and process.returncode != 0 and result.failure is None:
            result.failure = f"the process ended {_ending(process.returncode)}{_last_line(log_path)}"
    except KeyboardInterrupt as interrupt:
        result.failure = "interrupted"
        raise Interrupted(result) from interrupt
    finally:
        result.seconds = time.monotonic() - start
    return result


def _listen(process: "subprocess.Popen[bytes]", result: SizeResult, hear: Hear) -> bool:
    """Read a process's lines into `result` until it is done, or to the end. Returns whether it reported that it is done."""
    assert process.stdout is not None
    for line in map(json.loads, process.stdout):
        kind, value = line["kind"], line["value"]
        if kind == "done":
            return True
        if kind == "doing":
            hear(value)
        elif kind == "failed":
            result.failure = value
        elif kind in ("engine", "limits"):
            setattr(result, kind, value)
        else:
            of_kind = next(each for each in _LISTS if each.__name__ == kind)
            found: Any = from_json(of_kind, value)
            getattr(result, _LISTS[of_kind]).append(found)
            hear(found)
    return False


@contextlib.contextmanager
def _started(task: Mapping[str, Any], variables: Mapping[str, str], *, stderr: Any) -> "Iterator[subprocess.Popen[bytes]]":
    """A process of MODULE with its task sent; it has ended when the context exits."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=dict(variables),
        start_new_session=True,  # a Ctrl-C in the terminal is for the command, which ends this
    )
    try:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; the exit code gives the reason
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
        yield process
    finally:
        _end(process)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and what it started, if it has not ended by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"


def _last_line(log_path: Path) -> str:
    with contextlib.suppress(OSError):
        if lines := log_path.read_bytes()[-20_000:].decode(errors="replace").strip().splitlines():
            return f"; its last line was: {lines[-1].strip()[:300]}"
    return ""
