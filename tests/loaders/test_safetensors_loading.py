import json
import shutil
import struct

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import axes_of, parameters
from jaxllm.loaders.load import load_checkpoint, load_weights
from jaxllm.loaders.safetensors import Checkpoint
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.axes import sharding
from jaxllm.parallel.mesh import make_mesh
from scripts.saving import write_safetensors
from tests.helpers import goldens
from tests.helpers.slow import slow_except


@pytest.fixture
def directory(tmp_path):
    """A copy of a checkpoint, to be damaged."""
    return shutil.copytree(goldens.FOLDER / "llama_gqa", tmp_path / "model")


def load(directory, size=1, **options):
    config = load_model_config(directory).for_tensor_parallel(size)
    return load_checkpoint(config, build_model(config), directory, mesh=make_mesh(size), **options)


def rewrite(directory, change):
    """Change the tensors of a checkpoint: `change` gets a dict and edits it."""
    checkpoint = Checkpoint(directory)
    tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.entries}
    change(tensors)
    write_safetensors(directory / "model.safetensors", tensors)


def assert_equal(a: nnx.State, b: nnx.State):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("size", slow_except([2], [1, 2, 8]))
@pytest.mark.parametrize("name", ["llama_bias", "qwen2", "deepseek_v2"])
def test_transforming_on_the_devices_gives_what_the_host_gives(name, size):
    by_host, by_device = (load(goldens.FOLDER / name, size, transform_on_device=where) for where in (False, True))
    assert_equal(by_host, by_device)
    mesh = make_mesh(size)
    for state in (by_host, by_device):
        for path, variable in parameters(state):
            placed = variable[...].sharding
            assert placed.is_equivalent_to(sharding(mesh, axes_of(variable)), variable.ndim), path


def test_checkpoint_is_cast_to_the_type_of_the_config():
    directory = goldens.FOLDER / "llama_tied"
    config = load_model_config(directory, dtype="float16")
    state = load_weights(config, build_model(config), directory, load_format="auto", mesh=make_mesh())
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float16"}


def test_routers_that_checkpoints_have_in_float32_choose_experts_in_float32(tmp_path):
    """Their rows are equal in bfloat16."""
    directory = shutil.copytree(goldens.FOLDER / "mimo_v2_flash", tmp_path / "model")
    config = load_model_config(directory, dtype="bfloat16")
    found = []
    for order in (1, -1):

        def change(tensors, order=order):
            for name in tensors:
                if name.endswith("mlp.gate.weight"):
                    wide = tensors[name].astype(np.float32)[:1] * (1 + 1e-4 * np.arange(4, dtype=np.float32))[::order, None]
                    assert len(np.unique(wide.astype(ml_dtypes.bfloat16), axis=0)) == 1
                    tensors[name] = wide
                if name.endswith("correction_bias"):
                    tensors[name] = np.zeros_like(tensors[name])

        rewrite(directory, change)
        state = load_weights(config, build_model(config), directory, load_format="auto", mesh=make_mesh())
        found.append(goldens.logits(config, state, [1, 2, 3]))
    assert not np.array_equal(*found)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_progress_ends_at_the_size_of_the_weights(load_format):
    seen = []
    config = load_model_config(goldens.FOLDER / "llama_gqa")
    load_weights(
        config,
        build_model(config),
        goldens.FOLDER / "llama_gqa",
        load_format=load_format,
        mesh=make_mesh(),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_sharded_checkpoint_equals_the_single_file(directory, tmp_path):
    sharded = shutil.copytree(directory, tmp_path / "sharded")
    checkpoint = Checkpoint(directory)
    names = sorted(checkpoint.entries)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        write_safetensors(sharded / file, {name: checkpoint.tensor(name) for name in part})
    (sharded / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(load(directory), load(sharded))
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="lacks 1 of the 2 files.*model-00002-of-00002.safetensors"):
        load(sharded)


@pytest.mark.parametrize(
    ("layers", "is_needed"),
    [
        (None, lambda name: name != "lm_head.weight"),
        (range(1), lambda name: "layers.0." in name or "embed" in name),
        (range(1, 2), lambda name: "layers.1." in name or name == "model.norm.weight"),
    ],
    ids=["all", "first stage", "last stage"],
)
def test_only_tensors_that_are_needed_are_touched(directory, monkeypatch, layers, is_needed):
    checkpoint = Checkpoint(directory)
    names = sorted(checkpoint.entries)
    for name in names:
        write_safetensors(directory / f"{name}.safetensors", {name: checkpoint.tensor(name)})
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {name: f"{name}.safetensors" for name in names}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    mapped = []
    memmap = np.memmap
    monkeypatch.setattr(np, "memmap", lambda file, **options: mapped.append(file.name) or memmap(file, **options))
    config = load_model_config(directory, runner="pooling")
    load_weights(config, build_model(config, layers), directory, load_format="auto", mesh=make_mesh())
    assert sorted(mapped) == [f"{name}.safetensors" for name in names if is_needed(name)]


def test_all_misfits_come_in_one_error(directory):
    def change(tensors):
        tensors["model.layers.0.mlp.extra_proj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
        tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
        del tensors["lm_head.weight"]

    rewrite(directory, change)
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    message = str(caught.value)
    assert "2 missing: lm_head.weight, model.layers.0.mlp.up_proj.weight" in message
    assert "2 unused: model.layers.0.mlp.extra_proj.weight, model.layers.2.mlp.up_proj.weight" in message
    assert "1 of the wrong shape: model.norm.weight is [63], must be [64]" in message


def test_many_misfits_are_cut_short(directory):
    with pytest.raises(ModelLoadError, match="and 17 more"):
        config = load_model_config(directory, overrides={"num_hidden_layers": 5})
        load_checkpoint(config, build_model(config), directory, mesh=make_mesh())


def test_rotary_buffers_and_a_tied_head_may_be_there(tmp_path):
    directory = shutil.copytree(goldens.FOLDER / "llama_tied", tmp_path / "model")

    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    expected = load(directory)
    rewrite(directory, change)
    assert_equal(load(directory), expected)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """The golden's config says that there is one, as that of DeepSeek-V3 does."""
    directory = shutil.copytree(goldens.FOLDER / "deepseek_v3", tmp_path / "model")
    expected = load(directory)

    def change(tensors):
        tensors["model.layers.3.eh_proj.weight"] = np.ones((4, 8), np.float32)

    rewrite(directory, change)
    assert_equal(load(directory), expected)


def test_integer_weights_are_refused(directory):
    file = directory / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = "I16"
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(ModelLoadError, match="1 of an unsupported type: model.norm.weight is I16"):
        load(directory)


def with_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(4)


def entry(name: bytes = b"a", dtype: bytes = b"F32", shape: bytes = b"1") -> bytes:
    return b'{"%b":{"dtype":"%b","shape":[%b],"data_offsets":[0,4]}}' % (name, dtype, shape)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:-1], "ends at byte .*, the file at"),
        (lambda data: data[:100], "its header should have .* bytes, 92 follow"),
        (lambda data: data[:5], "it has 5 bytes"),
        (lambda data: b"", "it has 0 bytes"),
        (lambda data: b"\xff" * 8 + data[8:], "its header should have 18446744073709551615 bytes"),
        (lambda data: data[:8] + b"\x00" + data[9:], "its header is not a JSON object of tensors: JSON is malformed"),
        (lambda data: data.replace(b'"shape":[64]', b'"shape":[65]', 1), "the header entry of"),
        (lambda data: data.replace(b'"shape":[64]', b'"shape":"64"', 1), "the header entry of"),
        (lambda data: struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (lambda data: with_header(b"{" + b" " * 2**24), "a header of 16777217 bytes, at most 16777216 are read"),
        (lambda data: with_header(entry(shape=b"9223372036854775807," * 50_000 + b"1")), "1000048 bytes, at most 4096"),
        (lambda data: with_header(entry(shape=b"1," * 64 + b"1")), "the header entry of a .*Expected `array` of length <= 64"),
        (lambda data: with_header(entry(dtype=b"F4", shape=b"9999999")), "the header entry of a"),
        (lambda data: with_header(entry(name=b"a" * 513)), "Expected `str` of length <= 512"),
        (lambda data: with_header(b"{%b,%b}" % (entry()[1:-1], entry(b"b")[1:-1])), "a and b share bytes"),
        (lambda data: with_header(b'{"a":' * 10**5), "truncated or corrupt: maximum recursion depth"),
        (
            lambda data: with_header(b"{%b}" % b",".join(b'"%d":1' % i for i in range(2**19 + 1))),
            "its header has 524289 colons, at most 524288",
        ),
        (lambda data: with_header(entry() + b"x"), "trailing characters .byte 55"),
    ],
    ids=[
        *("data cut", "header cut", "5 bytes", "empty", "length", "not json", "offsets", "shape", "list", "long header"),
        *("million dimensions", "65 dimensions", "unknown type", "name", "shared", "deep", "members", "more"),
    ],
)
def test_damaged_file_is_named(directory, damage, told):
    file = directory / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelLoadError, match=told) as caught:
        load(directory)
    assert str(file) in str(caught.value)


def test_directory_without_weights(directory):
    (directory / "model.safetensors").rename(directory / "model.pth")
    with pytest.raises(ModelLoadError, match=r"no weights.*\*\.safetensors, .*it has model.pth, which is none of these"):
        load(directory)


def test_broken_index(directory):
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="is not an index"):
        load(directory)
    for name in "/etc/passwd", "a/../../x":
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(ModelLoadError, match=f"names '{name}', which is outside of its directory"):
            load(directory)
    for text in b'{"weight_map":' * 10**5, b'{"weight_map": {"a": 1}}', b'{"weight_map": {' + b'"a":"a",' * 1_000_001:
        (directory / "model.safetensors.index.json").write_bytes(text)
        with pytest.raises(ModelLoadError, match="is not an index"):
            load(directory)


def test_headers_with_unusual_but_valid_json(tmp_path):
    """White space, escapes, braces within strings, and members in any order."""
    text = b""" { "\\u00e9\\"}" : {"shape" : [ 1 ] ,\n"data_offsets": [0, 4], "dtype":"F32"} ,
        "__metadata__": {"format": "pt", "x": "{\\"a\\": [{}]}"}, "empty":{"dtype":"F32","shape":[0, 7],"data_offsets":[0,0]} }  """
    (tmp_path / "model.safetensors").write_bytes(with_header(text))
    assert {name: entry.shape for name, entry in Checkpoint(tmp_path).entries.items()} == {'é"}': (1,), "empty": (0, 7)}
    (tmp_path / "model.safetensors").write_bytes(with_header(b" { } "))
    assert not Checkpoint(tmp_path).entries


def test_written_files_can_be_read_by_the_safetensors_library(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(3, np.float16),
        "c": np.ones((2, 1), ml_dtypes.bfloat16),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    read = library.load_file(tmp_path / "model.safetensors")
    for name, array in tensors.items():
        np.testing.assert_array_equal(np.asarray(read[name], np.float32), np.asarray(array, np.float32))
        np.testing.assert_array_equal(np.asarray(Checkpoint(tmp_path).tensor(name), np.float32), np.asarray(array, np.float32))


def test_a_bare_decoder_is_loaded_under_either_name(tmp_path):
    """Embedding models are saved without a head and, often, without the prefix of a causal model's weights."""
    whole = shutil.copytree(goldens.FOLDER / "llama_gqa", tmp_path / "whole")
    without_head = shutil.copytree(whole, tmp_path / "without_head")
    rewrite(without_head, lambda tensors: tensors.pop("lm_head.weight"))
    bare = shutil.copytree(without_head, tmp_path / "bare")

    def rename(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(bare, rename)
    with pytest.raises(ModelLoadError, match="1 missing: lm_head.weight"):
        load(bare)
    states = []
    for directory in (whole, without_head, bare):
        config = load_model_config(directory, runner="pooling")
        states.append(load_checkpoint(config, build_model(config), directory, mesh=make_mesh()))
        assert not any(path[0] == "head" for path, _ in parameters(states[-1]))
    for state in states[1:]:
        assert_equal(states[0], state)
