"""Bytes that loading reads, sends and holds on the host, however many devices there are."""

import collections
import functools
import itertools
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.build import build_model
from jaxllm.layers.parameters import axes_of, parameters
from jaxllm.loaders import safetensors
from jaxllm.loaders.dummy import dummy_weights
from jaxllm.loaders.layout import expand
from jaxllm.loaders.load import load_checkpoint
from jaxllm.loaders.reader import Files, Reader
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from scripts.saving import save_safetensors
from tests.helpers import goldens
from tests.helpers.slow import slow_except
from tests.quantization.test_checkpoints import DYNAMIC, per_block, per_channel, write

SHAPES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1501,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "attention_bias": True,
}
SLACK_BYTES = 300_000
"""Memory that Python and JAX hold in addition."""
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint of 9 MB whose vocabulary no number of devices divides, and with fewer KV heads than four."""
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(SHAPES))
    config = load_model_config(made)
    save_safetensors(config, dummy_weights(config, build_model(config), make_mesh(1), seed=0), made, SHAPES)
    return made


def load(directory, size, **options):
    config = load_model_config(directory, **options).for_tensor_parallel(size)
    return load_checkpoint(config, build_model(config), directory, mesh=make_mesh(size), transform_on_device=True)


@pytest.fixture
def count(monkeypatch):
    """Load, and return what was read of each tensor, sent to each device, and the most in transit at once."""

    def run(directory, size):
        read, sent = collections.Counter(), collections.Counter()
        on_its_way, most = 0, 0
        read_part, put, wait = Files.plain, jax.device_put, jax.block_until_ready

        def counting_read(self, tensor, index):
            part = read_part(self, tensor, index)
            read[tensor.name] += part.nbytes
            return part

        def counting_put(array, place):
            nonlocal on_its_way, most
            for device in [place] if isinstance(place, jax.Device) else place.device_set:
                sent[device] += array.nbytes
            on_its_way += array.nbytes
            most = max(most, on_its_way)
            return put(array, place)

        def counting_wait(arrays):
            nonlocal on_its_way
            on_its_way = 0
            return wait(arrays)

        with monkeypatch.context() as patch:
            patch.setattr(Files, "plain", counting_read)
            patch.setattr(jax, "device_put", counting_put)
            patch.setattr(jax, "block_until_ready", counting_wait)
            state = load(directory, size)
        return state, read, sent, most

    return run


@pytest.mark.parametrize("size", SIZES)
def test_each_byte_is_read_once_and_goes_to_the_device_that_keeps_it(directory, count, size):
    state, read, sent, most = count(directory, size)
    entries = safetensors.Checkpoint(directory).entries
    stored = {name: entry.num_bytes for name, entry in entries.items()}
    for name, num_bytes in stored.items():
        # Four devices hold two KV heads twice; the last of the vocabulary's slices is filled up with zeros.
        copies = size / 2 if size > 2 and ".k_proj" in name or size > 2 and ".v_proj" in name else 1
        padding = (
            -entries[name].shape[0] % (8 * size) * 256 * 4 if name.startswith(("lm_head", "model.embed")) and size > 1 else 0
        )
        assert read[name] == num_bytes * copies + padding, name
    kept = collections.Counter()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            kept[shard.device] += shard.data.nbytes
    assert sent == kept
    assert most <= max(stored.values()) + 8 * size * 256 * 4


@pytest.mark.parametrize("size", SIZES)
def test_the_host_holds_no_more_than_the_largest_tensor(directory, size):
    load(directory, size)  # compiles
    tracemalloc.start()
    load(directory, size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest = max(entry.num_bytes for entry in safetensors.Checkpoint(directory).entries.values())
    assert peak < largest + SLACK_BYTES


def fp8_with_blocks(directory):
    return write(
        directory, {"quant_method": "fp8", "weight_block_size": [24, 24]}, functools.partial(per_block, size=24), golden=NAME
    )


NAME = "llama_mqa"
CHECKPOINTS = {
    "plain": lambda directory: goldens.FOLDER / NAME,
    "biases": lambda directory: goldens.FOLDER / "llama_bias",
    "a scale per output": lambda directory: write(directory, DYNAMIC, per_channel, golden=NAME),
    "a scale per block": fp8_with_blocks,
}


@pytest.mark.parametrize(
    ("kind", "quantization", "size"),
    slow_except(
        [("plain", None, 2), ("biases", "fp8", 2), ("a scale per output", None, 2), ("a scale per block", "fp8", 2)],
        [(kind, quantization, size) for kind in CHECKPOINTS for quantization, size in ((None, 2), ("fp8", 2))]
        + [*zip(CHECKPOINTS, itertools.cycle((None, "fp8")), itertools.repeat(4))],
    ),
)
@pytest.mark.slow
def test_slices_are_those_of_the_whole(tmp_path, kind, quantization, size):
    """With copied KV heads, a padded vocabulary, and blocks of scales that no device's slice begins with."""
    directory = CHECKPOINTS[kind](tmp_path)
    one, many = (dict(parameters(load(directory, n, quantization=quantization))) for n in (1, size))
    for path, variable in many.items():
        whole = np.asarray(one[path][...], np.float32)
        expected = expand(jnp.asarray(whole), axes_of(variable), variable.shape)
        np.testing.assert_array_equal(np.asarray(variable[...], np.float32), expected, err_msg=str(path))


def test_what_was_loaded_before_an_error_is_given_back(directory, monkeypatch):
    made = []

    def fail_later(*args):
        if len(made) == 5:
            raise OSError("the disk is gone")
        made.append(read(*args))
        return made[-1]

    read = Reader.array
    monkeypatch.setattr(Reader, "array", fail_later)
    with pytest.raises(OSError, match="disk is gone"):
        load(directory, 2)
    assert all(array.is_deleted() for array in made) and len(made) == 5
