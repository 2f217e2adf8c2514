"""Numbers of 8 bits as operands of the tensor cores: the instructions that widen them."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import has_mosaic

if not has_mosaic():
    pytest.skip("JAX 0.10 lacks parts of Mosaic GPU that the kernels use", allow_module_level=True)

from pallas_kernels.paged_attention import eight_bits
from tests.helpers.ptx_registers import run_ptx


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("pair", [(0, 2), (1, 3), (0, 1), (2, 3)])
def test_instructions_widen_every_code_exactly(pair, dtype):
    codes = np.arange(256, dtype=np.uint32)
    first, second = (x.reshape(-1) for x in np.meshgrid(codes, codes))
    word = np.random.default_rng(0).integers(0, 1 << 32, len(first), dtype=np.uint32)
    for byte, code in zip(pair, (first, second), strict=True):
        word = word & ~np.uint32(255 << 8 * byte) | code << np.uint32(8 * byte)
    text = eight_bits.instructions("{} and {}".format(*pair), dtype != np.float16)
    (got,) = run_ptx(text, {"$1": word}, ["$0"], ("a", "m"))
    got = got.view(dtype).astype(np.float64).reshape(-1, 2) * eight_bits.unit(dtype)
    for column, code in enumerate((first, second)):
        stored = code.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        negative = np.where(code >= 128, -1, 1)
        np.testing.assert_array_equal(got[:, column], np.where(np.isnan(stored), negative * eight_bits.LARGEST, stored))
