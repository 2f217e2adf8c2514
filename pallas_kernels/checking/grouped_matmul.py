"""The experts of a mixture: near what NumPy computes in float32, expert by expert; padding gives 0 and adds nothing."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.host import Normals
from pallas_kernels.grouped_matmul import experts
from pallas_kernels.grouped_matmul.mxfp4 import BLOCK, SCALE_BIAS, WORD, Mxfp4
from pallas_kernels.grouped_matmul.packed import PackedExperts
from pallas_kernels.quantized_matmul import DECODERS, TILE, Packed
from pallas_kernels.quantized_matmul.packed import fold_of

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Bound of the largest difference, relative to the largest value: hidden values and each expert's result are rounded too."""
_MAX_WEIGHTS = 64 << 20
"""Values of all experts of a case at an engine's start; few experts compute as many do."""
_DEVIATIONS = {"int4": 4.6, "e2m1": 2.9, "nf4": 0.6, "int8": 74.0, "e4m3": 0.4}
"""Of numbers with random codes, by their name."""
_FEW_TOKENS, _ROWS_OF_EXPERT = 13, 150
"""Tokens of the case with small tiles, and pairs of an expert in that with large ones: more than a tile has."""


@dataclass(frozen=True)
class Stored:
    """How experts' weights are packed."""

    number: str
    """A key of quantized_matmul's DECODERS."""
    group: int | None
    """Inputs that share a scale; None: there is none but the factor."""
    scale_type: str = "bfloat16"
    has_zeros: bool = False
    has_factor: bool = False

    def __str__(self) -> str:
        of = f"g{self.group}" if self.group else "by output"
        return " ".join([self.number, of, *["zeros"] * self.has_zeros, *["factor"] * self.has_factor])


@dataclass(frozen=True)
class Shapes:
    """A model's experts on one device."""

    dtype: str
    num_experts: int
    num_choices: int
    width: int
    hidden: int
    activation: str = "silu"
    has_biases: bool = False
    is_packed: bool = False
    """Whether the weights are in 4 bits."""
    stored: tuple[Stored, Stored] | None = None
    """How gate and up, and down, are packed in multiples of 64 values; None: they are not."""


def cases(shapes: Shapes, implementation: str, *, interpret: bool) -> list[Case]:
    """A token, a few, and so many that an expert has several tiles; some are padding, some experts are another device's."""
    fitting = max(2, _MAX_WEIGHTS // (3 * shapes.width * shapes.hidden))
    num_experts = min(shapes.num_experts, shapes.num_choices + 2, fitting)
    num_choices = min(shapes.num_choices, num_experts)
    many = -(-_ROWS_OF_EXPERT * num_experts // num_choices)
    call = functools.partial(run, implementation=implementation, interpret=interpret, activation=shapes.activation)
    return [
        Case(
            f"{num_tokens} tokens",
            functools.partial(_host_arrays, shapes, num_tokens, num_experts, num_choices),
            {implementation: call},
            functools.partial(host_error, activation=shapes.activation),
            TOLERANCE[shapes.dtype],
        )
        for num_tokens in (1, _FEW_TOKENS, many)
    ]


def run(
    carry: Any, expert: Any, weight: Any, is_real: Any, first: Any, gate_up: Any, down: Any, *biases: Any, **options: Any
) -> Any:
    """The op on x; biases are those of both products or none."""
    named = dict(zip(("gate_up_bias_E2F", "down_bias_ED"), biases, strict=True)) if biases else {}
    return experts(carry, expert, weight, gate_up, down, is_real_T=is_real, first_expert=first, **named, **options)


def host_error(carry: Any, constants: Any, got: Any, *, activation: str) -> float:
    """The largest difference from `plain`, relative to the largest value; infinite where padding does not give 0."""
    expected = plain(carry, *constants, activation=activation)
    got, is_real_T = np.asarray(got).astype(np.float32), np.asarray(constants[2])
    if np.any(got[~is_real_T] != 0):
        return math.inf
    return float(np.abs(got - expected).max() / max(float(np.abs(expected).max()), 1e-30))


def plain(
    x: Any, expert: Any, weight: Any, is_real: Any, first: Any, gate_up: Any, down: Any, *biases: Any, activation: str
) -> np.ndarray:
    """[T, D] in float32, in NumPy."""
    x_TD, expert_Tk, weight_Tk, is_real_T = (np.asarray(array) for array in (x, expert, weight, is_real))
    out_TD = np.zeros(x_TD.shape, np.float32)
    local_Tk = np.where(is_real_T[:, None], expert_Tk - int(first), -1)
    for index in np.intersect1d(local_Tk, np.arange(down.shape[0])):
        token_M, choice_M = np.nonzero(local_Tk == index)
        gate_up_2FD, down_DF = (np.asarray(_expert(weight, index)) for weight in (gate_up, down))
        gate_MF, up_MF = x_TD[token_M].astype(np.float32) @ gate_up_2FD.swapaxes(1, 2)
        if biases:
            gate_MF, up_MF = (
                gate_MF + np.asarray(biases[0][index, 0], np.float32),
                up_MF + np.asarray(biases[0][index, 1], np.float32),
            )
        out_MD = _activate(gate_MF, up_MF, activation) @ down_DF.T
        if biases:
            out_MD += np.asarray(biases[1][index]).astype(np.float32)
        np.add.at(out_TD, token_M, out_MD * weight_Tk[token_M, choice_M, None])
    return out_TD


def _expert(weight: Any, index: Any) -> Any:
    """One expert's weight in float32."""
    return weight[index].astype(np.float32) if isinstance(weight, np.ndarray) else _expert_on_device(weight, index)


@jax.jit
def _expert_on_device(weight: Any, index: Any) -> jax.Array:
    return weight[index].astype(jnp.float32)


def _activate(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    match activation:
        case "silu":
            return gate / (1 + np.exp(-gate)) * up
        case "gelu_tanh":
            return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        case "swiglu_clamped":
            gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
            return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    raise ValueError(f"no activation {activation!r}")


def routing(num_tokens: int, num_choices: int, num_experts: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random choices [T, k] without repetition within a token, and weights that sum to 1."""
    rng = np.random.default_rng(seed)
    expert_Tk = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :num_choices].astype(np.int32)
    weight_Tk = rng.uniform(0.1, 1.0, (num_tokens, num_choices)).astype(np.float32)
    return expert_Tk, weight_Tk / weight_Tk.sum(axis=1, keepdims=True)


def packed(*shape: int, seed: int = 0) -> Mxfp4:
    """Random weights [..., N, K] in 4 bits, with a deviation near 1.5 / sqrt(K)."""
    rng = np.random.default_rng(seed)
    *lead, N, K = shape
    words = rng.integers(0, 1 << 16, (*lead, N, K // WORD), dtype=np.uint16)
    middle = SCALE_BIAS - 1 - round(math.log2(K) / 2)
    exponents = rng.integers(middle - 1, middle + 1, (*lead, K // BLOCK, N), dtype=np.uint8)
    return Mxfp4(jnp.asarray(words), jnp.asarray(exponents))


@functools.partial(jax.jit, static_argnums=range(3))
def random_experts(stored: Stored, shape: tuple[int, ...], seed: int = 0) -> PackedExperts:
    """Random weights [..., N, K], multiples of 64, with a deviation near 1 / sqrt(K)."""
    *lead, N, K = shape
    keys = jax.random.split(jax.random.key(seed), 4)
    bits = DECODERS[stored.number].bits
    words = jax.random.bits(keys[0], (*lead, N // TILE, K // TILE, 128 * bits), jnp.uint32)
    if stored.number == "e4m3":
        words &= jnp.uint32(0xBFBFBFBF)  # neither NaN nor large numbers
    size = 1 / (math.sqrt(K) * _DEVIATIONS[stored.number])
    scale = zero = factor = None
    if stored.group is not None:
        groups = (*lead, K // stored.group, N)
        if stored.has_zeros:
            zero = jax.random.randint(keys[2], groups, -8, 8).astype(jnp.bfloat16)
        scale = (size * jax.random.uniform(keys[1], groups, minval=0.5, maxval=1.5)).astype(stored.scale_type)
        scale *= jnp.asarray(2.0 ** fold_of(stored.number, scale, zero), scale.dtype)
    if stored.has_factor or stored.group is None:
        middle = 1.0 if stored.group is not None else size
        factor = middle * jax.random.uniform(keys[3], (*lead, N), minval=0.5, maxval=1.5)
    return PackedExperts(Packed(lax.bitcast_convert_type(words, jnp.int32), scale, zero, factor, stored.number))


def _host_arrays(shapes: Shapes, num_tokens: int, num_experts: int, num_choices: int) -> tuple[Any, tuple[Any, ...]]:
    """The last tokens are padding and NaN; one expert more than there are here is chosen from."""
    normals, dtype = Normals(), shapes.dtype
    D, F = shapes.width, shapes.hidden
    if shapes.stored is not None:
        D, F = (-(-size // TILE) * TILE for size in (D, F))
    expert_Tk, weight_Tk = routing(num_tokens, num_choices, num_experts + 1)
    is_real_T = np.arange(num_tokens) < max(1, num_tokens - 3)
    x_TD = normals(num_tokens, D)
    x_TD[~is_real_T] = np.nan
    gate_up_E2FD: Any
    down_EDF: Any
    if shapes.is_packed:
        gate_up_E2FD, down_EDF = packed(num_experts, 2, F, D), packed(num_experts, D, F, seed=1)
    elif shapes.stored is not None:
        sizes = (num_experts, 2, F, D), (num_experts, D, F)
        gate_up_E2FD, down_EDF = (random_experts(*each) for each in zip(shapes.stored, sizes, (0, 1), strict=True))
    else:
        gate_up_E2FD = (normals(num_experts, 2, F, D) * np.float32(2 / math.sqrt(D))).astype(dtype)
        down_EDF = (normals(num_experts, D, F) * np.float32(1 / math.sqrt(F))).astype(dtype)
    biases = (normals.of(dtype, num_experts, 2, F), normals.of(dtype, num_experts, D)) if shapes.has_biases else ()
    return x_TD.astype(dtype), (expert_Tk, weight_Tk, is_real_T, np.int32(1), gate_up_E2FD, down_EDF, *biases)
