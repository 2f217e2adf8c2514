"""Copies of rows through tiled shared memory: what would lose rows is refused, and no kernel copies past the check."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import _compat, row_copies
from pallas_kernels.row_copies import Rows

needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernels use")
ROOT = Path(str(pallas_kernels.__file__)).parent
COPIES = {
    "copy_gmem_to_smem",
    "copy_smem_to_gmem",
    "emit_pipeline",
    "emit_pipeline_warp_specialized",
}  # a prefetch writes nothing


def copy_back(load: Rows, store: Rows, *, tiled: bool = True, interpret: bool = False):
    """A kernel that loads rows of its operand and stores them."""
    plgpu = _compat.mosaic()
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(x_ref, index_ref, out_ref, smem, barrier):
        row_copies.load(x_ref, Rows(index_ref[0], load.unit, load.size, load.used), smem, barrier)
        plgpu.barrier_wait(barrier)
        row_copies.store(smem, out_ref, Rows(index_ref[1], store.unit, store.size))
        plgpu.wait_smem_to_gmem(0)

    def run(x, index):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[
                plgpu.SMEM((load.size, 64), x.dtype, transforms=transforms if tiled else ()),
                plgpu.Barrier(),
            ],
            grid=(1,),
            grid_names=("cta",),
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=_compat.mosaic_interpret(interpret),
        )(x, index)

    return run


def lower(run) -> str:
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic
@pytest.mark.parametrize(
    "rows",
    [Rows(0, 8, 16), Rows(0, 64, 64), Rows(0, 4, 8, used=4), Rows(0, 1, 8, used=1)],
    ids=["tiles", "many tiles", "half a tile is read", "a row is read"],
)
def test_loads_that_keep_every_row_lower(rows) -> None:
    assert "mosaic_gpu" in lower(copy_back(rows, Rows(0, 8, rows.size)))


@needs_mosaic
@pytest.mark.parametrize(
    "rows",
    [Rows(0, 1, 16), Rows(0, 4, 8), Rows(0, 4, 8, used=5), Rows(0, 3, 8, used=3), Rows(0, 12, 16, used=12)],
    ids=["any row", "half a tile", "more than the unit", "groups of three", "groups of twelve"],
)
def test_loads_that_would_lose_rows_are_refused(rows) -> None:
    with pytest.raises(ValueError, match="goes through tiles of 8 rows and would lose rows"):
        lower(copy_back(rows, Rows(0, 8, rows.size)))


@needs_mosaic
def test_stores_that_would_lose_rows_are_refused_unless_memory_is_not_tiled() -> None:
    with pytest.raises(ValueError, match="a store of 8 rows that starts at multiples of 4 goes through tiles"):
        lower(copy_back(Rows(0, 8, 8), Rows(0, 4, 8)))
    assert "mosaic_gpu" in lower(copy_back(Rows(0, 8, 8), Rows(0, 1, 8), tiled=False))


@needs_mosaic
def test_rows_are_counted_in_units() -> None:
    x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64) % 251
    run = copy_back(Rows(0, 8, 16), Rows(0, 16, 16), interpret=True)
    got = np.asarray(jax.jit(run)(jnp.asarray(x, jnp.bfloat16), jnp.array([3, 1], jnp.int32)), np.float32)
    np.testing.assert_array_equal(got[16:32], x[24:40])


def test_kernels_copy_through_this_module_alone() -> None:
    """A copy that is not checked could lose rows on the device alone."""
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        if path.name != "row_copies.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in COPIES
    }
    assert not found
