"""Weights in tiles: the same products as of weights as stored, on one device and several, however they were loaded."""

import dataclasses
import json
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxllm import LLM, SamplingParams
from jaxllm.engine import kernel_choice
from jaxllm.engine.kernel_choice import wants_tiles
from jaxllm.engine.kernel_shapes import shapes_of_tiles
from jaxllm.layers.build import build_model
from jaxllm.layers.linear import Linear
from jaxllm.layers.parameters import parameters, state_of, weights
from jaxllm.loaders.load import load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.axes import partition_spec
from jaxllm.parallel.mesh import TENSOR, make_mesh
from jaxllm.parallel.shards import ONE_DEVICE
from jaxllm.quantization.numbers import Scheme
from jaxllm.quantization.tiles import takes
from jaxllm.runner.weights import Weights
from pallas_kernels.checking.quantized_matmul import Shapes
from pallas_kernels.quantized_matmul import product as multiply
from scripts.saving import save_orbax
from tests.helpers import engines, goldens
from tests.helpers.quantized import PROMPT, answer, assert_answered, by_path, load, write
from tests.helpers.slow import slow_except
from tests.quantization.test_compressed_tensors import described, packed

GOLDEN = "qwen3"
"""64 wide, with 2 KV heads and 96 values between gate and down: no device has whole tiles."""


def of_floats(bits, form, strategy, group=None):
    scheme = {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group}
    group_0 = {"targets": ["Linear"], "weights": scheme, "input_activations": None}
    return described(form=form, ignore=["lm_head"]) | {"config_groups": {"group_0": group_0}}


CONFIGS = {
    "int4 with zeros": described(4, 16, False),
    "int8": described(8, None, True, "int-quantized"),
    "e4m3": of_floats(8, "float-quantized", "channel"),
    "nvfp4": of_floats(4, "nvfp4-pack-quantized", "tensor_group", 16),
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
GROUP_OF_NF4 = 64


def write_config(directory, given):
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((goldens.FOLDER / GOLDEN / "config.json").read_text())
    if given["quant_method"] == "bitsandbytes":
        config["intermediate_size"] = 2 * GROUP_OF_NF4
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": given}))
    return directory


def random_weights(directory, size):
    """(config, mesh, state) of weights as stored, with another scale, zero and factor for every group and output."""
    config, state = load(directory, tensor_parallel_size=size, load_format="dummy")
    rng, arrays = np.random.default_rng(0), {}
    for path, variable in parameters(state):
        array = variable[...]
        old, part = np.asarray(array), path[-1]
        if part == "zero":
            old = rng.integers(0, 16, old.shape, dtype=np.uint8)
        elif part in ("scale", "factor"):
            factors = np.exp2(rng.integers(-2, 3, old.shape))
            old = old + np.log2(factors).astype(np.uint8) if old.dtype == np.uint8 else (old * factors).astype(old.dtype)
        arrays[path] = jax.device_put(old, array.sharding)
    return config, make_mesh(size), state_of(build_model(config), arrays)


def in_tiles(config, mesh, state):
    """(config, state) of the same weights in tiles."""
    tiled, stored = config.in_tiles(), {path: variable[...] for path, variable in parameters(state)}
    model, arrays = build_model(tiled), {}
    for weight in weights(model):
        arrays |= weight.laid_out({part: stored[weight.path_of(part)] for part in weight.stored_parts}, mesh)
    made = state_of(model, arrays)
    Weights([model], mesh).flatten([made])  # checks shapes, types and places
    return tiled, made


def products(config, mesh, state):
    """By name, the products of the first block's linear layers: where devices split inputs, all parts of the sums."""
    model = nnx.merge(nnx.graphdef(build_model(config)), state)
    graphs, weights, inputs, specs, outs = {}, {}, {}, {}, {}
    for path, linear in nnx.iter_modules(model.blocks[0]):
        if isinstance(linear, Linear):
            name, n = ".".join(map(str, path)), linear.num_contracted
            graphs[name], weights[name] = nnx.split(linear)
            inputs[name] = np.random.default_rng(1).normal(size=(5, *linear.shape[:n])).astype(np.float32)
            specs[name] = PartitionSpec(None, *partition_spec(linear.axes[:n]))
            outs[name] = PartitionSpec(TENSOR if linear.is_split else None, *partition_spec(linear.axes[n:]))

    def compute(weights, inputs):
        multiply_ = partial(multiply, implementation="xla")
        return {name: nnx.merge(graphs[name], weights[name])(x, ONE_DEVICE, multiply_) for name, x in inputs.items()}

    in_specs = (jax.tree.map(lambda x: x.sharding.spec, weights), specs)
    run = jax.shard_map(compute, mesh=mesh, in_specs=in_specs, out_specs=outs, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(run)(weights, inputs))


CASES = [
    *(("int4 with zeros", size) for size in (1, 2, 4)),
    ("int8", 1),
    ("nvfp4", 4),
    ("fp8 blocks", 2),
    ("nf4", 1),
]
"""Products of all numbers: tests/pallas_kernels/test_quantized_matmul.py."""


@pytest.mark.parametrize(("name", "size"), slow_except([("int4 with zeros", 2)], CASES))
def test_products_are_those_of_weights_as_stored(tmp_path, name, size):
    config, mesh, state = random_weights(write_config(tmp_path, CONFIGS[name]), size)
    tiled, made = in_tiles(config, mesh, state)
    kinds = {name.split(".")[3] for name in by_path(made) if name.endswith(".words")}
    # Where devices split inputs, one may have a single group or a part of one.
    assert kinds >= {"qkv", "gate_up"} if size > 1 else kinds == {"qkv", "out", "gate_up", "down"}
    wanted, found = products(config, mesh, state), products(tiled, mesh, made)
    limit = 5e-3 if name == "nf4" else 2e-5  # of nf4, the table is rounded to bfloat16
    for name, y in wanted.items():
        np.testing.assert_allclose(found[name], y, atol=limit * np.abs(y).max(), err_msg=name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("int4"), described(4, 16, False), packed(4, 16, False), golden=GOLDEN)


def assert_same(a, b):
    a, b = by_path(a), by_path(b)
    assert a.keys() == b.keys() and any(name.endswith(".words") for name in a)
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_weights_are_laid_out_however_they_are_loaded(directory, tmp_path, size):
    config, mesh = load_model_config(directory), make_mesh(size)
    save_orbax(config, load(directory)[1], tmp_path)
    split = config.for_tensor_parallel(size)
    for source, load_format in ((directory, "auto"), (tmp_path, "orbax"), (directory, "dummy")):
        wanted = in_tiles(
            split,
            mesh,
            load(directory, tensor_parallel_size=size, load_format="auto" if source == tmp_path else load_format)[1],
        )
        tiled = split.in_tiles()
        found = load_weights(tiled, build_model(tiled), source, load_format=load_format, mesh=mesh)
        assert_same(found, wanted[1])


def test_files_never_have_tiles_or_lanes(directory):
    config = load_model_config(directory)
    tiled, in_lanes = config.in_tiles(), config.in_lanes()
    assert len({config, tiled, in_lanes}) == 3 and tiled.as_stored() == in_lanes.as_stored() == config
    assert not any(path[-1] == "words" for path, _ in parameters(build_model(tiled.as_stored())))


def test_weights_that_no_kernel_takes_stay_as_stored(tmp_path):
    """Of groups of 8, numbers without a decoder, and minimums."""
    assert not takes(Scheme("int4", 8), 64, 8) and takes(Scheme("int4", 16), 64, 4) and takes(Scheme("int4"), 72, 1)
    assert not any(takes(Scheme(number, 32), 64, 2) for number in ("uint4", "fp4", "iq4_nl"))
    assert not takes(Scheme("int8", 32, minimums=True), 64, 2) and not takes(Scheme("e2m1", 32, zeros=True), 64, 2)
    given = described(4, 8, True)
    config = load_model_config(write_config(tmp_path, given)).for_tensor_parallel(1)
    names = [[".".join(map(str, path)) for path, _ in parameters(build_model(each))] for each in (config, config.in_tiles())]
    assert names[0] == names[1]


def test_kernels_are_checked_in_the_shapes_of_a_device(directory):
    model = build_model(load_model_config(directory).for_tensor_parallel(2).in_tiles())
    options = {"scale_type": "bfloat16", "has_zeros": True, "dtype": "float32"}
    assert set(shapes_of_tiles([model], "float32")) == {
        Shapes("int4", 96, 64, 16, **options),  # queries, keys and values, and gate and up
        Shapes("int4", 64, 64, 16, **options),
        Shapes("int4", 64, 48, 16, **options),
    }
    assert shapes_of_tiles([build_model(load_model_config(directory))], "float32") == ()


def test_tiles_are_for_kernels(directory, monkeypatch):
    config = load_model_config(directory, dtype="bfloat16")

    def wants(wanted, dtype="bfloat16", on_gpu=True, is_checked=True):
        return wants_tiles(wanted, dataclasses.replace(config, dtype=dtype), on_gpu=on_gpu, is_checked=is_checked)

    assert not wants("auto", on_gpu=False) and not wants("xla", on_gpu=False) and wants("triton", "float32", on_gpu=False)
    monkeypatch.setattr("pallas_kernels._compat.has_mosaic", lambda: True)
    assert wants("triton") and not wants("xla") and not wants("triton", "float16")
    records: dict[str, bool] = {}
    """By op that a source was verified of, whether it is the present one."""
    monkeypatch.setattr(kernel_choice, "was_verified", lambda _, op: op in records)
    monkeypatch.setattr(kernel_choice, "is_verified", lambda _, op, **__: records.get(op, False))
    mixture = dataclasses.replace(load_model_config(goldens.FOLDER / "qwen3_moe"), dtype="bfloat16")

    def wants_experts(wanted, is_checked=True):
        return wants_tiles(wanted, mixture, on_gpu=True, is_checked=is_checked)

    assert not wants("auto") and not wants("triton", is_checked=False) and wants_experts("triton")
    for is_present in (False, True):
        records["quantized_matmul"] = is_present  # an earlier source is enough if this one is checked at the start
        assert wants("auto") and wants("auto", is_checked=False) is wants("triton", is_checked=False) is is_present
        assert not wants_experts("auto") and not wants_experts("auto", is_checked=False)
    for is_present in (False, True):
        records["grouped_matmul"] = is_present
        assert wants_experts("auto") and wants_experts("auto", is_checked=False) is is_present
    monkeypatch.setattr(kernel_choice, "is_verified", lambda *_, carried=True: carried)
    assert not wants_experts("auto", is_checked=False), "new cases of a record that was carried over did not run"
    monkeypatch.setattr("pallas_kernels._compat.has_mosaic", lambda: False)
    assert not wants("auto")


@pytest.mark.slow
def test_drafts_adapters_and_sleep(tmp_path):
    """A draft model in tiles too; weights come back from the host's memory and from the files. On a CPU that is asked for kernels,
    weights are in tiles."""
    golden = str(goldens.of_one_layer(GOLDEN, tmp_path / "layer"))
    directory = write(tmp_path / "int4", described(4, 16, False), packed(4, 16, False), golden=golden)
    drafts = {"method": "draft_model", "model": str(directory), "num_speculative_tokens": 1}
    options = {**engines.SMALL, "attention_implementation": "triton", "enable_lora": True, "speculative_config": drafts}
    model = load(directory)
    llm = LLM(str(directory), **options)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for level in (None, 1, 2):
        if level is not None:
            llm.sleep(level)
            llm.wake_up()
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        assert tokens == np.argmax(goldens.logits(*model, PROMPT + tokens)[len(PROMPT) - 1 : -1], -1).tolist()
    models = llm.llm_engine.core.runner.weights.shapes
    assert sum(shape.shape[-1] == 512 and shape.dtype == "int32" for shape in models) == 2 * 4
    llm.shutdown()


LAYERS = [("llama_mqa", 4), ("deepseek_v3", 2), ("qwen3_next", 2), ("qwen3_moe", 2), ("gemma3", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("golden", "size"), LAYERS)
def test_linear_layers_of_all_kinds(golden, size):
    """Copied KV heads, latents, linear attention, shared experts; weights are rounded while they are loaded."""
    folder, mesh = goldens.FOLDER / golden, make_mesh(size)
    config, state = load(folder, tensor_parallel_size=size, quantization="int8")
    tiled, made = in_tiles(config, mesh, state)
    found = load_weights(tiled, build_model(tiled), folder, load_format="auto", mesh=mesh)
    assert_same(found, made)
    wanted, found = products(config, mesh, state), products(tiled, mesh, made)
    for name, y in wanted.items():
        np.testing.assert_allclose(found[name], y, atol=1e-5 * np.abs(y).max(), err_msg=name)


@pytest.mark.slow
def test_layers_of_different_numbers_are_told_apart(tmp_path):
    """In tiles, int8 and fp8 by output have arrays of equal shapes and types."""
    groups = [CONFIGS[name]["config_groups"]["group_0"] for name in ("int8", "e4m3")]
    forms = [CONFIGS[name]["format"] for name in ("int8", "e4m3")]
    named = {
        f"group_{i}": group | {"targets": [rf"re:model\.layers\.{i}\."], "format": form}
        for i, (group, form) in enumerate(zip(groups, forms, strict=True))
    }
    directory = write_config(tmp_path, CONFIGS["int8"] | {"config_groups": named})
    options = {"load_format": "dummy", "skip_tokenizer_init": True}
    found = answer(directory, num_tokens=1, attention_implementation="triton", share_layers=True, **options)
    assert_answered(found, load(directory, load_format="dummy"))
