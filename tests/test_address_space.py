import errno
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxllm import address_space
from jaxllm.engine.launch import socket_directory
from jaxllm.errors import ConfigError
from jaxllm.replicas.processes import EngineProcess

GIB = 1 << 30


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may map 3 GiB."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * GIB, 3 * GIB))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (ImportError("libjax_common.so: failed to map segment from shared object"), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ImportError("No module named 'x'"), False),
        (ValueError("cannot allocate memory"), False),
    ],
)
def test_errors_of_a_full_address_space_are_known(error: Exception, full: bool) -> None:
    assert address_space.is_full(error) is full


def test_an_engine_process_that_is_aborted_names_the_limit(limited: None) -> None:
    engine = EngineProcess(0, Path("."), {})
    engine.process = SimpleNamespace(poll=lambda: -6)  # type: ignore[assignment]
    told = " (signal 6: Aborted); the address space of a process is limited to 3.00 GiB (ulimit -v)"
    assert engine.describe_end() == told


def test_the_memory_of_a_cpu_is_what_the_limit_leaves(limited: None) -> None:
    from jaxllm.engine.failures import explain
    from jaxllm.runner.memory import device_limit

    device, num_bytes = device_limit()
    assert "ulimit -v" in device and num_bytes < 3 * GIB
    assert explain(RuntimeError("RESOURCE_EXHAUSTED: too much")).endswith("limited to 3.00 GiB (ulimit -v)")


def test_a_command_without_room_for_jax_says_so_in_one_line() -> None:
    command = ["sh", "-c", f'ulimit -v {GIB // 2 // 1024}; exec "$@"', "sh", sys.executable, "-m", "jaxllm", "generate", "hi"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    assert "error: no room for JAX; the address space of a process is limited to 0.50 GiB (ulimit -v)" in found.stderr


def test_without_a_place_for_sockets_the_variable_to_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match="Read-only file system; name a directory in TMPDIR"), socket_directory():
        pass
