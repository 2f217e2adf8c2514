"""The experts of a mixture, by every implementation that takes the case: few tokens against a copy, many against the products' peak."""

import functools
import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.grouped_matmul import TOLERANCE, Stored, host_error, packed, plain, random_experts, routing, run
from pallas_kernels.grouped_matmul import IMPLEMENTATIONS, PLAIN, candidates, mosaic, mxfp4, mxfp4_triton, packed_mosaic, triton
from pallas_kernels.grouped_matmul.mosaic_many import Sizes, pick_sizes
from pallas_kernels.grouped_matmul.packed import type_of
from pallas_kernels.grouped_matmul.tiles import Tiles
from pallas_kernels.grouped_matmul.triton_few import FewTiling, pick_few_tiling, takes_few
from pallas_kernels.quantized_matmul import DECODERS

GAIN = 8.0
"""Gain of a result that is the next call's input; limited, so that inputs stay random numbers near 1."""


@dataclass(frozen=True)
class Mixture:
    """A model's experts, and a step's tokens."""

    num_tokens: int
    num_choices: int
    num_experts: int
    width: int
    hidden: int
    dtype: str = "bfloat16"
    activation: str = "silu"
    biases: bool = False
    padding: int = 0
    first: int = 0
    only: int | None = None
    """The expert of every token's first choice."""
    all_experts: int | None = None
    """Experts of all devices together; None: those of this one."""
    four_bits: bool = False
    """Whether the weights are MXFP4."""
    stored: Stored | None = None
    """How they are packed; None: they are not."""

    @property
    def name(self) -> str:
        notes = [self.dtype] * (self.dtype != "bfloat16") + [self.activation] * (self.activation != "silu")
        notes += ["4 bits"] * self.four_bits + [str(self.stored)] * (self.stored is not None)
        notes += ["biases"] * self.biases + [f"{self.padding} padding"] * (self.padding > 0)
        notes += ["one expert"] * (self.only is not None) + [f"from {self.first} of {self.all_experts}"] * (self.first > 0)
        sizes = f"{self.num_tokens} tokens e{self.num_experts} k{self.num_choices} d{self.width} f{self.hidden}"
        return f"experts, {' '.join([sizes, *notes])}"


QWEN3_30B = Mixture(1, 8, 128, 2048, 768)
DEEPSEEK_V2_LITE = Mixture(1, 6, 64, 2048, 1408)
GPT_OSS_20B = Mixture(1, 4, 32, 2880, 2880, activation="swiglu_clamped", biases=True)
GPT_OSS_20B_4 = replace(GPT_OSS_20B, four_bits=True)
GPT_OSS_120B = replace(GPT_OSS_20B, num_experts=128)
INT4 = Stored("int4", 128)
INT4_BY_32 = Stored("int4", 32)
"""Kimi K2."""
INT4_ZEROS = Stored("int4", 64, "float16", has_zeros=True)
"""AWQ, and GPTQ with zero points."""
NVFP4 = Stored("e2m1", 16, has_factor=True)
MXFP4 = Stored("e2m1", 32)
FP8 = Stored("e4m3", None)
FP8_BLOCKS = Stored("e4m3", 128, "float32")
STORED = (INT4, INT4_BY_32, INT4_ZEROS, NVFP4, MXFP4, FP8, FP8_BLOCKS)
SHARES_OF_FOUR = (replace(QWEN3_30B, num_experts=32, first=32, all_experts=128), replace(QWEN3_30B, hidden=192))
"""The part that one of four devices computes: whole experts, or a share of each."""


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Three models, one of them also in 4 bits, from a token to a prompt; and one of them divided among four devices in two ways."""
    if tiny:
        return [_case(Mixture(num_tokens, 2, 4, 32, 16), is_timed=True, tune=tune) for num_tokens in (1, 40)]
    return (
        [
            _case(replace(model, num_tokens=num_tokens, padding=padding), is_timed=True, tune=tune)
            for model in (QWEN3_30B, DEEPSEEK_V2_LITE, GPT_OSS_20B, GPT_OSS_20B_4)
            # A decode step of one request has eight rows.
            for num_tokens, padding in ((8, 7), (8, 0), (64, 0), (256, 0), (1024, 0), (3072, 0), (8192, 0))
        ]
        + [
            _case(replace(share, num_tokens=num_tokens), is_timed=True, tune=tune)
            for num_tokens in (8, 64, 256, 1024, 8192)
            for share in SHARES_OF_FOUR
        ]
        + [
            _case(replace(model, num_tokens=num_tokens, padding=padding, stored=stored), is_timed=True, tune=tune)
            for model, stored in (*((QWEN3_30B, stored) for stored in (INT4, NVFP4, FP8_BLOCKS)), (GPT_OSS_20B, MXFP4))
            for num_tokens, padding in ((8, 7), (8, 0), (64, 0), (256, 0), (1024, 0), (3072, 0), (8192, 0))
        ]
        + [
            _case(replace(GPT_OSS_120B, num_tokens=num_tokens, **form), is_timed=True, tune=tune)
            for num_tokens in (64, 8192)
            for form in ({"four_bits": True}, {"stored": MXFP4})
        ]
    )


def check_cases(tiny: bool) -> list[Case]:
    """Few pairs, some, and many; odd numbers of experts, shares of their width, biases, activations, padding, other devices."""
    toy = Mixture(7, 2, 5, 32, 24)
    if tiny:
        four_bits = replace(toy, hidden=32, dtype="bfloat16", four_bits=True)
        return [_case(case) for case in (toy, replace(toy, num_tokens=40, biases=True, padding=3), four_bits)]
    mixtures = [
        *(Mixture(num_tokens, 8, 12, 2048, 768) for num_tokens in (1, 2, 5, 64, 65, 200, 1000)),
        *(Mixture(num_tokens, 6, 8, 2048, 1408) for num_tokens in (1, 17, 400)),
        *(replace(GPT_OSS_20B, num_tokens=num_tokens, num_experts=6) for num_tokens in (1, 9, 300)),
        *(replace(GPT_OSS_20B_4, num_tokens=num_tokens, num_experts=6) for num_tokens in (1, 3, 9, 40, 300, 1000)),
        replace(GPT_OSS_20B_4, num_tokens=40, num_experts=4, first=4, all_experts=8, padding=7),
        *(Mixture(num_tokens, 2, 5, 2880, 1440, biases=True, four_bits=True) for num_tokens in (4, 500)),
        *(Mixture(num_tokens, 1, 100, 256, 96, only=77, four_bits=True) for num_tokens in (1, 40, 512, 3000)),
        # Shares of tensor parallelism.
        *(Mixture(num_tokens, 4, 7, 2048, hidden) for num_tokens in (3, 500) for hidden in (96, 192, 352)),
        *(Mixture(num_tokens, 2, 5, 2880, 360, biases=True) for num_tokens in (4, 700)),
        *(Mixture(num_tokens, 2, 8, 4096, 1024, activation="gelu_tanh") for num_tokens in (6, 900)),
        # All tokens of one expert, most experts without tokens.
        *(Mixture(num_tokens, 1, 100, 256, 128, only=77) for num_tokens in (1, 40, 512, 3000)),
        *(Mixture(num_tokens, 3, 100, 256, 128, only=0) for num_tokens in (20, 2000)),
        Mixture(4, 8, 300, 512, 64),
        Mixture(3000, 4, 300, 512, 64),
        *(Mixture(num_tokens, 4, 16, 512, 256, padding=num_tokens // 2) for num_tokens in (2, 64, 1000)),
        *(Mixture(num_tokens, 4, 16, 512, 256, first=32, all_experts=64) for num_tokens in (1, 64, 1000)),
        *(Mixture(num_tokens, 2, 8, 512, 256, dtype="float16", biases=True) for num_tokens in (5, 600)),
        *(Mixture(num_tokens, 2, 8, 512, 256, dtype="float32", biases=True) for num_tokens in (5, 600)),
        *_packed_mixtures(),
    ]
    return [_case(mixture) for mixture in mixtures]


def _packed_mixtures() -> list[Mixture]:
    """Every way of packing, for each length of tiles; sizes of models, other devices' experts, one expert alone."""
    small = Mixture(1, 4, 12, 512, 256, biases=True)
    found = [replace(small, stored=stored, num_tokens=num_tokens) for stored in STORED for num_tokens in (1, 9, 40, 400)]
    found += [replace(small, stored=INT4, num_tokens=num_tokens) for num_tokens in (20, 90)]
    found += [Mixture(num_tokens, 2, 5, 192, 64, stored=Stored(number, None)) for number in DECODERS for num_tokens in (3, 300)]
    # Gates with more blocks of outputs are computed in another form.
    found += [Mixture(num_tokens, 2, 5, 320, 1600, stored=stored) for stored in (NVFP4, FP8) for num_tokens in (3, 16)]
    of_models = [replace(QWEN3_30B, num_experts=12, stored=stored) for stored in (INT4, FP8_BLOCKS)]
    # Whole, and the half of two devices with what pads it.
    of_models += [replace(GPT_OSS_20B, num_experts=6, hidden=hidden, stored=MXFP4) for hidden in (2880, 1472)]
    found += [replace(mixture, num_tokens=num_tokens) for mixture in of_models for num_tokens in (1, 16, 64, 300, 1000)]
    one = Mixture(1, 1, 100, 256, 128, only=77, stored=INT4)
    found += [replace(one, num_tokens=num_tokens) for num_tokens in (1, 40, 3000)]
    part = Mixture(1, 4, 16, 512, 256, first=32, all_experts=64, padding=1, stored=INT4_BY_32)
    return found + [replace(part, num_tokens=num_tokens) for num_tokens in (2, 64, 1000)]


def _case(mixture: Mixture, *, is_timed: bool = False, tune: bool = False) -> Case:
    E, D, F = mixture.num_experts, mixture.width, mixture.hidden
    total = mixture.all_experts or mixture.num_experts
    expert_Tk, weight_Tk = routing(mixture.num_tokens, mixture.num_choices, total)
    if mixture.only is not None:
        expert_Tk[:, 0] = mixture.only

    is_real_T = np.arange(mixture.num_tokens) < mixture.num_tokens - mixture.padding

    @jax.jit
    def draw() -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
        """Tokens, weights unless they are in 4 bits, and biases."""
        keys = iter(jax.random.split(jax.random.key(0), 5))
        dtype = jnp.dtype(mixture.dtype)

        def normal(*shape: int, scale: float = 1.0) -> jax.Array:
            return jax.random.normal(next(keys), shape, dtype) * jnp.asarray(scale, dtype)

        x_TD = jnp.where(is_real_T[:, None], normal(mixture.num_tokens, D), jnp.nan).astype(dtype)
        weights = (
            []
            if mixture.four_bits or mixture.stored is not None
            else [normal(E, 2, F, D, scale=2 / math.sqrt(D)), normal(E, D, F, scale=1 / math.sqrt(F))]
        )
        return x_TD, weights, [normal(E, 2, F), normal(E, D)] if mixture.biases else []

    def make() -> tuple[Any, tuple[Any, ...]]:
        x_TD, drawn, biases = draw()
        weights: Any = drawn
        if mixture.four_bits:
            weights = [packed(E, 2, F, D), packed(E, D, F, seed=1)]
        elif mixture.stored is not None:
            weights = [random_experts(mixture.stored, shape, seed) for seed, shape in enumerate([(E, 2, F, D), (E, D, F)])]
        rows = jax.device_put((expert_Tk, weight_Tk, is_real_T, np.int32(mixture.first)))
        return ((x_TD, jnp.int32(0)) if is_timed else x_TD), (*rows, *weights, *biases)

    variants = _variants(mixture, tune=tune)
    if not is_timed:
        error = functools.partial(host_error, activation=mixture.activation)
        return Case(mixture.name, make, variants, error, TOLERANCE[mixture.dtype])
    num_real = mixture.num_tokens - mixture.padding
    chosen = expert_Tk[:num_real]
    own = chosen[(chosen >= mixture.first) & (chosen < mixture.first + mixture.num_experts)]
    needed = len(np.unique(own))
    itemsize = jnp.dtype(mixture.dtype).itemsize
    bytes_per_weight = 17 / 32 if mixture.four_bits else itemsize
    if (stored := mixture.stored) is not None:
        of_group = jnp.dtype(stored.scale_type).itemsize + 2 * stored.has_zeros
        bytes_per_weight = DECODERS[stored.number].bits / 8 + (of_group / stored.group if stored.group else 0)
    return Case(
        mixture.name,
        make,
        {name: functools.partial(_shifted, variant, total) for name, variant in variants.items()},
        functools.partial(_sampled_error, mixture.activation),
        TOLERANCE[mixture.dtype],
        bytes=bytes_per_weight * needed * 3.0 * D * F + itemsize * 2.0 * mixture.num_tokens * D,
        flops=2.0 * 3 * D * F * own.size,
        feed=_feed,
    )


def _shifted(variant: Callable[..., Any], total: int, carry: Any, expert: Any, *rest: Any) -> Any:
    """Each call chooses other experts: the cache would hold those of a few tokens."""
    x_TD, shift = carry
    return variant(x_TD, lax.rem(expert + shift, total), *rest)


def _feed(carry: Any, result: Any) -> Any:
    return jnp.clip(result * jnp.asarray(GAIN, result.dtype), -3.0, 3.0), carry[1] + 7


def _sampled_error(activation: str, carry: Any, constants: Any, got: Any) -> float:
    """Error of a few tokens: the host takes seconds for all."""
    expert, weight, is_real, *rest = constants
    tokens = np.linspace(0, len(got) - 1, min(4, len(got))).astype(int)
    x, got = (np.asarray(array)[tokens] for array in (carry[0], got))
    expected = plain(x, *(np.asarray(a)[tokens] for a in (expert, weight, is_real)), *rest, activation=activation)
    return float(np.abs(got.astype(np.float32) - expected).max() / np.abs(expected).max())


def _variants(mixture: Mixture, *, tune: bool) -> dict[str, Callable[..., Any]]:
    on_gpu = jax.default_backend() == "gpu"
    # Mosaic leaves few pairs to Triton.
    is_few = mixture.num_tokens * mixture.num_choices < mosaic.MIN_PAIRS_OF_EXPERT * mixture.num_experts
    case = {"dtype": jnp.dtype(mixture.dtype), "weight_dtype": mxfp4.DTYPE if mixture.four_bits else jnp.dtype(mixture.dtype)}
    if mixture.stored is not None:
        case["weight_dtype"] = type_of(mixture.stored.number)
    case |= {"width": mixture.width, "hidden": mixture.hidden}
    options: dict[str, Any] = {"activation": mixture.activation, "interpret": not on_gpu}
    takes = [
        name
        for name in IMPLEMENTATIONS
        if name not in PLAIN
        and not (name == "mosaic" and is_few and mixture.stored is None)
        and name in candidates(platform=jax.default_backend(), interpret=not on_gpu, **case)
    ]
    found: dict[str, Callable[..., Any]] = {name: functools.partial(run, implementation=name, **options) for name in takes}
    if mixture.stored is not None:
        if tune:
            found |= {
                f"mosaic tiles of {tile_rows}": _variant(packed_mosaic.experts, tile_rows=tile_rows, **options)
                for tile_rows in packed_mosaic.TILE_ROWS
                if tile_rows <= mixture.num_tokens * mixture.num_choices
            }
        return found
    if mixture.four_bits:
        if tune:
            found |= {
                f"triton {_sizes_of(tiling)}": _variant(mxfp4_triton.experts, tiling=tiling, **options)
                for tiling in _tilings_of_4_bits(mixture)
            }
        return found
    if tune and "triton" in takes:
        found |= {
            f"triton {_sizes_of(tiling)}": _variant(triton.experts, tiling=tiling, **options) for tiling in _tilings(mixture)
        }
        num_pairs = mixture.num_tokens * mixture.num_choices
        for name, max_few_pairs in (("with a plan", 0), ("without a plan", 4096)):
            if not takes_few(mixture.num_tokens, mixture.num_choices) and num_pairs <= 4096:
                found[f"triton {name}"] = _variant(triton.experts, max_few_pairs=max_few_pairs, **options)
    if tune and "mosaic" in takes:
        found |= {
            f"mosaic {' '.join(f'{one.columns}-{one.num_stages}' for one in sizes)}": _variant(
                mosaic.experts, sizes=sizes, **options
            )
            for sizes in _sizes(mixture)
        }
    return found


def _variant(function: Callable[..., jax.Array], **options: Any) -> Callable[..., Any]:
    """One implementation, called as `checking.grouped_matmul.run` is."""

    def call(x: Any, expert: Any, weight: Any, is_real: Any, first: Any, gate_up: Any, down: Any, *biases: Any) -> Any:
        named = dict(zip(("gate_up_bias_E2F", "down_bias_ED"), biases, strict=True)) if biases else {}
        return function(x, expert, weight, gate_up, down, is_real_T=is_real, first_expert=first, **named, **options)

    return call


def _sizes_of(tiling: triton.Tiling | FewTiling) -> str:
    """Block sizes, warps and stages of both kernels; of few tokens' also the programs of a core, and shares."""
    sizes = " ".join("-".join(map(str, astuple(tiles))) for tiles in (tiling.gate_up, tiling.down))
    return f"{sizes} {tiling.programs_of_core}-{tiling.num_shares}" if isinstance(tiling, FewTiling) else sizes


def _sizes(mixture: Mixture) -> list[tuple[Sizes, Sizes]]:
    """Fewer stages, or narrower blocks with more of them."""
    wide = pick_sizes(mixture.hidden, 2), pick_sizes(mixture.width, 1)
    narrow = Sizes(64, num_stages=6), Sizes(128 if mixture.width % 128 == 0 else 64, num_stages=6)
    return [(replace(wide[0], num_stages=3), replace(wide[1], num_stages=3)), narrow]


def _tilings(mixture: Mixture) -> list[triton.Tiling] | list[FewTiling]:
    """One size changed at a time, in both kernels."""
    num_pairs = mixture.num_tokens * mixture.num_choices
    if takes_few(mixture.num_tokens, mixture.num_choices):
        return _few_tilings(jnp.dtype(mixture.dtype).itemsize)
    base = triton.pick_tiling(num_pairs, mixture.num_experts, mixture.hidden, jnp.dtype(mixture.dtype).itemsize)

    def both(change: Callable[[Tiles], Tiles]) -> triton.Tiling:
        return triton.Tiling(change(base.gate_up), change(base.down))

    changes: list[Callable[[Tiles], Tiles]] = [
        lambda tiles: replace(tiles, num_stages=tiles.num_stages - 1),
        lambda tiles: replace(tiles, num_stages=tiles.num_stages + 1),
        lambda tiles: replace(tiles, num_warps=tiles.num_warps * 2 if tiles.num_warps < 8 else 4),
        lambda tiles: replace(tiles, block_n=max(16, tiles.block_n // 2)),
        lambda tiles: replace(tiles, block_n=min(256, tiles.block_n * 2)),
        lambda tiles: replace(tiles, block_k=tiles.block_k * 2, num_stages=max(2, tiles.num_stages - 2)),
        lambda tiles: replace(tiles, block_k=max(32, tiles.block_k // 2), num_stages=tiles.num_stages + 2),
        lambda tiles: replace(tiles, block_m=min(128, tiles.block_m * 2)),
    ]
    return [tiling for change in changes if (tiling := both(change)) != base]


def _few_tilings(itemsize: int) -> list[FewTiling]:
    """One change at a time, of either kernel."""
    base = pick_few_tiling(itemsize)
    gate_up, down = base.gate_up, base.down
    return [
        replace(base, gate_up=replace(gate_up, num_stages=5)),
        replace(base, gate_up=replace(gate_up, block_n=16, num_stages=5), programs_of_core=3),
        replace(base, gate_up=replace(gate_up, block_n=64, block_k=64, num_stages=5)),
        replace(base, down=replace(down, num_stages=7), num_shares=8),
        replace(base, down=replace(down, block_n=32)),
        replace(base, down=replace(down, block_n=16, block_k=256), num_shares=3),
    ]


def _tilings_of_4_bits(mixture: Mixture) -> list[triton.Tiling] | list[FewTiling]:
    """One size changed at a time, of few tokens' in either kernel."""
    base = mxfp4_triton.pick_tiling(mixture.num_tokens, mixture.num_choices, mixture.num_experts)
    changes: list[Callable[[Tiles], Tiles]] = [
        lambda tiles: replace(tiles, num_stages=tiles.num_stages - 1),
        lambda tiles: replace(tiles, num_stages=tiles.num_stages + 1),
        lambda tiles: replace(tiles, block_n=tiles.block_n * 2, num_warps=tiles.num_warps * 2),
        lambda tiles: replace(tiles, block_k=tiles.block_k * 2),
        lambda tiles: replace(tiles, block_k=tiles.block_k // 2),
        lambda tiles: replace(tiles, block_n=tiles.block_n // 2, num_warps=tiles.num_warps // 2),
    ]
    if isinstance(base, FewTiling):
        return [
            *(replace(base, gate_up=change(base.gate_up)) for change in changes),
            *(replace(base, down=change(base.down)) for change in changes),
            *(replace(base, programs_of_core=programs) for programs in (2, 4)),
            *(replace(base, num_shares=shares) for shares in (2, 8)),
        ]
    return [triton.Tiling(change(base.gate_up), change(base.down)) for change in changes]
