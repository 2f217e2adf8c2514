"""GGUF files as they are opened, against the package gguf's own reader."""

import struct
import time

import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.gguf_files.reading import GgufFile

gguf = pytest.importorskip("gguf")


def write(file, *, num_tokens=3, alignment=None):
    writer = gguf.GGUFWriter(file, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"llama.unsigned{bits}", 2**bits - 1)
        getattr(writer, f"add_int{bits}")(f"llama.signed{bits}", -(2 ** (bits - 1)))
    writer.add_float32("llama.epsilon", 1e-5)
    writer.add_float64("llama.precise", 0.1)
    writer.add_bool("llama.yes", True)
    writer.add_array("llama.nested", [[1, 2], [3]])
    writer.add_token_list([f"tökén {i}" for i in range(num_tokens)])
    writer.add_token_scores([-0.5 * i for i in range(num_tokens)])
    writer.add_token_types([1] * num_tokens)
    writer.add_tensor("a.weight", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b.weight", np.ones((4, 3, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("alignment", [None, 64])
def test_values_and_places_are_those_of_the_package(tmp_path, alignment):
    file = write(tmp_path / "model.gguf", alignment=alignment)
    found, reader = GgufFile([file]), gguf.GGUFReader(file)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert expected.pop("llama.epsilon") != 1e-5 and expected.pop("llama.nested") == [1, 2, 3]
    assert found.metadata == {**expected, "llama.epsilon": 1e-5, "llama.nested": [[1, 2], [3]]}
    for tensor in reader.tensors:
        stored = found.tensors[tensor.name]
        assert (stored.type, stored.start, stored.num_bytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        assert stored.shape == tuple(tensor.shape[::-1])


def test_a_large_vocabulary_is_read_at_once(tmp_path):
    file = write(tmp_path / "model.gguf", num_tokens=5_000)
    begin = time.process_time()
    found = GgufFile([file])
    own, begin = time.process_time() - begin, time.process_time()
    gguf.GGUFReader(file)
    assert own < (time.process_time() - begin) / 4
    assert found.metadata["tokenizer.ggml.tokens"][-1] == "tökén 4999"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: b"", "cannot mmap an empty file"),
        (lambda whole: b"GGML" + whole[4:], "does not begin with GGUF"),
        (lambda whole: whole[:4] + b"\0\0\0\3" + whole[8:], "its version is 0x3000000, supported: 2 and 3"),
        (lambda whole: whole[:8] + b"\xff" * 16 + whole[24:], "it should have 18446744073709551615 values, 1576 bytes follow"),
        (lambda whole: whole[:-100], "bytes, its tensors end at"),
        (lambda whole: whole[:300], "ends at byte|requires a buffer"),
    ],
)
def test_broken_files_are_told(tmp_path, change, message):
    file = write(tmp_path / "model.gguf")
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(
        ModelLoadError, match=f"is not a GGUF file, truncated or corrupt .*({message}).*download or copy it again"
    ):
        GgufFile([file])


def text(value):
    return struct.pack("<Q", len(value)) + value


def array(code, count, content=b""):
    return struct.pack("<IIQ", 9, code, count) + content


def tensor(shape, name=b"t", dimensions=None, code=0):
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        text(name) + struct.pack("<I", len(shape) if dimensions is None else dimensions) + sizes + struct.pack("<IQ", code, 0)
    )


@pytest.mark.parametrize(
    ("values", "tensors", "message"),
    [
        ([array(9, 1) + array(9, 1)[4:] * 100_000], [], "arrays nest deeper than 4"),
        ([array(8, 2**40, bytes(64))], [], "should have 1099511627776 values in an array, 128 bytes follow"),
        ([array(0, 2**63, bytes(64))], [], "should have 9223372036854775808 values in an array, 128 bytes follow"),
        ([array(0, 4 * 2**20, bytes(4 * 2**20))], [], "4194304 values in an array, at most 3145728 are read"),
        ([array(9, 500_000, array(0, 0)[4:] * 500_000)], [], "500000 values in an array, at most 393216 are read"),
        ([struct.pack("<IQ", 8, 2**63)], [], "a text ends at byte"),
        ([struct.pack("<II", 4, 1)] * 2, [], "it has general.alignment twice"),
        *(
            ([struct.pack("<II", 4, alignment)], [], f"general.alignment is {alignment}, must be a power of 2 up to 65536")
            for alignment in (0, 24, 2**32 - 1)
        ),
        ([struct.pack("<If", 6, 32.0)], [], "general.alignment is 32.0"),
        ([], [tensor((2**63 - 1,) * 1_000, dimensions=1_000)], "t has 1000 dimensions, must have 1 to 4"),
        ([], [tensor(())], "t has 0 dimensions"),
        ([], [tensor((0, 4))], "t has the shape .4, 0., must have sizes of at least 1"),
        ([], [tensor((33,), code=8)], "rows of whole blocks of 32 values"),
        ([], [tensor((2**63,) * 4)], "bytes, its tensors end at"),
        ([], [tensor((1,)), tensor((1,))], "it has t twice"),
    ],
)
def test_hostile_files_are_refused_before_anything_is_allocated(tmp_path, values, tensors, message):
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    body = b"".join(text(b"general.alignment") + value for value in values) + b"".join(tensors)
    file = tmp_path / "model.gguf"
    file.write_bytes(head + body + bytes(64))
    begin = time.process_time()
    with pytest.raises(ModelLoadError, match=message) as raised:
        GgufFile([file])
    assert time.process_time() - begin < 0.5 and len(str(raised.value)) < 500
