"""Collectives by XLA against NumPy on CPU devices; who computes what; what is refused; and that the kernels lower for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxllm.layers.norm import Normalization
from jaxllm.model_parts import Norm
from pallas_kernels import _compat, collectives
from pallas_kernels.collectives import WORKSPACE_BYTES, plans, programs, reference

needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernels use")
XLA = {"axis": "devices", "implementation": "xla"}
EPS = 1e-5


def on(mesh, function, *arrays):
    """Results of a function of local arrays on each device; arrays have the devices' parts as first dimension."""

    def local(*parts):
        return jax.tree.map(lambda result: result[None], function(*(part[0] for part in parts)))

    spec = PartitionSpec("devices")
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(*arrays)


def normal(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_and_norms_by_xla_are_near_the_reference(mesh, dtype) -> None:
    x, residual, weight = normal(4, 5, 64, dtype=dtype), normal(5, 64, dtype=dtype, seed=1), normal(64, dtype=dtype, seed=2)
    near = {"rtol": 2e-2 if dtype == "bfloat16" else 1e-5, "atol": 3e-2 if dtype == "bfloat16" else 1e-5}

    def call(x):
        total = collectives.all_reduce(x, **XLA)
        return total, *collectives.all_reduce_norm(x, jnp.asarray(residual), jnp.asarray(weight), EPS, **XLA)

    expected = reference.all_reduce(x), *reference.all_reduce_norm(x, residual, weight, EPS)
    for found, right in zip(on(mesh, call, x), expected, strict=True):
        assert found.dtype == x.dtype
        for part in np.asarray(found, np.float32):
            np.testing.assert_allclose(part, right.astype(np.float32), **near)


def test_without_a_residual_only_the_parts_are_added(mesh) -> None:
    x, weight = normal(4, 3, 16), normal(16, seed=1)
    found = on(mesh, lambda x: collectives.all_reduce_norm(x, None, jnp.asarray(weight), EPS, **XLA), x)
    for part, right in zip(found, reference.all_reduce_norm(x, None, weight, EPS), strict=True):
        np.testing.assert_allclose(part[0], right, rtol=1e-5, atol=1e-5)


def test_the_norm_of_the_reference_is_that_of_the_model() -> None:
    h, weight = normal(5, 64), normal(64, seed=1)
    layer = Normalization(Norm("norm", EPS), 64, "width", "float32")
    layer.weight.set_value(jnp.asarray(weight))
    np.testing.assert_allclose(reference.norm(h, weight, EPS), layer(jnp.asarray(h)), rtol=2e-6, atol=1e-6)


def test_words_and_slices_by_xla_are_exact(mesh) -> None:
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 6, 2), np.int32)
    words[:, 0] = -1
    gathered, status = on(mesh, lambda x: (collectives.all_gather(x, **XLA), collectives.status(x, **XLA)), words)
    for part in np.asarray(gathered):
        np.testing.assert_array_equal(part, reference.all_gather(words))
    assert not np.asarray(status).any()
    x = normal(4, 4, 3, 8)
    np.testing.assert_array_equal(on(mesh, lambda x: collectives.all_to_all(x, **XLA), x), reference.all_to_all(x))


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("no implementation 'nccl' of collectives", lambda x: collectives.all_reduce(x, axis="devices", implementation="nccl")),
        ("need a workspace", lambda x: collectives.all_reduce(x, axis="devices", implementation="peer")),
        ("2 slices over 4 devices", lambda x: collectives.all_to_all(x[:2], **XLA)),
        (
            "float32 with a residual or weight of bfloat16",
            lambda x: collectives.all_reduce_norm(x, x.astype(jnp.bfloat16), x[0], EPS, **XLA),
        ),
        (
            r"all_reduce by 'peer' does not take \[3, 5\] of float32 on each of 4 devices; use 'xla'",
            lambda x: collectives.all_reduce(x[:, :5], axis="devices", implementation="peer", workspace=x),
        ),
    ],
)
def test_what_cannot_be_done_is_refused(mesh, text, function) -> None:
    with pytest.raises(ValueError, match=text):
        on(mesh, function, normal(4, 3, 16))


@needs_mosaic
def test_what_peer_takes() -> None:
    takes = functools.partial(collectives.supports, "peer")
    for op in ("all_reduce", "all_reduce_norm"):
        for size in (2, 4, 8):
            for width in (1024, 2048, 4096, 5120, 8192):
                for tokens in (1, 2, 7, 64, 255, 256):
                    assert takes(op, shape=(tokens, width), dtype="bfloat16", num_devices=size), (op, size, width, tokens)
        assert takes(op, shape=(64, 8192), dtype="float32", num_devices=8)
        assert takes(op, shape=(512, 4096), dtype="float32", num_devices=4)
        assert not takes(op, shape=(4096, 8192), dtype="bfloat16", num_devices=4)
        assert not takes(op, shape=(16, 4096), dtype="float16", num_devices=4)
        assert not takes(op, shape=(16, 4096), dtype="bfloat16", num_devices=9)
        assert not takes(op, shape=(0, 4096), dtype="bfloat16", num_devices=4)
    assert not takes("all_reduce_norm", shape=(2, 4), dtype="bfloat16", num_devices=4)  # half a vector a row
    assert takes("all_to_all", shape=(4, 16, 32064), dtype="float32", num_devices=4)
    assert takes("all_to_all", shape=(2, 32, 64128), dtype="float32", num_devices=2)
    assert not takes("all_to_all", shape=(4, 3, 3), dtype="float32", num_devices=4)
    assert takes("all_gather", shape=(64, 2), dtype="int32", num_devices=4)
    assert not takes("all_gather", shape=(64, 2), dtype="bfloat16", num_devices=4)


@needs_mosaic
def test_large_sums_are_left_to_xla() -> None:
    assert collectives.choose("all_reduce", shape=(16, 4096), dtype="bfloat16", num_devices=4) == "peer"
    assert collectives.choose("all_reduce", shape=(2048, 4096), dtype="bfloat16", num_devices=4) == "xla"
    assert collectives.choose("all_reduce", shape=(1, 4095), dtype="bfloat16", num_devices=4) == "xla"


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_plan_covers_its_array_once_within_the_limits(size, dtype) -> None:
    """Each vector belongs to one thread of one CTA, and what arrives fits into the slots."""
    for tokens in (1, 3, 16, 129, 256, 512):
        for width in (1024, 5120, 8192):
            vectors = width * (2 if dtype == "bfloat16" else 4) // 16
            for group, phases in ((1, 1), (size, 2)):
                for plan in (
                    plans.plan_rows(tokens, vectors, group=group, phases=phases, num_devices=size),
                    plans.plan_vectors(tokens * vectors, group=group, phases=phases, num_devices=size),
                ):
                    if plan is None:
                        continue
                    assert plan.ctas <= plans.MAX_CTAS and plan.threads <= plans.MAX_THREADS
                    assert phases * size * plan.num_pieces * plan.threads * 16 <= plans.SLOT_BYTES
                    assert covered(plan) == tokens * vectors


def covered(plan) -> int:
    """How many vectors a plan deals out; fails if one is dealt out twice, or a CTA gets none."""
    ctas = np.arange(plan.ctas)[:, None] * plan.group * plan.width
    seen = np.zeros(plan.total, np.int8)
    for i, k in plan.pieces():
        threads = np.arange(plan.threads)
        threads = threads[threads + k * plan.threads < plan.width]
        for member in range(plan.group):
            index = ctas + plan.offset(i, k, member) + threads
            index = index[index < plan.total]
            assert (seen[index] == 0).all()
            seen[index] = 1
    assert (ctas < plan.total).all()
    return int(seen.sum())


@needs_mosaic
def test_the_kernels_lower_for_gpus(mesh) -> None:
    """As custom calls without anything collective."""
    options = {"axis": "devices", "implementation": "peer"}

    def call(workspace, x, slices):
        total = collectives.all_reduce(x, **options, workspace=workspace)
        h, y = collectives.all_reduce_norm(total, x, x[0], EPS, **options, workspace=workspace)
        got = collectives.all_to_all(slices + y[0, 0], **options, workspace=workspace)
        words = collectives.all_gather(got[0, :2].view(jnp.int32), **options, workspace=workspace)
        return h, words, collectives.status(words, **options, workspace=workspace)

    def local(*parts):
        return jax.tree.map(lambda result: result[None], call(parts[0], *(part[0] for part in parts[1:])))

    spec = PartitionSpec("devices")
    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    shapes = [((4, WORKSPACE_BYTES // 4), "uint32"), ((4, 9, 1024), "float32"), ((4, 4, 3, 8), "float32")]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    text = program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 5 and "all_reduce" not in text.replace("all_reduce_", "")


def test_a_program_is_made_once() -> None:
    one = programs.all_reduce((16, 4096), "bfloat16", 4, eps=EPS)
    assert one is programs.all_reduce((16, 4096), "bfloat16", 4, eps=EPS) and one.ctas == 16
