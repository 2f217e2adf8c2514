"""In float64, by NumPy: what is quantised, before it is rounded."""

import numpy as np

from pallas_kernels.quantize.values import Sums


def scaled(sums: Sums) -> np.ndarray:
    """[T, *outputs]."""
    values, row_scale_T, column_scale = (
        np.asarray(array).astype(np.float64) for array in (sums.values, sums.row_scale_T, sums.column_scale)
    )
    return values * row_scale_T.reshape(-1, *(1,) * column_scale.ndim) * column_scale


def norm(x_TD: np.ndarray, weight_D: np.ndarray, eps: float) -> np.ndarray:
    wide_TD = np.asarray(x_TD).astype(np.float64)
    root_T1 = np.sqrt(np.mean(np.square(wide_TD), axis=-1, keepdims=True) + eps)
    return wide_TD / root_T1 * np.asarray(weight_D).astype(np.float64)


def silu_up(sums: Sums) -> np.ndarray:
    gate_TF, up_TF = scaled(sums).swapaxes(0, 1)
    return gate_TF / (1 + np.exp(-gate_TF)) * up_TF
