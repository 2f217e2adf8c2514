"""What the collectives compute, in NumPy on the host: the truth that implementations are held to.

An array of all devices has them as its first dimension: x_nTD[d] is what device d holds.
"""

import numpy as np


def all_reduce(x_nTD: np.ndarray) -> np.ndarray:
    """[T, D]: the sum over devices in rank order in float32, rounded once to the type of x."""
    return _sum(x_nTD).astype(x_nTD.dtype)


def all_reduce_norm(
    part_nTD: np.ndarray, residual_TD: np.ndarray | None, weight_D: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """(h, y), both [T, D]: the sum plus residual, rounded once, and its RMS norm times weight."""
    total_TD = _sum(part_nTD)
    if residual_TD is not None:
        total_TD = total_TD + residual_TD.astype(np.float32)
    h_TD = total_TD.astype(part_nTD.dtype)
    return h_TD, norm(h_TD, weight_D, eps)


def norm(h_TD: np.ndarray, weight_D: np.ndarray, eps: float) -> np.ndarray:
    """The RMS norm of rows as they are, in float32."""
    wide_TD = h_TD.astype(np.float32)
    mean_T1 = np.mean(np.square(wide_TD), axis=-1, keepdims=True)
    normed_TD = wide_TD / np.sqrt(mean_T1 + np.float32(eps))
    return (normed_TD * weight_D.astype(np.float32)).astype(h_TD.dtype)


def all_gather(x_nRK: np.ndarray) -> np.ndarray:
    """[n, R, K]: the same on every device."""
    return x_nRK


def all_to_all(x_nnM: np.ndarray) -> np.ndarray:
    """result[d, s] is what device s had for device d."""
    return x_nnM.swapaxes(0, 1)


def _sum(x_nTD: np.ndarray) -> np.ndarray:
    total_TD = x_nTD[0].astype(np.float32)
    for x_TD in x_nTD[1:]:
        total_TD = total_TD + x_TD.astype(np.float32)
    return total_TD
