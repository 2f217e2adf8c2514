"""Starts child processes that end with their parent, learn what they need by standard input, and inherit no secrets."""

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

from jaxllm import worker_pipe
from jaxllm.engine import messages
from jaxllm.engine.messages import EngineStart

_PROJECT = Path(__file__).parents[2]
_SECRET = re.compile(r"API_?KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL|TOKEN|PRIVATE_KEY", re.IGNORECASE)
_NEEDED = frozenset({"HF_TOKEN", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "TOKENIZERS_PARALLELISM"})
"""Variables that look like secrets and are needed to fetch a model, or are none."""

_MAX_PARENT_CHARACTERS = 50
"""A socket's whole path may have 107."""


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """A directory that only this user can enter, gone afterwards with all that is in it."""
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _MAX_PARENT_CHARACTERS else "/tmp"
    directory = Path(tempfile.mkdtemp(prefix="jaxllm-", dir=parent))  # mode 0700
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def environment_without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names do not sound like secrets; the project is found where it was found here."""
    kept = {name: value for name, value in variables.items() if name in _NEEDED or not _SECRET.search(name)}
    paths = [str(_PROJECT), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return kept


def start_child(module: str, first_message: bytes, pass_fds: Sequence[int] = ()) -> "subprocess.Popen[bytes]":
    """Run a module as a process of its own, out of reach of the terminal's Ctrl-C. It reads `first_message` from its standard input,
    which stays open as long as this process lives."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        env=environment_without_secrets(os.environ),
        pass_fds=pass_fds,
        process_group=0,
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has died already, which whoever waits for it will see
        worker_pipe.write(child.stdin, first_message)
    return child


def read_first_message(descriptor: int) -> bytes:
    """In the child: what `start_child` was given."""
    # Unbuffered: how the rest of the input ends is for others to hear.
    return worker_pipe.read(io.FileIO(descriptor, closefd=False)) or b""


def start_engine(start: EngineStart) -> "subprocess.Popen[bytes]":
    """The engine process."""
    return start_child("jaxllm.engine.process", messages.encode(start))
