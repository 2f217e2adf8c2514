"""A head that becomes int8 while it is loaded."""

import json
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.engine.kernel_choice import wants_tiles
from jaxllm.engine.kernel_shapes import shapes_of_tiles
from jaxllm.errors import ModelLoadError
from jaxllm.layers.build import Widened, build_model, weight_bytes
from jaxllm.loaders import safetensors
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from pallas_kernels.checking.quantized_matmul import Shapes
from pallas_kernels.quantized_matmul import product
from scripts.saving import save_orbax, write_safetensors
from tests.helpers import engines, goldens, peft_files
from tests.helpers.quantized import PROMPT, by_path, load
from tests.quantization.test_tiles import in_tiles
from tests.speculative.checkpoints import CONFIG, head_tensors
from tests.speculative.checkpoints import write as write_drafter

SOURCE = goldens.FOLDER / "llama_gqa"
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def model():
    return load(SOURCE, quantize_lm_head="int8")


@pytest.fixture(scope="module")
def widened(model):
    """float32 [V, D]: the values of the rounded head."""
    arrays = by_path(model[1])
    return (arrays["head.weight.codes"] - 128) * arrays["head.weight.scale"]


def test_tokens_have_codes_and_a_scale_and_nothing_else_changes(model, widened):
    """The nearest numbers, in steps of which the largest value has 127.5."""
    found, plain = by_path(model[1]), by_path(load(SOURCE)[1])
    weight, scale = plain.pop("head.weight"), found.pop("head.weight.scale")
    np.testing.assert_allclose(scale, np.abs(weight).max(1, keepdims=True) / 127.5, rtol=1.5e-7)
    steps, codes = weight.astype(np.float64) / scale, found.pop("head.weight.codes") - 128
    is_half = np.abs(np.abs(steps) % 1 - 0.5) < 2e-5  # float32 may see it on either side
    np.testing.assert_array_equal(codes[~is_half], np.rint(steps)[~is_half])
    assert (np.abs(codes - steps) < 0.5 + 2e-5).all() and np.abs(steps).max() == pytest.approx(127.5) and not is_half.all()
    assert found.keys() == plain.keys() and all(np.array_equal(found[name], array) for name, array in plain.items())
    V, D = widened.shape
    # 2 bytes a value become 1, and 4 for each token.
    stored = (load_model_config(SOURCE, dtype="bfloat16", quantize_lm_head=option) for option in (None, "int8"))
    before, after = map(weight_bytes, stored)
    assert before - after == V * D - 4 * V


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tiled", [False, True])
def test_logits_are_float32_whatever_the_hidden_states_are(model, widened, is_tiled, dtype):
    config, state = in_tiles(model[0], make_mesh(1), model[1]) if is_tiled else model
    head = nnx.merge(nnx.graphdef(build_model(config)), state).head
    assert ("words" in head.weight.names) == is_tiled
    hidden = np.random.default_rng(0).normal(size=(6, widened.shape[1])).astype(dtype)
    if is_tiled and dtype == "bfloat16":
        head.multiply = partial(product, implementation="reference")  # which rounds nothing, as the kernels
    found = np.asarray(jax.jit(head.logits)(jnp.asarray(hidden)))
    wanted = hidden.astype(np.float64) @ widened.T.astype(np.float64)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())
    assert np.abs(wanted.astype(ml_dtypes.bfloat16) - wanted).max() > 1e-3 * np.abs(wanted).max()  # had it been rounded


def test_what_has_no_head_to_round_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="the head is tied: its weights are those of the embedding"):
        load_model_config(goldens.FOLDER / "llama_tied", quantize_lm_head="int8")
    with pytest.raises(ModelLoadError, match="the model makes no logits here; leave --quantize-lm-head out"):
        load_model_config(SOURCE, quantize_lm_head="int8", runner="pooling")


@pytest.mark.slow
def test_orbax_checkpoints_are_refused(tmp_path):
    save_orbax(*load(SOURCE), tmp_path)
    (tmp_path / "config.json").write_text((SOURCE / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="whose head stays as it is; leave --quantize-lm-head out"):
        load(tmp_path, quantize_lm_head="int8")


def test_heads_have_tiles_beside_experts(monkeypatch):
    """And are checked with float32 results; where there are no tiles, steps have room for the head in the model's type."""
    monkeypatch.setattr("pallas_kernels._compat.has_mosaic", lambda: True)
    monkeypatch.setattr("jaxllm.engine.kernel_choice.was_verified", lambda *_: True)
    load_ = partial(load_model_config, goldens.FOLDER / "gpt_oss", dtype="bfloat16", on_gpu=True)
    load_ = partial(load_, overrides={"quantization_config": {"quant_method": "mxfp4"}})
    config = load_(quantize_lm_head="int8")
    assert wants_tiles("auto", config, on_gpu=True, is_checked=True)
    config = config.for_tensor_parallel(1).in_tiles()
    found = build_model(config)
    (shapes,) = shapes_of_tiles([found], "bfloat16")
    assert shapes == Shapes("uint8b128", config.vocab_size, config.hidden_size, None, "float32", result="float32")
    assert not Widened.of(found).head and Widened.of(build_model(load_(quantize_lm_head="int8"))).head


@pytest.mark.slow
def test_an_engine_of_two_devices_with_drafts_and_adapters_that_sleeps(tmp_path, widened, monkeypatch):
    """Layers in int4; weights are in tiles. Drafts share the head. The answers are those of a plain
    checkpoint with the values of the rounded head."""
    plain = tmp_path / "plain"
    plain.mkdir()
    checkpoint = safetensors.Checkpoint(SOURCE)
    tensors = {name: np.asarray(checkpoint.tensor(name), np.float32) for name in checkpoint.entries}
    write_safetensors(plain / "model.safetensors", tensors | {HEAD: widened})
    shutil.copy(SOURCE / "config.json", plain)
    adapter = peft_files.write(tmp_path / "adapter", plain, targets=["lm_head"])
    merged = peft_files.merged(plain, adapter, tmp_path / "merged")
    shutil.copy(SOURCE / "config.json", merged)  # in whose type the scales of int4 are
    wanted = [load(folder, quantization="int4") for folder in (plain, merged)]

    def no_kernel(*_, **__):
        raise AssertionError("a head multiplies without the engine's kernels")

    monkeypatch.setattr("jaxllm.layers.embedding.PLAINLY", no_kernel)
    monkeypatch.setattr("jaxllm.engine.resolve.wants_tiles", lambda *_, **__: True)
    drafts = {"method": "eagle", "model": str(write_drafter(tmp_path / "head", CONFIG, head_tensors(is_third=False)))}
    llm = LLM(
        str(SOURCE),
        **engines.SMALL,
        quantization="int4",
        quantize_lm_head="int8",
        tensor_parallel_size=2,
        speculative_config=drafts | {"num_speculative_tokens": 1},
        enable_lora=True,
        lora_target_modules=["lm_head"],
    )
    requests = [None, LoRARequest("changed", 1, str(adapter))]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    for level in (None, 2):
        if level is not None:
            llm.sleep(level)
            llm.wake_up()
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * 2, params, lora_request=requests, use_tqdm=False)
        for output, (config, state) in zip(outputs, wanted, strict=True):
            tokens = list(output.outputs[0].token_ids)
            logits = goldens.logits(config, state, PROMPT + tokens)
            assert tokens == np.argmax(logits[len(PROMPT) - 1 : -1], -1).tolist()
            entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            found = [entry[token].logprob for entry, token in zip(entries, [*PROMPT[1:], *tokens], strict=True)]
            expected = np.asarray(jax.nn.log_softmax(logits, -1))[np.arange(len(found)), [*PROMPT[1:], *tokens]]
            np.testing.assert_allclose(found, expected, atol=1e-4)
    llm.shutdown()


@pytest.mark.slow
def test_devices_share_the_tokens_of_a_vocabulary_that_they_do_not_divide(tmp_path, model):
    """As stored: rows that pad the vocabulary have scale 0."""
    codes = model[1]["head"]["weight"]["codes"][...]
    two = load(SOURCE, quantize_lm_head="int8", tensor_parallel_size=2)
    np.testing.assert_array_equal(two[1]["head"]["weight"]["codes"][...], codes)
    np.testing.assert_allclose(goldens.logits(*two, PROMPT), goldens.logits(*model, PROMPT), atol=1e-5)
    folder = tmp_path / "odd"
    folder.mkdir()
    checkpoint = safetensors.Checkpoint(SOURCE)
    tensors = {name: np.asarray(checkpoint.tensor(name), np.float32) for name in checkpoint.entries}
    cut = {name: array[:121] if len(array) == 128 and "layers" not in name else array for name, array in tensors.items()}
    write_safetensors(folder / "model.safetensors", cut)
    config = json.loads((SOURCE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 121}))
    two = load(folder, quantize_lm_head="int8", tensor_parallel_size=2)
    assert two[1]["head"]["weight"]["codes"][...].shape == (128, 64)
    logits = goldens.logits(*two, PROMPT)
    np.testing.assert_allclose(logits[:, :121], goldens.logits(*model, PROMPT)[:, :121], atol=1e-5)
    assert np.isneginf(logits[:, 121:]).all()
