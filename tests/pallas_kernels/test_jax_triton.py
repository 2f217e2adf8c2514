"""The kernels that jax-triton calls: refused without the extra, compiled for CUDA with it, and right in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.paged_attention as dispatcher
from jaxllm import LLM
from jaxllm.errors import ConfigError
from pallas_kernels.paged_attention import jax_triton, paged_decode
from pallas_kernels.paged_attention.triton_decode import DecodeTiles

CASE = {"dtype": jnp.bfloat16, "num_groups": 4, "head_dim": 128}
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_extra = pytest.mark.skipif(jax_triton.missing() is not None, reason="the extra jax-triton is not installed")


@pytest.fixture
def without_packages(monkeypatch):
    monkeypatch.setattr(jax_triton, "_installed", lambda name: None)


def arrays(rows: int = 3, dtype=jnp.bfloat16) -> list[jax.Array]:
    shapes = ((rows, 2, 4, 64), (20, 2, 16, 64), (20, 2, 16, 64))
    return [*(jnp.ones(shape, dtype) for shape in shapes), jnp.ones((rows, 4), jnp.int32), jnp.full((rows,), 40, jnp.int32)]


def test_without_the_extra_it_says_what_to_install(without_packages) -> None:
    message = r"'jax_triton' needs jax-triton and triton: pip install 'jaxllm\[jax-triton\]'"
    with pytest.raises(ValueError, match=message):
        paged_decode(*arrays(), scale=1.0, implementation="jax_triton")
    with pytest.raises(ModuleNotFoundError, match=message):
        jax_triton.paged_decode(*arrays(), scale=1.0)
    assert not dispatcher.supports("jax_triton", **CASE)


def test_a_version_that_is_too_old_is_named(monkeypatch) -> None:
    monkeypatch.setattr(jax_triton, "_installed", {"jax-triton": "0.4.1", "triton": "3.6.0"}.get)
    assert str(jax_triton.missing()).startswith("needs triton 3.7 or later (3.6.0): pip install")


def test_an_engine_says_it_too(without_packages) -> None:
    with pytest.raises(ConfigError, match="attention_implementation is 'jax_triton', which needs jax-triton and triton"):
        LLM("demo", attention_implementation="jax_triton", use_progress_bar=False)


def test_it_is_never_chosen_by_itself(monkeypatch) -> None:
    monkeypatch.setattr(jax_triton, "_installed", lambda name: "9.9.9")
    assert dispatcher.supports("jax_triton", **CASE)
    assert dispatcher.choose(platform="gpu", **CASE) != "jax_triton"
    assert not dispatcher.supports("jax_triton", **CASE, interpret=True)
    assert not dispatcher.supports("jax_triton", **CASE | {"head_dim": 512})


@needs_extra
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernels_compile_for_cuda_without_a_gpu(dtype) -> None:
    def both(q, k, v, table, length):
        options = {"scale": 0.1, "window": 30, "soft_cap": 20.0}
        split = jax_triton.paged_decode(q, k, v, table, length, **options, tiles=DecodeTiles(block_k=16, num_splits=3))
        start = jnp.arange(length.shape[0] + 1, dtype=jnp.int32)
        return split + jax_triton.paged_attention(q, k, v, table, start, length, **options)

    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        text = jax.jit(both).trace(*arrays(dtype=dtype)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @triton_kernel_call") == 3  # decode, its combination, and the ragged kernel


@pytest.mark.torch
@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_kernels_match_the_oracle_in_tritons_interpreter() -> None:
    """In a separate process: the variable has to be set before triton is imported."""
    pytest.importorskip("torch")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def interpret() -> None:
    """Every case of the other implementations' tests whose type the interpreter can multiply (it takes bfloat16 for integers)."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    import test_paged_attention as cases

    from pallas_kernels.paged_attention import jax_triton_kernels

    def call(*args, kernel, out_type, grid, name, num_warps, num_stages, **constants):
        leaves, tree = jax.tree.flatten(out_type)
        outs = [torch.full(leaf.shape, float("nan"), dtype=getattr(torch, str(leaf.dtype))) for leaf in leaves]
        kernel[grid](*(torch.from_numpy(np.array(x)) for x in args), *outs, **constants)
        return jax.tree.unflatten(tree, [jnp.asarray(out.numpy()) for out in outs])

    jax_triton._kernels = lambda: (jax_triton_kernels, call)
    for batch in cases.DECODE.values():
        if batch.dtype != "bfloat16":
            args, expected = cases.as_decode(batch)
            for splits in (1, 3):
                tiles = DecodeTiles(block_k=16, num_splits=splits)
                cases.assert_close(batch, jax_triton.paged_decode(*args, **batch.options, tiles=tiles), expected)
    for batch in cases.RAGGED.values():
        if batch.dtype != "bfloat16":
            got = jax_triton.paged_attention(*cases.make_arrays(batch).values(), **batch.options)
            cases.assert_close(batch, got, cases.oracle(batch))


if __name__ == "__main__":
    interpret()
