"""Weights of 4 and 8 bits: their packed order, the instructions that decode them, and products by every implementation."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import _compat, producer_consumer
from pallas_kernels.checking import quantized_matmul as checking
from pallas_kernels.checking.quantized_matmul import TOLERANCE_OF_SUMS, Shapes, host_arrays, host_error, stored, tolerance
from pallas_kernels.quantized_matmul import (
    DECODERS,
    IMPLEMENTATIONS,
    PLAIN,
    Packed,
    candidates,
    choose,
    cta,
    few,
    many,
    mosaic,
    pack,
    pack_words,
    product,
    unpack_words,
    widened,
)
from pallas_kernels.quantized_matmul.decoders import NF4, TEMPORARIES
from scripts.kernels import quantized_matmul as quantized_cases
from tests.helpers.lowering import a_gpu_to_lower_for
from tests.helpers.ptx_registers import run_ptx
from tests.helpers.slow import slow_except

# Operation by operation each of them would be dozens of programs.
pack_words, unpack_words = (jax.jit(function, static_argnums=1) for function in (pack_words, unpack_words))
widened = jax.jit(widened)
needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic(), reason="JAX 0.10 lacks parts of Mosaic GPU that the kernels use")
FORMATS = {
    "int4 by 128": Shapes("int4", 128, 256, 128),
    "int4 by 256": Shapes("int4", 64, 512, 256, "float32"),
    "int4 by 32, zeros": Shapes("int4", 100, 96, 32, "float16", has_zeros=True),
    "int4 by 96, zeros": Shapes("int4", 70, 192, 96, has_zeros=True),
    "int4 by output": Shapes("int4", 64, 100, None),
    "int4 by output, zeros": Shapes("int4", 64, 100, None, has_zeros=True),
    "nvfp4": Shapes("e2m1", 65, 144, 16, "float8_e4m3fn", has_factor=True),
    "mxfp4": Shapes("e2m1", 128, 64, 32, "uint8"),
    "int8 by output": Shapes("int8", 40, 70, None),
    "int8 by 64": Shapes("int8", 64, 128, 64, "float32"),
    "uint8b128 by 128, zeros": Shapes("uint8b128", 64, 128, 128, "float16", has_zeros=True),
    "uint8b128 by output": Shapes("uint8b128", 64, 64, None),
    "nf4": Shapes("nf4", 64, 128, 64, "float32"),
    "fp8 by output": Shapes("e4m3", 129, 130, None, "float32"),
    "int8 by output to float32": Shapes("uint8b128", 200, 192, None, "float32", result="float32"),
}


def random_codes(bits: int, num_outputs: int, num_inputs: int) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 1 << bits, (num_outputs, num_inputs), dtype=np.uint8)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_have_each_code_where_they_should_and_give_all_back(bits):
    codes = random_codes(bits, 128, 192)
    words = np.asarray(pack_words(jnp.asarray(codes), bits))
    assert words.dtype == np.int32 and words.shape == (2, 3, 128 * bits)
    np.testing.assert_array_equal(unpack_words(jnp.asarray(words), bits), codes)
    rng = np.random.default_rng(0)
    for _ in range(300):
        w, g, q, j, p, c, h = (int(rng.integers(n)) for n in (4, 8, 4, 4, 2, 2, 2))
        thread = 32 * w + 4 * g + q
        if bits == 4:
            word, shift = words[1, 2, 4 * thread + j], 4 * (4 * p + 2 * c + h)
        else:
            word, shift = words[1, 2].reshape(2, 128, 4)[j // 2, thread, 2 * (j % 2) + c], 8 * (2 * p + h)
        assert int(word) >> shift & (1 << bits) - 1 == codes[64 + 16 * w + 8 * h + g, 128 + 16 * j + 8 * c + 2 * q + p]


@pytest.mark.parametrize("bits", slow_except([4], [4, 8]))
def test_a_slice_of_tiles_is_the_packed_slice(bits):
    codes = jnp.asarray(random_codes(bits, 192, 256))
    words = pack_words(codes, bits)
    np.testing.assert_array_equal(words[1:], pack_words(codes[64:], bits))
    np.testing.assert_array_equal(words[:, 1:3], pack_words(codes[:, 64:192], bits))


@pytest.mark.parametrize("name", slow_except(["int4 by 32, zeros", "nvfp4", "fp8 by output"], FORMATS))
@pytest.mark.slow
def test_packed_values_are_those_stored_and_padding_is_0(name):
    shapes = FORMATS[name]
    weight = stored(shapes).pack(shapes.number)
    assert (weight.num_outputs, weight.num_inputs) == tuple(-(-n // 64) * 64 for n in (shapes.num_outputs, shapes.num_inputs))
    got = np.asarray(widened(weight))
    expected = stored(shapes).values(shapes.number, np.arange(shapes.num_outputs))
    tolerance = 2**-8 if shapes.number == "nf4" else 3e-7  # nf4 is rounded
    np.testing.assert_allclose(got[: shapes.num_outputs, : shapes.num_inputs], expected, rtol=tolerance)
    assert not got[shapes.num_outputs :].any()
    if weight.group is not None:
        assert weight.group in (16, 32, 64, 128)
        assert not got[:, -(-shapes.num_inputs // weight.group) * weight.group :].any()


@pytest.mark.parametrize(("number", "fold"), [("int8", 0), ("int4", 66), ("e2m1", 63), ("e4m3", 60)])
def test_exponents_are_exact_as_long_as_there_is_room(number, fold):
    exponents = np.arange(256, dtype=np.uint8).reshape(128, 2)
    weight = pack(number, np.zeros((128, 64 // (8 // DECODERS[number].bits)), np.uint8), exponents)
    scale = np.asarray(weight.scale).T.astype(np.float64).reshape(-1)
    np.testing.assert_array_equal(scale[: 255 - fold], np.exp2(np.arange(255.0 - fold) - 127 + fold))
    assert weight.fold == fold and np.isinf(scale[255 - fold : 255]).all() and np.isnan(scale[255])


@pytest.mark.parametrize("number", ["int4", "e2m1", "e4m3"])
def test_scales_are_stored_larger_where_numbers_are_decoded_too_small(number):
    """Not in float16, which has no room for it."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x70, (64, 64 // (8 // DECODERS[number].bits)), np.uint8)
    scale = rng.uniform(0.5, 2, (64, 2)).astype(np.float16)
    wide, half = pack(number, codes, scale.astype(np.float32)), pack(number, codes, scale)
    assert wide.fold == DECODERS[number].exponent // 2 and half.fold == 0
    np.testing.assert_array_equal(widened(wide), widened(half))
    np.testing.assert_array_equal(np.asarray(wide.scale) * 2.0**-wide.fold, np.asarray(half.scale).astype(np.float32))


@pytest.mark.parametrize(
    ("number", "codes", "groups", "zeros", "text"),
    [
        ("int4", (64, 60), 5, False, "5 scales for 120 inputs"),
        ("int4", (64, 64), 3, False, "groups must divide the inputs and be multiples of 16"),
        ("e2m1", (64, 64), 2, True, "zero points are of int4 and uint8b128 numbers, not of e2m1"),
    ],
)
def test_what_cannot_be_packed_is_refused(number, codes, groups, zeros, text):
    scale = jnp.ones((codes[0], groups), jnp.bfloat16)
    with pytest.raises(ValueError, match=text):
        pack(number, jnp.zeros(codes, jnp.uint8), scale, jnp.zeros(scale.shape, jnp.uint8) if zeros else None)


@pytest.mark.parametrize("number", DECODERS)
def test_instructions_decode_every_code_in_every_register(number):
    decoder = DECODERS[number]
    codes = np.array([code for code in range(1 << decoder.bits) if number != "e4m3" or code & 0x7F != 0x7F], np.uint32)
    low, high = (x.reshape(-1) for x in np.meshgrid(codes, codes))
    # float32 of a CPU has no subnormal numbers, which are no values here.
    expected = [np.asarray(jax.jit(decoder.widen)(each.astype(np.uint8))).view(np.uint16) for each in (low, high)]
    for register in range(16 // decoder.bits):
        noise = np.random.default_rng(register).integers(0, 1 << 32, len(low), dtype=np.uint32)
        mask = np.uint32(((1 << decoder.bits) - 1) * 0x10001 << decoder.bits * register)
        codes_of_word = (noise & ~mask | (low | high << 16) << decoder.bits * register).astype(np.uint32).view(np.int32)
        word = np.asarray(decoder.arranged(codes_of_word))
        np.testing.assert_array_equal(decoder.in_order(word), codes_of_word)
        results = [f"${index}" for index in range(16 // decoder.bits)]

        def run(text, word=word, results=results, register=register):
            found = run_ptx(text, {f"${len(results)}": word.view(np.uint32)}, results, TEMPORARIES)
            return found[register].view(np.uint16).reshape(-1, 2)

        np.testing.assert_array_equal(run(decoder.instructions), np.stack(expected, axis=1))
        if decoder.too_small:
            got = run(decoder.too_small).view(ml_dtypes.bfloat16).astype(np.float64) * 2.0**decoder.exponent
            np.testing.assert_array_equal(
                got - decoder.bias, np.stack(expected, axis=1).view(ml_dtypes.bfloat16).astype(np.float64)
            )


def test_numbers_are_what_their_types_say():
    every = np.arange(256, dtype=np.uint8)
    for number, expected in (
        ("int4", np.arange(16.0) - 8),
        ("e2m1", [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]),
        ("nf4", np.asarray(NF4).astype(ml_dtypes.bfloat16)),
        ("int8", np.arange(256, dtype=np.uint8).view(np.int8)),
        ("e4m3", np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)),
    ):
        got = jax.jit(DECODERS[number].widen)(every[: 1 << DECODERS[number].bits])
        np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(expected).astype(np.float64))


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("name", slow_except(["int4 by 32, zeros", "int8 by output to float32"], FORMATS))
def test_plain_products_against_numpy(name, implementation):
    x, (weight,) = host_arrays(FORMATS[name], 7)
    got = product(jnp.asarray(x), weight, dtype=FORMATS[name].result, implementation=implementation)
    assert got.shape == (7, weight.num_outputs) and got.dtype == (FORMATS[name].result or x.dtype)
    assert host_error(FORMATS[name], x, (weight,), got) <= tolerance(FORMATS[name])


@pytest.mark.slow
def test_wrong_results_are_found():
    shapes = Shapes("int4", 2000, 128, 64)
    x, (weight,) = host_arrays(shapes, 9)
    got = np.asarray(jax.jit(partial(product, implementation="xla"))(x, weight))
    assert got.shape == (9, 2048) and host_error(shapes, x, (weight,), got) <= tolerance(shapes)
    lost, padded, swapped = got.copy(), got.copy(), got.copy()
    lost[5, 1111] = np.nan
    padded[0, -1] = 1e-3
    swapped[:, [0, 61]] = got[:, [61, 0]]
    assert np.isnan(host_error(shapes, x, (weight,), lost))
    assert host_error(shapes, x, (weight,), padded) == np.inf
    assert host_error(shapes, x, (weight,), swapped) > tolerance(shapes)
    for block in range(31):  # a block that was not written
        unwritten = got.copy()
        unwritten[:, 64 * block : 64 * (block + 1)] = 0
        assert host_error(shapes, x, (weight,), unwritten) > tolerance(shapes)
    shapes = Shapes("int8", 256, 128, 64)
    x, (weight,) = checking.decoding_arrays(shapes)
    got = np.asarray(product(jnp.asarray(x), weight, implementation="xla"))
    assert checking.decoding_error(shapes, x, (weight,), got) == 0
    assert sorted(checking.picked_inputs(128) % 64) != sorted(checking.picked_inputs(64)) == list(range(64))
    assert checking.decoding_error(shapes, x, (weight,), got[:, ::-1]) > 0


def test_what_does_not_fit_is_refused():
    weight = stored(FORMATS["int4 by 128"]).pack("int4")
    x = jnp.zeros((3, 256), jnp.float32)
    with pytest.raises(ValueError, match=r"x_TK is \[3, 192\], but the weight has 256 inputs"):
        product(x[:, :192], weight)
    with pytest.raises(ValueError, match="no implementation 'triton' of quantized products; there are mosaic, xla, reference"):
        product(x, weight, implementation="triton")
    with pytest.raises(ValueError, match="'mosaic' of quantized products does not take activations in float32 here; use 'xla'"):
        product(x, weight, implementation="mosaic")


def test_kernels_are_candidates_on_a_gpu_and_chosen_where_they_were_verified(monkeypatch):
    assert candidates(platform="cpu", dtype="bfloat16") == ("xla",) == candidates(platform="gpu", dtype="float16")
    monkeypatch.setattr(_compat, "has_mosaic", lambda: True)
    assert candidates(platform="gpu", dtype="bfloat16") == ("mosaic", "xla")
    assert choose(platform="gpu", dtype="bfloat16") == "xla"
    monkeypatch.setattr("pallas_kernels.quantized_matmul.is_verified", lambda *_: True)
    assert choose(platform="gpu", dtype="bfloat16") == "mosaic"
    assert set(IMPLEMENTATIONS) == {"mosaic", *PLAIN}


def shape_of(shapes: Shapes) -> Packed:
    return jax.eval_shape(lambda: host_arrays(replace(shapes, num_outputs=64, num_inputs=shapes.num_inputs), 8)[1][0])


def of_blocks(weight: Packed, num_blocks: int) -> Packed:
    return replace(weight, words=jax.ShapeDtypeStruct((num_blocks, *weight.words.shape[1:]), jnp.int32))


@pytest.mark.parametrize(
    ("number", "num_outputs", "num_inputs", "sizes"),
    [
        ("int4", 6144, 4096, few.FewSizes(2, 2, 6)),
        ("int4", 4096, 4096, few.FewSizes(2, 4, 4)),
        ("int4", 28672, 4096, few.FewSizes(4, 1, 3)),
        ("int4", 4096, 14336, few.FewSizes(2, 4, 6)),
        ("e4m3", 6144, 4096, few.FewSizes(2, 2, 3)),
        ("e4m3", 4096, 4096, few.FewSizes(2, 4, 3)),
        ("e4m3", 28672, 4096, few.FewSizes(4, 1, 2)),
        ("e4m3", 4096, 14336, few.FewSizes(2, 4, 3)),
    ],
)
def test_few_rows_get_the_sizes_that_were_the_fastest(number, num_outputs, num_inputs, sizes):
    """The fastest of those tried for the products of Llama-3.1-8B, 8 rows."""
    weight = of_blocks(shape_of(Shapes(number, 64, num_inputs, 128 if number == "int4" else None)), num_outputs // 64)
    assert few.pick_sizes(8, weight, 132) == sizes


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "sizes"),
    [
        (6144, 4096, many.ManySizes(2, 64, 2, 8)),
        (4096, 4096, many.ManySizes(2, 64, 4, 8)),
        (28672, 4096, many.ManySizes(4, 64, 1, 8)),
        (4096, 14336, many.ManySizes(2, 64, 4, 8)),
    ],
)
def test_many_rows_divide_inputs_until_all_cores_have_some(num_outputs, num_inputs, sizes):
    """int4 products of Llama-3.1-8B, 64 rows."""
    weight = of_blocks(shape_of(Shapes("int4", 64, num_inputs, 128)), num_outputs // 64)
    assert many.pick_sizes(64, weight, 132) == sizes


def test_sizes_fit_into_shared_memory_and_what_cannot_is_refused():
    for shapes in (Shapes("e4m3", 64, 28672, None), Shapes("e2m1", 64, 4096, 16, "uint8"), Shapes("int4", 64, 64, 64)):
        weight = of_blocks(shape_of(shapes), 300)
        for num_rows in (8, 16, 64):
            sizes = few.pick_sizes(num_rows, weight, 132)
            steps = -(-weight.num_inputs // (few.STEP * sizes.num_parts))
            stage = (sizes.num_consumers * 64 * DECODERS[shapes.number].bits // 8 + 2 * num_rows) * few.STEP
            assert sizes.num_stages * stage < cta.SMEM_BYTES
            assert 1 <= sizes.num_stages <= steps
        for num_rows in (24, 64, 128, 264, 320, 8192):
            for itemsize in (2, 4):
                tiles = many.pick_sizes(num_rows, weight, 132, itemsize)
                assert tiles.tile_rows % 8 == 0 and tiles.tile_rows <= min(256, num_rows) and tiles.num_stages >= 3
                result = itemsize * tiles.tile_rows * tiles.num_consumers * 64
                assert tiles.num_parts > 1 or tiles.num_stages * 2 * tiles.tile_rows * 64 + result < cta.SMEM_BYTES
    with pytest.raises(ValueError, match="512 rows do not fit into shared memory in any way"):
        few.pick_sizes(512, shape_of(Shapes("e4m3", 64, 28672, None)), 132)


@pytest.mark.parametrize(("num_consumers", "registers"), [(4, 104), (3, 152), (2, 232)])
def test_warpgroups_ask_for_no_more_registers_than_a_core_gave_them(num_consumers, registers):
    """A consumer that asks for one more waits forever."""
    at_start = 65536 // (128 * (num_consumers + 1)) // 8 * 8
    assert producer_consumer.consumer_registers(num_consumers) == registers
    assert registers * num_consumers + producer_consumer.PRODUCER_REGISTERS <= at_start * (num_consumers + 1)


INTERPRETED = {
    # (weight, rows): what one kernel or the other does at an edge
    "few, scaled sums": (Shapes("int4", 128, 256, 128), 5),
    "few, zeros, steps that are not whole": (Shapes("int4", 72, 384, 128, "float16", has_zeros=True), 16),
    "few, scaled values": (Shapes("e2m1", 64, 288, 16, "float8_e4m3fn", has_factor=True), 8),
    "few, 8 bits": (Shapes("e4m3", 200, 320, None, "float32"), 1),
    "few, more rows": (Shapes("int4", 64, 256, 128), 24),
    "many, one group a tile": (Shapes("int4", 128, 256, 128), 72),
    "many, zeros, an odd number of blocks and of steps": (Shapes("int4", 192, 192, 32, "float32", has_zeros=True), 72),
    "many, 8 bits by output": (Shapes("int8", 64, 64, None), 65),
    "many, blocks of float32 results": (FORMATS["int8 by output to float32"], 72),
    "few, blocks of float32 results": (FORMATS["int8 by output to float32"], 13),
}
ON_A_NEWER_JAX = ("few, zeros, steps that are not whole", "many, 8 bits by output", "many, blocks of float32 results")
"""The only run of these kernels in CI, whose older JAX has not what they need."""


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.newer) if name in ON_A_NEWER_JAX else name for name in INTERPRETED]
)
def test_kernels_in_the_interpreter(name):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    shapes, num_rows = INTERPRETED[name]
    params = _compat.mosaic().InterpretGPUParams(
        out_of_bounds_reads="uninitialized", uninitialized_memory="zero", detect_races=True
    )
    x, (weight,) = host_arrays(shapes, num_rows)
    padded = jnp.pad(x, ((0, 0), (0, weight.num_inputs - x.shape[1])))
    got = mosaic.product(padded, weight, dtype=shapes.result, interpret=params)
    limit = TOLERANCE_OF_SUMS[False] if shapes.result else tolerance(shapes)
    assert got.dtype == (shapes.result or x.dtype) and host_error(shapes, x, (weight,), got) <= limit
    assert not gpu_callbacks.get_races().races_found


@needs_mosaic
@pytest.mark.slow
def test_inputs_are_divided_between_ctas_in_the_interpreter():
    shapes = Shapes("int4", 192, 1088, 64)
    x, (weight,) = host_arrays(shapes, 8)
    got = few.product(jnp.asarray(x), weight, dtype=jnp.float32, sizes=few.FewSizes(2, 3, 2), interpret=True)
    assert got.dtype == np.float32 and host_error(shapes, x, (weight,), got) <= tolerance(shapes)
    shapes = Shapes("int4", 64, 512, 128)
    x, (weight,) = host_arrays(shapes, 8)
    got = few.product(jnp.asarray(x), weight, dtype=jnp.float32, sizes=few.FewSizes(2, 2, 1), interpret=True)
    assert host_error(shapes, x, (weight,), got) <= TOLERANCE_OF_SUMS[True]
    shapes = Shapes("nf4", 192, 1088, 64, "float32", has_factor=True)
    x, (weight,) = host_arrays(shapes, 48)
    got = many.product(jnp.asarray(x), weight, sizes=many.ManySizes(2, 32, 4, 3), interpret=True)
    assert host_error(shapes, x, (weight,), got) <= tolerance(shapes)


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "num_rows"),
    slow_except(
        [*((name, 8) for name in FORMATS), ("nvfp4", 64), ("nvfp4", 72)],
        [(name, rows) for name in FORMATS for rows in (8, 64, 72)],
    ),
)
def test_kernels_lower_for_a_gpu(name, num_rows):
    """Where there is none: their code in registers, too."""
    shapes = FORMATS[name]
    weight = jax.eval_shape(lambda: host_arrays(shapes, 8)[1][0])
    x = jax.ShapeDtypeStruct((num_rows, shapes.num_inputs), jnp.bfloat16)
    with a_gpu_to_lower_for():
        call = jax.jit(partial(product, dtype=shapes.result, implementation="mosaic"))
        lowered = call.trace(x, weight).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize(
    "name", slow_except(["nvfp4"], ["nvfp4", "int4 by 96, zeros", "uint8b128 by output", "fp8 by output", "nf4"])
)
def test_cases_at_an_engines_start_pass_by_plain_jax(name):
    cases = checking.cases(FORMATS[name], "xla", interpret=False)
    assert [case.name.rsplit(", ", 1)[1] for case in cases] == ["1 rows", "13 rows", "150 rows"]
    for case in cases:
        x, constants = case.make()
        assert np.isnan(x.astype(np.float32)).any() == (len(x) > 1), "padding"
        assert case.error(x, constants, case.variants["xla"](x, *constants)) <= case.tolerance


@pytest.mark.parametrize("kind", ["check", "speed"])
def test_the_kernels_are_checked_and_timed_where_there_is_a_gpu(kind, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_compat, "has_mosaic", lambda: True)
    if kind == "check":
        found = quantized_cases.check_cases(tiny=False)
        rows = {int(case.name.rsplit(", ", 1)[1].split()[0]) for case in found if case.name.endswith(" rows")}
        assert {1, 7, 8, 9, 16, 17, 64, 127, 257} <= rows
        assert {f"quantized, {number} 256x64 by output bfloat16 decoded" for number in DECODERS} <= {
            case.name for case in found
        }
    else:
        found = quantized_cases.speed_cases(tiny=False, tune=True)
        assert all(case.bytes > 0 and case.flops > 0 for case in found)
        assert {"mosaic", "xla"} == {next(iter(case.variants)) for case in found}
    assert len({case.name for case in found}) == len(found)


def test_the_next_input_of_a_timed_call_is_the_same_but_depends_on_all_of_its_result():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.bfloat16)
    for num_outputs in (32, 64, 72):
        result = jnp.full((3, num_outputs), 9, jnp.bfloat16)
        np.testing.assert_array_equal(quantized_cases._feed(x, result), x)
        for output in (0, num_outputs - 1):
            assert np.isnan(np.asarray(quantized_cases._feed(x, result.at[:, output].set(jnp.nan)), np.float32)).any()
