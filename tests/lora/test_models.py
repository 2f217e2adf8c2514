"""Whole models with adapters, without an engine, against models with the same adapters merged in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from jaxllm.layers.parameters import zeros
from jaxllm.lora.checkpoint import read_adapter
from jaxllm.lora.device import DeviceSlots
from jaxllm.lora.targets import adaptable, last_name
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.shards import ONE_DEVICE
from jaxllm.runner.kernels import Kernels
from tests.helpers import goldens, peft_files


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt_oss", marks=pytest.mark.slow),
        "llama_tied",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("deepseek_v2_lite", marks=pytest.mark.slow),
        pytest.param("qwen3_next", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_models_are_merged_ones(name, tmp_path):
    """Every module that adapters may change, routers, embedding and head too, in sequences of different adapters and of none."""
    model_dir, prompt = goldens.FOLDER / name, np.arange(3, 23) * 5 % 120
    config, state = goldens.load(model_dir)
    model = build_model(config)
    names = sorted({last_name(module) for part in adaptable(model) for module in part.modules})
    slots = DeviceSlots(model, make_mesh(1), num_slots=2, rank=8, dtype="float32", names=names)
    filled = tuple(jax.tree.leaves(zeros(slots.model, slots.mesh)))
    stacked = name == "gpt_oss"
    adapters = [
        peft_files.write(tmp_path / f"{i}", model_dir, rank=4 + 2 * i, seed=i, targets=None if stacked else names)
        for i in range(2)
    ]
    for slot, adapter in enumerate(adapters):
        files = read_adapter(adapter, slots.targets, 8, 8)
        assert set(files.modules) == set(slots.targets) or stacked
        filled = slots.write(filled, slots.pack(files.tensor), slot)
    graph, slots_graph = nnx.graphdef(model), nnx.graphdef(slots.model)
    tree = jax.tree.structure(nnx.state(slots.model))

    @jax.jit
    def logits(state, filled, slot_T, segment_T):
        merged, adapters = nnx.merge(graph, state), nnx.merge(slots_graph, jax.tree.unflatten(tree, filled))
        length = len(prompt)
        step = dense_step(
            jnp.tile(prompt, len(slot_T) // length), jnp.tile(jnp.arange(length), len(slot_T) // length), segment_T
        )
        step.adapt = slots.adapt(adapters, slot_T, ONE_DEVICE, Kernels())
        return merged.logits(merged(step), ONE_DEVICE, step.adapt)

    in_turn = [-1, 0, 1]
    runs = [in_turn] if name != "qwen3_next" else [[slot] for slot in in_turn]  # its states are of one sequence
    found = []
    for run in runs:
        segment_T = np.repeat(np.arange(len(run)), len(prompt)) if len(run) > 1 else None
        found += np.split(np.asarray(logits(state, filled, np.repeat(np.int32(run), len(prompt)), segment_T)), len(run))
    directories = [model_dir, *(peft_files.merged(model_dir, each, tmp_path / f"merged{i}") for i, each in enumerate(adapters))]
    for each, directory in zip(found, directories, strict=True):
        expected = goldens.logits(*goldens.load(directory), prompt.tolist())
        np.testing.assert_allclose(each, expected, atol=2e-4 * np.abs(expected).max())
    assert np.abs(found[0] - found[1]).max() > 0.1


def test_modules_of_a_group_of_mamba_whose_heads_devices_share():
    """Gates, values and time steps are distributed, the vectors of the group copied."""
    config = load_model_config(goldens.FOLDER / "granite_hybrid").for_tensor_parallel(2)
    mamba = config.layers[0].attention
    values, vectors, steps = mamba.group_size * mamba.head_dim, mamba.state_size, mamba.group_size
    parts = {last_name(next(iter(part.modules))): part for part in adaptable(build_model(config))}
    target = parts["in_proj"].make(1, 4, "float32")
    assert target.sizes == (values, values, vectors, vectors, steps) and target.up.shape[-1] == sum(target.sizes)
