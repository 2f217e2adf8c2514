"""Starts and ends the measuring processes, and reads their results."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxllm.errors import ConfigError
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.rows import AllReduce, Breakdown, Row, SizeResult, Skipped, from_json, to_json
from jaxllm.scaling.trace import COMMAND_BUFFERS_WHILE_PROFILING

MODULE = "jaxllm.scaling.child"
PROBE_SECONDS = 300.0
END_SECONDS = 10.0
"""Seconds between asking a process to end and killing it."""
_RESULTS: Mapping[str, tuple[str, type]] = {
    "Row": ("rows", Row),
    "Breakdown": ("breakdowns", Breakdown),
    "AllReduce": ("all_reduces", AllReduce),
    "Skipped": ("skipped", Skipped),
}
"""Kinds of lines, the list of a SizeResult that they go to, and their class."""

Hear = Callable[[Any], None]
"""Takes each result, and a str that names the current activity."""


def environment_of(num_cpu_devices: int | None) -> dict[str, str]:
    """The environment of a process that measures; with `num_cpu_devices` so many devices that share this machine's CPU."""
    variables = dict(os.environ)
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables["PYTHONPATH"] = os.pathsep.join(paths)
    flags = [variables.get("XLA_FLAGS", ""), COMMAND_BUFFERS_WHILE_PROFILING]
    if num_cpu_devices is not None:
        variables["JAX_PLATFORMS"] = "cpu"
        variables.pop("JAX_NUM_CPU_DEVICES", None)  # JAX refuses it beside the flag
        flags.append(f"--xla_force_host_platform_device_count={num_cpu_devices}")
    variables["XLA_FLAGS"] = " ".join(filter(None, flags))
    return variables


def find_devices(variables: Mapping[str, str]) -> dict[str, Any]:
    """Platform, kind and count of the devices that JAX finds, asked of a process that ends at once. Raises ConfigError."""
    # It must not take the devices' memory: another may be at work on them.
    variables = {**variables, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with _started({"find_devices": True}, variables, stderr=subprocess.PIPE) as process:
        try:
            out, err = process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"JAX has not told its devices after {PROBE_SECONDS:.0f} s; `jaxllm env` asks it directly"
            ) from None
    for line in out.splitlines():
        told = json.loads(line)
        if told["kind"] == "devices":
            return dict(told["value"])
    reason = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
    raise ConfigError(f"JAX finds no devices ({reason[0]}); `jaxllm env` tells what is there")


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

    A process that fails, is killed or times out leaves the results reported so far, and a `failure`. A KeyboardInterrupt
    ends the process; its `result` attribute has the results so far.
    """
    result = SizeResult(size)
    asked = {"plan": to_json(plan), "tensor_parallel_size": size, "log_level": log_level}
    start = time.monotonic()
    try:
        with log_path.open("wb") as log, _started(asked, variables, stderr=log) as process:
            is_done = _listen(process, result, start, timeout_seconds, hear)
        if not is_done and process.returncode != 0 and result.failure is None:
            result.failure = f"the process ended {_ending(process.returncode)}{_last_line(log_path)}"
    except KeyboardInterrupt as interrupt:
        result.failure = "interrupted"
        raise Interrupted(result) from interrupt
    finally:
        result.seconds = time.monotonic() - start
    return result


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C while a size was measured. `result` is the partial result."""

    def __init__(self, result: SizeResult):
        super().__init__()
        self.result = result


def _listen(
    process: "subprocess.Popen[bytes]", result: SizeResult, start: float, timeout_seconds: float | None, hear: Hear
) -> bool:
    """Read a process's lines into `result` to the end. Returns whether it reported that it is done."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    assert process.stdout is not None
    threading.Thread(target=_read_lines, args=(process.stdout, lines), daemon=True).start()
    is_done = False
    while True:
        left = None if timeout_seconds is None else start + timeout_seconds - time.monotonic()
        if is_done:
            left = END_SECONDS
        try:
            line = lines.get(timeout=None if left is None else max(0.0, left))
        except queue.Empty:
            if not is_done:
                result.failure = f"stopped after {timeout_seconds:g} s (--timeout)"
            return is_done
        if line is None:
            if not is_done:
                process.wait()
            return is_done
        told = json.loads(line)
        kind, value = told["kind"], told["value"]
        if kind == "doing":
            hear(value)
        elif kind == "failed":
            result.failure = value
        elif kind == "done":
            is_done = True  # the end of its output is still to be read
        elif kind in ("engine", "limits"):
            setattr(result, kind, value)
        else:
            name, of_kind = _RESULTS[kind]
            found: Any = from_json(of_kind, value)
            getattr(result, name).append(found)
            hear(found)


def _read_lines(pipe: IO[bytes], lines: "queue.SimpleQueue[bytes | None]") -> None:
    with contextlib.suppress(ValueError, OSError):  # the pipe was closed
        for line in pipe:
            lines.put(line)
    lines.put(None)


@contextlib.contextmanager
def _started(asked: Mapping[str, Any], variables: Mapping[str, str], *, stderr: Any) -> "Iterator[subprocess.Popen[bytes]]":
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
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
        yield process
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and what it started, if it has not ended by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _last_line(log_path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log_path.read_bytes()[-20_000:].decode(errors="replace").strip().splitlines()
        if lines:
            return f"; its last line was: {lines[-1].strip()[:300]}"
    return ""
