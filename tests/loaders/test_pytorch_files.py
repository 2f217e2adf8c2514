import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import types
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.loaders import pytorch, safetensors
from jaxllm.loaders.load import load_checkpoint
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from tests.helpers import goldens

STORAGES = {"float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long"}


class View:
    """A tensor as PyTorch pickles it: a view of a storage."""

    def __init__(self, values, offset=0, shape=None, strides=None):
        self.values, self.offset = values, offset
        self.shape = values.shape if shape is None else shape
        self.strides = tuple(n // values.itemsize for n in values.strides) if strides is None else strides


@pytest.fixture
def save(monkeypatch):
    """`torch.save` without PyTorch: the names that a file has are those of stand-ins."""

    def stand_in(module, name):
        found = sys.modules.get(module) or types.ModuleType(module)
        monkeypatch.setitem(sys.modules, module, found)
        named = type(name, (), {"__module__": module})
        monkeypatch.setattr(found, name, named, raising=False)
        return named

    kinds = {dtype: stand_in("torch", f"{name}Storage") for dtype, name in STORAGES.items()}
    rebuild = stand_in("torch._utils", "_rebuild_tensor_v2")

    def save(file, tensors, byteorder=b"little", compression=zipfile.ZIP_STORED):
        storages = []

        class Pickler(pickle.Pickler):
            def persistent_id(self, value):
                if not isinstance(value, np.ndarray):
                    return None
                keys = [i for i, other in enumerate(storages) if other is value] or [len(storages)]
                storages[keys[0] :] = storages[keys[0] :] or [value]
                return ("storage", kinds[str(value.dtype)], str(keys[0]), "cpu", value.size)

            def reducer_override(self, value):
                if not isinstance(value, View):
                    return NotImplemented
                return rebuild, (value.values, value.offset, value.shape, value.strides, False, {})

        data = io.BytesIO()
        Pickler(data, 2).dump(tensors)
        with zipfile.ZipFile(file, "w", compression) as archive:
            archive.writestr("model/data.pkl", data.getvalue())
            archive.writestr("model/byteorder", byteorder)
            for key, values in enumerate(storages):
                archive.writestr(f"model/data/{key}", values.tobytes())

    return save


def load(directory, size=1):
    config = load_model_config(directory).for_tensor_parallel(size)
    return load_checkpoint(config, build_model(config), directory, mesh=make_mesh(size))


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_in_parts_equals_safetensors(tmp_path, save, size):
    source = goldens.FOLDER / "llama_bias"
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    checkpoint = safetensors.Checkpoint(source)
    tensors = {name: View(np.asarray(checkpoint.tensor(name))) for name in checkpoint.entries}
    files = {"pytorch_model-00001-of-00002.bin": list(tensors)[::2], "pytorch_model-00002-of-00002.bin": list(tensors)[1::2]}
    for file, names in files.items():
        save(directory / file, {name: tensors[name] for name in names})
    expected = load(source, size)
    assert_equal(load(directory, size), expected)  # by the names of the files
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert_equal(load(directory, size), expected)
    (directory / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelLoadError, match="lacks 1 of the 2 files in pytorch_model.bin.index.json"):
        load(directory)


def test_views_of_storages(tmp_path, save):
    values = np.arange(24, dtype=np.float32)
    tensors = {
        "whole": View(values.reshape(4, 6)),
        "transposed": View(values, 0, (6, 4), (1, 6)),
        "within": View(values, 5, (2, 3), (6, 2)),
        "repeated": View(values, 3, (2, 2), (0, 1)),
        "scalar": View(values, 7, (), ()),
        "empty": View(values, 0, (0, 3), (3, 1)),
        "narrow": View(np.arange(3, dtype=ml_dtypes.bfloat16)),
        "integers": View(np.arange(3)),
    }
    save(tmp_path / "pytorch_model.bin", tensors)
    checkpoint = pytorch.Checkpoint(tmp_path)
    assert checkpoint.entries["integers"].dtype == "I64"
    for name, view in tensors.items():
        if name != "integers":
            strides = tuple(n * view.values.itemsize for n in view.strides)
            expected = np.lib.stride_tricks.as_strided(view.values.ravel()[view.offset :], view.shape, strides)
            np.testing.assert_array_equal(checkpoint.tensor(name), expected)


class Runs:
    """A file that runs a command where it is unpickled in full."""

    def __reduce__(self):
        return os.system, ("touch ran",)


class Finds:
    def __reduce__(self):
        return getattr, ({}, "clear")


@pytest.mark.parametrize(("value", "named"), [(Runs(), r"posix\.system"), (Finds(), r"(__builtin__|builtins)\.getattr")])
def test_nothing_that_a_file_names_is_run(tmp_path, save, monkeypatch, value, named):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "pytorch_model.bin", {"weight": value})
    with pytest.raises(ModelLoadError, match=f"{named}, which weights do not need and which is not run"):
        pytorch.Checkpoint(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_files_that_cannot_be_read_are_named(tmp_path, save):
    file = tmp_path / "pytorch_model.bin"

    def told(message):
        with pytest.raises(ModelLoadError, match=message) as caught:
            pytorch.Checkpoint(tmp_path)
        assert str(file) in str(caught.value)

    weight = View(np.arange(6, dtype=np.float32))
    file.write_bytes(pickle.dumps({"weight": 1}))
    told("truncated, or written by a PyTorch before 1.6.*save it with safetensors")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    told("Git LFS pointer")
    save(file, {"weight": weight})
    file.write_bytes(file.read_bytes()[:-30])
    told("truncated")
    save(file, {"weight": weight}, byteorder=b"big")
    told("big-endian")
    save(file, {"weight": weight}, compression=zipfile.ZIP_DEFLATED)
    told("is compressed")
    save(file, {"weight": View(weight.values, 4, (3,), (1,))})
    told("weight ends at byte 28 of its storage, which has 24")
    save(file, {"weight": View(weight.values, -1, (3,), (1,))})
    told("negative")
    save(file, {"step": 3})
    told("'step' of type int, must hold tensors alone")
    save(file, [weight])
    told("holds a list, must hold weights by name")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "x")
    told("0 files data.pkl")


def archive(file, pickled, compression=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickled, compression)
        for name, content in members.items():
            archive.writestr(f"a/{name}", content)


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000NNtQ"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOSTILE = {
    "a key of nested tuples": (b"})" + b"\x85" * 100_000 + b"K\x01s.", "or tuples in tuples in tuples"),
    "a key of a tuple": (b"})K\x01s.", "a key of type tuple, must be a string"),
    "a long tuple": (b"(" + b"N" * 65 + b"t.", "a tuple of more than 64 values"),
    "a tuple of too few values": (b"N\x87.", "broken"),
    "an index of the memo": (b"}r\xff\xff\xff\x7f.", ""),
    "a large memo": (b"".join(b"Nr" + struct.pack("<I", i << 8) for i in range(500_001)), "values"),
    "a long string": (b"}X" + struct.pack("<I", 2**20) + b"a" * 2**20 + b"K\x01s.", "text of 1048576 bytes, at most 512"),
    "a string beyond the end": (b"}X\xff\xff\xff\xffab", "expected 4294967295 bytes"),
    "a long integer": (b"}\x8a\xff" + b"\x01" * 255, "integer of 2033 bits, at most 64"),
    "an integer of four bytes' length": (b"}\x8b\x01\x00\x00\x00\x01s.", "operation LONG4 at byte 1"),
    "an integer beyond the end": (b"}\x8b\xff\xff\xff\x7f", "not enough data"),
    "an operation that no pickle has": (b"}\xff.", "unknown"),
    "a text that is no Unicode": (b"}X\x03\x00\x00\x00\xed\xa0\x80K\x01s.", "surrogates not allowed"),
    "an ordered dictionary of values": (b"ccollections\nOrderedDict\n]\x85R.", "broken"),
    "many values": (b"N" * 200_001 + b".", "more than 200000 values on its stack"),
    "many marks": (b"(" * 200_001 + b".", "more than 200000 values on its stack"),
    "an empty stack": (b".", "broken"),
    "an unknown value": (b"h\x07.", "broken"),
    "no end": (b"}", "exhausted"),
    "a call of what is no function": (b"ctorch\nFloatStorage\n)R.", "broken"),
    "a call of a tensor's function": (REBUILD + b")R.", "broken"),
    "attributes of a function": (REBUILD + b"}b.", "broken"),
    "a storage in place of a tensor": (b"}X\x01\x00\x00\x00a" + STORAGE + b"s.", "'a' of type Storage, must hold tensors"),
    "many dimensions": (REBUILD + b"(" + STORAGE + b"K\x00(" + b"K\x01" * 65 + b"t)tR.", "a tuple of more than 64 values"),
    "dimensions that are texts": (REBUILD + b"(" + STORAGE + b"K\x00X\x00\x00\x00\x00\x85)tR.", "no tuple of whole numbers"),
    "dimensions without strides": (REBUILD + b"(" + STORAGE + b"K\x00K\x01\x85)tR.", "1 dimensions and 0 strides"),
    "no storage": (b"}X\x01\x00\x00\x00a" + REBUILD + b"(" + STORAGE + b"K\x00))tRs.", "it lacks a/data/0, the values of a"),
    "a dictionary within itself": (b"}q\x00X\x01\x00\x00\x00ah\x00s.", "'a' of type dict, must hold tensors"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_hostile_pickles_are_refused_within_limits(tmp_path, how):
    pickled, message = HOSTILE[how]
    archive(tmp_path / "pytorch_model.bin", pickled)
    if not message:
        assert not pytorch.Checkpoint(tmp_path).entries
        return
    with pytest.raises(ModelLoadError, match=message):
        pytorch.Checkpoint(tmp_path)


def test_no_file_ends_the_process_or_fills_memory(tmp_path):
    """In a separate process, which an overflow of C's stack would end, with 128 MB beyond what imports take."""
    nested = b"})" + b"\x85" * 400_000 + b"K\x01s."
    for i, pickled in enumerate((nested, HOSTILE["an index of the memo"][0], HOSTILE["a large memo"][0], b"}" * 2**24)):
        (tmp_path / str(i)).mkdir()
        archive(tmp_path / str(i) / "pytorch_model.bin", pickled)
    program = """
import resource, sys, pathlib
from jaxllm.errors import ModelLoadError
from jaxllm.loaders import pytorch
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**27,) * 2)
for directory in pathlib.Path(sys.argv[1]).iterdir():
    try:
        pytorch.Checkpoint(directory)
    except ModelLoadError:
        pass
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-500:]


def test_hostile_archives_are_refused(tmp_path):
    file = tmp_path / "pytorch_model.bin"

    def told(message):
        with pytest.raises(ModelLoadError, match=message):
            pytorch.Checkpoint(tmp_path)

    archive(file, b"}." + b"." * 2**24)
    told("a/data.pkl has 16777218 bytes, at most 16777216 are read")
    archive(file, b"}." + b"." * 2**20, zipfile.ZIP_DEFLATED)
    told("a/data.pkl is compressed")
    archive(file, b"}.", byteorder=b"little" * 9)
    told("a/byteorder has 54 bytes, at most 16")
    with file.open("wb") as stream:  # a list of members of a gigabyte
        stream.truncate(2**30)
        stream.seek(2**30)
        stream.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 9, 9, 2**30, 0, 0))
    told("the list of its members has 1073741824 bytes, at most 8388608")
    pickled = b"}X\x01\x00\x00\x00a" + REBUILD + b"(" + STORAGE + b"K\x00J\xff\xff\xff\x0f\x85K\x01\x85tRs."
    archive(file, pickled, **{"data/0": b"1234"})
    # The list says that the values go on for a gigabyte beyond the end of the file.
    data, beyond = file.read_bytes(), struct.pack("<II", 2**30, 2**30)
    file.write_bytes(data.replace(struct.pack("<II", 4, 4), beyond))
    told("a ends at byte 10737.*, the file at")


@pytest.mark.torch
def test_a_file_of_pytorch_itself(tmp_path):
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(3, 2)
    state = {**linear.state_dict(), "half": torch.arange(6.0).reshape(2, 3).T.to(torch.bfloat16), "p": linear.weight}
    torch.save(state, tmp_path / "pytorch_model.bin")
    checkpoint = pytorch.Checkpoint(tmp_path)
    for name, tensor in state.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).astype(np.float32), tensor.detach().float().numpy())
    torch.save(linear.state_dict(), tmp_path / "pytorch_model.bin")  # an OrderedDict with an attribute
    assert set(pytorch.Checkpoint(tmp_path).entries) == {"weight", "bias"}
