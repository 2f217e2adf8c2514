"""Writes a batch's output line by line, resumes an interrupted run, and finally sorts the output in the order of the input."""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError

Key = str | int
"""A custom_id, or the number of an input line without one."""


class BatchOutput:
    """Appends answers to a file. Keeps an earlier run's finished answers; drops a truncated last line and server failures."""

    def __init__(self, path: Path):
        """Raises ConfigError for a file that is not a batch output, and OSError."""
        self.path = path
        self._places: dict[Key, tuple[int, int]] = {}
        """Offset and length of each line."""
        self._order_matters = False
        """Whether lines may be out of order or superfluous."""
        self._file = path.open("a+b")
        try:
            self._end = self._read_finished()
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(self._end)
        self.num_finished = len(self._places)
        """Number of requests that an earlier run answered."""

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def write(self, key: Key, record: dict[str, Any], *, is_in_order: bool = True) -> None:
        """Append an answer and flush it to the file."""
        line = _encoded(record) + b"\n"
        self._file.write(line)
        self._file.flush()
        self._places[key] = (self._end, len(line))
        self._end += len(line)
        self._order_matters |= not is_in_order

    def close(self) -> None:
        """Close the file as it is."""
        with contextlib.suppress(OSError):  # the writer has already reported a full disk
            self._file.close()

    def finish(self, keys: Sequence[Key]) -> None:
        """Close the file, with the answers to these requests first, in this order."""
        if self._order_matters or self.num_finished:
            path = self.path.resolve()
            descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".sorting")
            try:
                with open(descriptor, "wb") as sorted_file:
                    os.fchmod(descriptor, stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
                    for key in dict.fromkeys([*keys, *self._places]):
                        offset, length = self._places[key]
                        self._file.seek(offset)
                        sorted_file.write(self._file.read(length))
                    sorted_file.flush()
                    os.fsync(sorted_file.fileno())
                os.replace(beside, path)
            except OSError:
                Path(beside).unlink(missing_ok=True)
                raise
        self._file.close()

    def _read_finished(self) -> int:
        """Record the lines of an earlier run; return the end of the last complete line."""
        self._file.seek(0)
        end = 0
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break  # the run was killed during a write
            try:
                record = json.loads(raw)
                custom_id, response = record["custom_id"], record["response"]
                status = None if response is None else response["status_code"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ConfigError(
                    f"{self.path} exists and is not the output of a batch; choose another --output-file"
                ) from None
            if isinstance(custom_id, str) and isinstance(status, int) and status < 500:
                self._places[custom_id] = (end, len(raw))
            else:
                self._order_matters = True
            end += len(raw)
        return end


def _encoded(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(record, separators=(",", ":")).encode()
