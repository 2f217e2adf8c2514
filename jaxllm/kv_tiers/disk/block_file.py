"""A file with the contents of some blocks, one behind the other. Each is checked alone: it has a header of whole pages, and behind it the
content as in its slot, padded to whole pages."""

import errno
import os
import stat
import struct
import zlib
from dataclasses import dataclass

from jaxllm.kv_tiers.transfers import copy

MAGIC, VERSION = b"JAXLLMKV", 1
PAGE_BYTES = 4096
MAX_NAME_BYTES = 64
_FIELDS = struct.Struct(f"<8sIIQQ32sI{MAX_NAME_BYTES}sI")
"""Magic, version, bytes of header, content and checksums; fingerprint, length of the name, name; CRC-32 of all that is read, with zero in
place of itself. Behind it the checksums of the devices."""
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link is followed, and no FIFO waited for
_DIRECT = getattr(os, "O_DIRECT", 0)


class BadFileError(Exception):
    """A file is not what was written under its name."""


@dataclass(frozen=True)
class FileFormat:
    """The contents in files of a fingerprint: all have the same size."""

    fingerprint: bytes
    block_bytes: int
    sums_bytes: int

    @property
    def header_bytes(self) -> int:
        return _whole_pages(_FIELDS.size + self.sums_bytes)

    @property
    def content_bytes(self) -> int:
        """Size of one content including its header."""
        return self.header_bytes + _whole_pages(self.block_bytes)

    def pack(self, buffer: memoryview, name: bytes, content: memoryview, sums: bytes) -> None:
        """Write all bytes of a content into a buffer of `content_bytes`."""
        copy(content, to=buffer[self.header_bytes : self.header_bytes + self.block_bytes])
        buffer[self.header_bytes + self.block_bytes :] = bytes(self.content_bytes - self.header_bytes - self.block_bytes)
        buffer[: self.header_bytes] = self._header(name, sums, 0)
        buffer[: self.header_bytes] = self._header(name, sums, zlib.crc32(buffer))

    def unpack(self, buffer: memoryview, name: bytes) -> tuple[memoryview, memoryview]:
        """The content and the checksums in such bytes; faults are injected here. Raises BadFileError."""
        sums = bytes(buffer[_FIELDS.size : _FIELDS.size + self.sums_bytes])
        crc = _FIELDS.unpack_from(buffer)[-1]
        if bytes(buffer[: self.header_bytes]) != self._header(name, sums, crc):
            raise BadFileError("its header is of another block, model or version")
        if crc != zlib.crc32(buffer[self.header_bytes :], zlib.crc32(self._header(name, sums, 0))):
            raise BadFileError("its checksum differs")
        start = self.header_bytes
        return buffer[start : start + self.block_bytes], buffer[_FIELDS.size : _FIELDS.size + self.sums_bytes]

    def _header(self, name: bytes, sums: bytes, crc: int) -> bytes:
        sizes = (self.header_bytes, self.block_bytes, self.sums_bytes)
        fields = _FIELDS.pack(MAGIC, VERSION, *sizes, self.fingerprint, len(name), name, crc)
        return (fields + sums).ljust(self.header_bytes, b"\0")


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def open_file(path: str, flags: int) -> int:
    """Open a file, past the cache of the system where its file system allows that. Raises OSError."""
    try:
        return os.open(path, flags | _OPEN_FLAGS | _DIRECT, 0o600)
    except OSError as error:
        if not _DIRECT or error.errno != errno.EINVAL:
            raise
    return os.open(path, flags & ~os.O_EXCL | _OPEN_FLAGS, 0o600)  # the first call may have made it


def check_file(descriptor: int, file_bytes: int) -> os.stat_result:
    """Raise BadFileError unless an open file is a regular one of this size that no other user owns."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise BadFileError("it is no regular file")
    if status.st_uid not in (0, os.geteuid()):
        raise BadFileError(f"it belongs to user {status.st_uid}")
    if status.st_size != file_bytes:
        raise BadFileError(f"it has {status.st_size} bytes instead of {file_bytes}")
    return status


def read_all(descriptor: int, buffer: memoryview, start: int) -> None:
    """Fill a buffer from so many bytes behind the beginning of a file. Raises OSError, BadFileError if it is shorter."""
    done = 0
    while done < len(buffer):
        if not (count := os.preadv(descriptor, [buffer[done:]], start + done)):
            raise BadFileError(f"it ends after {start + done} bytes")
        done += count


def write_all(descriptor: int, buffer: memoryview) -> None:
    """Write a buffer to the beginning of a file; faults are injected here. Raises OSError."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(descriptor, buffer[done:], done)
