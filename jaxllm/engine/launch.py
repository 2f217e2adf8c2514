"""Starts child processes that end with their parent, get their parameters from standard input, and inherit no secrets."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from jaxllm import env, worker_pipe
from jaxllm.engine import messages
from jaxllm.engine.messages import EngineStart
from jaxllm.errors import ConfigError

_PROJECT = Path(__file__).parents[2]
_SECRET = re.compile(r"API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|TOKEN|PRIVATE_KEY", re.IGNORECASE)
_NEEDED = frozenset(
    {"HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "TOKENIZERS_PARALLELISM", env.HOSTS_TOKEN, env.KV_TOKEN}
)
"""Variables whose names look secret but which are needed to fetch a model or to connect to other hosts, or are not secret."""

_MAX_PARENT_CHARACTERS = 50
"""A socket's whole path may have 107."""


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a directory that only this user can enter, and remove it with its contents afterwards. Raises ConfigError."""
    try:
        parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _MAX_PARENT_CHARACTERS else "/tmp"
        directory = Path(tempfile.mkdtemp(prefix="jaxllm-", dir=parent))  # mode 0700
    except OSError as error:
        raise ConfigError(
            f"the sockets of the server's processes have no place: {error.strerror}; name a directory in TMPDIR that can be written"
        ) from None
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def environment_without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Environment variables whose names do not look secret. The child imports the project from where this process does."""
    kept = {name: value for name, value in variables.items() if name in _NEEDED or not _SECRET.search(name)}
    paths = [str(_PROJECT), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return kept


def start_child(
    module: str, first_message: bytes, pass_fds: Sequence[int] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.Popen[bytes]":
    """Run a module in its own process, which the terminal's Ctrl-C does not reach. It reads `first_message` from its standard
    input, which stays open as long as this process lives. environment: variables in addition to this process's own."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        env=environment_without_secrets({**os.environ, **environment}),
        pass_fds=pass_fds,
        process_group=0,
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has already ended; waiting for it shows that
        worker_pipe.write(child.stdin, first_message)
    return child


def read_first_message(descriptor: int) -> bytes:
    """In the child: read the message passed to `start_child`."""
    # Unbuffered, so that other readers see the rest of the input.
    return worker_pipe.read(io.FileIO(descriptor, closefd=False)) or b""


def start_engine(start: EngineStart, environment: Mapping[str, str] = MappingProxyType({})) -> "subprocess.Popen[bytes]":
    """Start the engine process."""
    return start_child("jaxllm.engine.process", messages.encode(start), environment=environment)
