import os
import socket
import tracemalloc

import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.files import MAX_JSON_DEPTH, read_bounded, read_json

SIZE = 2**18


def test_reads_files_up_to_the_limit(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "link", 5) == b"12345"
    with pytest.raises(ConfigError, match=r"link: it has 5 bytes, at most 4 are read of such a file"):
        read_bounded(tmp_path / "link", 4)
    with pytest.raises(ModelLoadError, match="cannot read /proc/self/stat: it has .* at most 9"):
        read_bounded("/proc/self/stat", 9, ModelLoadError)  # its size is 0 until it is read


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**40)


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(str(path))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "it is a FIFO, must be a regular file"),
        (os.mkdir, "it is a directory, must be"),
        (a_socket, "No such device or address"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, must be"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: None, "No such file"),
        (sparse, "it has 1099511627776 bytes, at most 1000000 are read"),
    ],
    ids=["FIFO", "directory", "socket", "device", "loop", "nothing", "sparse"],
)
@pytest.mark.timeout(10)
def test_what_is_no_file_of_a_usual_size_is_refused_at_once(tmp_path, make, told):
    make(tmp_path / "a")
    with pytest.raises(ConfigError, match=f"cannot read {tmp_path / 'a'}: {told}"):
        read_bounded(tmp_path / "a", 10**6)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH, ""),
        (b'["' + b"[" * 100 + b'\\"[[{"]', ""),
        (b"[" * (MAX_JSON_DEPTH + 1) + b"]" * (MAX_JSON_DEPTH + 1), "nests deeper than 64 levels"),
        (b'{"":' * (SIZE // 4), "nests deeper than 64 levels"),
        (b"[" + b"1," * (SIZE // 16) + b"1]", "more than 16384 values"),
        (b"[" + b"{}," * (SIZE // 8) + b"{}]", "more than 16384 values"),
        (b'["' + b'\\"' * (SIZE // 2 - 4), "is not JSON"),
        (b"[" + b'"\\' * (SIZE // 2 - 4), "is not JSON"),
        (b"[" + b"1" * 10**5 + b"]", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"{" + b"]" * (SIZE - 2), "is not JSON"),
    ],
)
def test_json_is_read_within_limits(tmp_path, text, told):
    (tmp_path / "a.json").write_bytes(text)
    if not told:
        assert isinstance(read_json(tmp_path / "a.json"), list)
        return
    tracemalloc.start()
    with pytest.raises(ModelLoadError, match=f"{tmp_path / 'a.json'}.*{told}"):
        read_json(tmp_path / "a.json", SIZE, ModelLoadError)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * SIZE
