"""Starts and ends the measuring processes, and receives their results."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.measuring.trace import COMMAND_BUFFERS_WHILE_PROFILING
from jaxllm.scaling.plan import Plan
from jaxllm.scaling.results import SizeResult

PROBE = """
import jax, json
devices = jax.devices()
print(json.dumps({"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}))
"""
PROBE_SECONDS = 300.0
END_SECONDS = 10.0
"""Seconds between asking a process to end and killing it."""


def environment_of(num_cpu_devices: int | None) -> dict[str, str]:
    """The environment of a process that measures; with `num_cpu_devices` so many devices that share this machine's CPU."""
    variables = dict(os.environ)
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
    try:
        probe = subprocess.run([sys.executable, "-c", PROBE], env=variables, capture_output=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"JAX finds no devices within {PROBE_SECONDS:.0f} s; `jaxllm env` asks it directly") from None
    if probe.returncode == 0:
        return dict(json.loads(probe.stdout.splitlines()[-1]))
    reason = probe.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {probe.returncode}"]
    raise ConfigError(f"JAX finds no devices ({reason[0]}); `jaxllm env` tells what is there")


def measure_size(
    plan: Plan,
    result: SizeResult,
    *,
    variables: Mapping[str, str],
    timeout_seconds: float | None,
    logs: Path,
    log_level: str,
    hear: Callable[[int, SizeResult | str], None],
) -> None:
    """Measure `result.tensor_parallel_size` in a process, whose output goes to a file in `logs`, and add what it reports to `result`.

    hear: receives the size, and a part of its results or the name of what its process does now.
    A process that fails, is killed or takes too long leaves what it reported so far, and a `failure`. It has ended when this
    returns, also by KeyboardInterrupt.
    """
    size, start = result.tensor_parallel_size, time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    log_path = logs / f"tp{size}.log"
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_child, args=(sender, variables, log_path, plan, size, log_level), daemon=True)
    process.start()
    sender.close()  # the process has its own: without that its messages would never end
    try:
        while receiver.poll(None if timeout_seconds is None else max(0.0, start + timeout_seconds - time.monotonic())):
            try:
                message: SizeResult | str | None = receiver.recv()
            except (EOFError, OSError):
                process.join(END_SECONDS)
                result.failure = result.failure or _ending(process.exitcode, log_path)
                return
            if message is None:  # it is done
                process.join(END_SECONDS)
                return
            if isinstance(message, SizeResult):
                result.add(message)
            hear(size, message)
        result.failure = f"stopped after {timeout_seconds:g} s (--timeout)"
    finally:
        receiver.close()
        for end in (process.terminate, process.kill):
            if process.is_alive():
                end()
                process.join(END_SECONDS)
        result.seconds = time.monotonic() - start


def run_child(sender: Connection, variables: Mapping[str, str], log_path: Path, plan: Plan, size: int, log_level: str) -> None:
    """In the child: measure, with the environment `variables`, and send SizeResults that hold a part of the results, a str that
    names what is done next, and None at the end."""
    os.setsid()  # a Ctrl-C in the terminal is for the command, which ends this process
    with log_path.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(variables)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from jaxllm.scaling.measure import measure, one_line  # JAX reads the environment

    try:
        measure(plan, size, log_level, sender.send)
    except BaseException as error:
        traceback.print_exc()
        sender.send(SizeResult(size, failure=one_line(error)))
        sys.exit(1)
    sender.send(None)


def _end_with_parent() -> None:
    """End the process when its parent has ended; else it would keep the GPUs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _ending(code: int | None, log_path: Path) -> str:
    """How a process ended, with the last line of its log."""
    how = f"by signal {-code} ({signal.strsignal(-code)})" if code is not None and code < 0 else f"with exit code {code}"
    last_line = log_path.read_text(errors="replace").strip().splitlines()[-1:] if log_path.exists() else []
    return "; its last line was: ".join([f"the process ended {how}", *(line[:300].strip() for line in last_line)])
