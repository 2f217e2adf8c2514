import itertools
import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import _compat, product_chain
from pallas_kernels.checking import product_chain as checking
from pallas_kernels.checking.product_chain import TOLERANCE, Shapes, host_arrays, host_chain, host_error
from pallas_kernels.product_chain import candidates, chain, finish, mosaic, streams, waiting
from pallas_kernels.product_chain.plan import BLOCK, HALF, STEP, Product, chain_of, with_parts
from pallas_kernels.product_chain.waiting import Counters
from scripts.kernels import product_chain as chain_cases
from tests.helpers.lowering import a_gpu_to_lower_for
from tests.helpers.ptx_interpreter import Launch, Machine, TrapError
from tests.helpers.simulated_chain import SimulatedChain
from tests.helpers.slow import slow_except

needs_mosaic = pytest.mark.skipif(not _compat.has_mosaic(), reason="this JAX has no complete Mosaic GPU")

SMALL = Shapes(256, 256, 384, 384)
PARTS = {
    "whole": SMALL,
    "the MLP": replace(SMALL, of_heads=None, qkv=None),
    "from attention": replace(SMALL, qkv=None),
    "to attention": replace(SMALL, of_heads=None),
}
LLAMA_1B = chain_cases.LLAMA_1B


def plan_of(shapes, num_rows, num_ctas):
    return chain_of(
        inputs=shapes.of_heads or shapes.width,
        width=shapes.width,
        hidden=shapes.hidden,
        qkv=shapes.qkv,
        starts_with_out=shapes.of_heads is not None,
        num_rows=num_rows,
        eps=shapes.eps,
        num_ctas=num_ctas,
    )


@pytest.mark.parametrize(
    ("name", "implementation"),
    slow_except([("whole", "xla"), ("the MLP", "xla")], itertools.product(PARTS, product_chain.PLAIN)),
)
def test_plain_jax_is_right_and_padding_reaches_no_other_row(name, implementation):
    shapes = PARTS[name]
    x, constants = host_arrays(shapes, 5)
    x, residual, weights = jax.tree.map(jnp.asarray, (x, *constants))
    got = chain(x, residual, weights, eps=shapes.eps, implementation=implementation)
    assert (got[1] is None) == (shapes.qkv is None) and got[0].dtype == x.dtype
    assert host_error(shapes, x, constants, got) <= TOLERANCE


def test_the_oracle_is_exact_for_weights_that_one_sees_through():
    D = 128
    eye = np.eye(D, dtype=np.float32)
    weights = product_chain.Weights(
        np.stack([eye * 50, eye], axis=1), eye, out_AD=2 * eye, mlp_norm_D=np.ones(D), qkv_DQ=eye, next_norm_D=np.ones(D)
    )
    x = np.full((1, D), 0.5, np.float32)
    h, q = host_chain(x, np.ones((1, D), np.float32), weights, 0.0)
    np.testing.assert_allclose(h, np.full((1, D), 2 + 50))  # norm 1, silu(50) * 1
    np.testing.assert_allclose(q, np.ones((1, D)))


def test_what_is_not_taken_is_refused():
    x, (residual, weights) = jax.tree.map(jnp.asarray, host_arrays(PARTS["whole"], 2))
    call = partial(chain, eps=1e-5, implementation="xla")
    with pytest.raises(ValueError, match="no implementation 'cuda' of chains of products"):
        chain(x, residual, weights, eps=1e-5, implementation="cuda")
    with pytest.raises(ValueError, match="out_AD comes with mlp_norm_D"):
        call(x, residual, replace(weights, mlp_norm_D=None))
    with pytest.raises(ValueError, match=r"down_FD is bfloat16 \[256, 128\]; x asks for bfloat16 \[256, 256\]"):
        call(x, residual, replace(weights, down_FD=weights.down_FD[:, :128]))
    with pytest.raises(ValueError, match="x has 384 values a row, but gate_up_DCF takes 256"):
        call(x, residual, replace(weights, out_AD=None, mlp_norm_D=None))
    with pytest.raises(ValueError, match="'mosaic' of chains of products does not take 2 rows of float32.*use 'xla'"):
        wide = jax.tree.map(lambda array: array.astype(jnp.float32), (x, residual, weights))
        chain(*wide, eps=1e-5, implementation="mosaic")


def test_the_kernel_takes_few_rows_of_whole_blocks(monkeypatch):
    monkeypatch.setattr(_compat, "has_mosaic", lambda: True)
    call = partial(candidates, platform="gpu", dtype="bfloat16", num_rows=16, widths=(256, 256, 256))
    assert call() == ("mosaic", "xla")
    for change in ({"num_rows": 65}, {"widths": (256, 200, 256)}, {"dtype": "float32"}, {"platform": "cpu"}):
        assert call(**change) == ("xla",), change


@pytest.mark.parametrize("num_rows", [1, 16, 64])
@pytest.mark.parametrize("shapes", [LLAMA_1B, chain_cases.LLAMA_8B, chain_cases.QWEN3_600M], ids=str)
def test_ctas_have_equal_shares_that_are_whole_together(shapes, num_rows):
    for product in plan_of(shapes, num_rows, 132).products:
        assert product.num_units * product.num_steps * BLOCK * STEP == product.num_inputs * product.num_outputs
        ideal = product.num_blocks * product.num_inputs / STEP / 132
        most = -(-product.num_units // 132) * product.num_steps
        assert most <= max(1.5 * ideal, math.ceil(ideal) + 1), "steps of the CTA that has the most"


def test_the_parts_of_a_layer_are_those_with_which_cores_read_the_least():
    parts = [product.num_parts for product in plan_of(LLAMA_1B, 16, 132).products]
    assert parts == [8, 2, 8, 16]
    assert with_parts(Product(2048, 3072), 17, 132).num_parts == 4


def test_counters_share_no_place():
    plan = plan_of(LLAMA_1B, 16, 132)
    counters, numbers = Counters(plan), range(4)
    places = [Counters.LEFT, *map(counters.done, numbers)]
    places += [counters.parts(i) + 32 * half for i in numbers for half in range(2 * plan.products[i].num_blocks)]
    assert len(set(places)) == len(places) and max(places) < 4 * counters.num_words


def test_a_core_has_the_registers_and_the_shared_memory():
    asked = 128 * (streams.CONSUMERS * streams.CONSUMER_REGISTERS + 2 * streams.PRODUCER_REGISTERS)
    assert asked <= 65536, "a consumer that asks for more waits forever"
    for rows, stages in streams.ROW_STAGES.items():
        of_rows = stages * rows * STEP * 2
        assert of_rows + 4 * streams.STAGE_BYTES <= streams.RING_BYTES
        assert streams.RING_BYTES + streams.CONSUMERS * 4 * finish.scratch_words(rows) <= 226 << 10


SIMULATED = {
    # (shapes, rows, CTAs, seed)
    "a row": (Shapes(128, 256, 512, 128), 1, 3, 0),
    "rows of two tiles, parts": (Shapes(256, 256, 384, 256), 9, 5, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_ctas_that_drift_apart_finish_the_same_and_leave_the_counters_zero(name):
    shapes, num_rows, num_ctas, seed = SIMULATED[name]
    plan = plan_of(shapes, num_rows, num_ctas)
    assert any(product.num_parts > 1 for product in plan.products)
    x, (residual, weights) = host_arrays(shapes, num_rows)
    x = np.nan_to_num(x.astype(np.float32)).astype(x.dtype)
    arrays = {"x": x, "residual": residual, "norm_weight0": weights.mlp_norm_D, "norm_weight2": weights.next_norm_D}
    in_order = (weights.out_AD, weights.gate_up_DCF, weights.down_FD, weights.qkv_DQ)
    arrays |= {f"weight{i}": weight for i, weight in enumerate(in_order)}
    simulated = SimulatedChain(plan, arrays, num_ctas, seed)
    first, second = simulated.run(), simulated.run()
    assert not simulated.counters.any()
    for found in (first, second):
        error = host_error(shapes, x, (residual, weights), (found["out2"], found["out3"]))
        assert error <= TOLERANCE
    assert all(first[name].tobytes() == second[name].tobytes() for name in ("out2", "out3"))


def test_the_cache_is_asked_for_what_comes_next_and_for_nothing_else():
    machine, sizes = Machine(1), {"first": 40_000, "second": waiting.UPCOMING_BYTES}
    arrays = [np.zeros(size // 4, np.int32) for size in sizes.values()]
    arrays[1] = arrays[1][: (waiting.UPCOMING_BYTES - 40_000) // 4]  # more is not asked for
    pointers = tuple(machine.place(0, array) for array in arrays)
    text = waiting.prefetch(sizes, 3)
    assert sum(int(count) for count in re.findall(r"], (\d+);", text)) > 0.99 * waiting.UPCOMING_BYTES / 3
    machine.run([[Launch(text, pointers, 3, 128)]])


def test_a_wait_that_takes_too_long_ends_the_program():
    plan, machine = plan_of(SMALL, 1, 2), Machine(1)
    workspace = machine.place(0, np.zeros(Counters(plan).num_words, np.int32))
    text = waiting.await_product(("workspace",), plan, 0).replace(str(waiting.POLLS_PER_LOOK - 1), "15")
    text = text.replace(str(int(waiting.WAIT_SECONDS * 1e9)), "1000000000")
    with pytest.raises(TrapError):
        machine.run([[Launch(text, (workspace,), 1, 128)]])


INTERPRETED = {
    # (shapes, rows, CTAs)
    "whole": (Shapes(128, 256, 256, 128), 5, 3),
    "the MLP, parts": (Shapes(128, 512, None, None), 9, 6),
}


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_kernel_in_the_interpreter(name):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    shapes, num_rows, num_ctas = INTERPRETED[name]
    params = _compat.mosaic().InterpretGPUParams(
        out_of_bounds_reads="uninitialized", uninitialized_memory="zero", detect_races=True
    )
    x, constants = host_arrays(shapes, num_rows)
    given = jax.tree.map(jnp.asarray, (x, *constants))
    got = mosaic.chain(*given, eps=shapes.eps, interpret=params, num_ctas=num_ctas)
    assert host_error(shapes, x, constants, got) <= TOLERANCE
    assert not gpu_callbacks.get_races().races_found


@needs_mosaic
@pytest.mark.slow
def test_rings_go_on_from_product_to_product_in_the_interpreter():
    """All products in one kernel, of given arrays: CTAs with several units, and with none."""
    plan, rng = plan_of(Shapes(128, 256, 384, 640), 3, 2), np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)

    numbers, products = range(4), [replace(product, num_parts=1) for product in plan.products]
    plan = replace(plan, products=tuple(products))
    arrays = {streams.input_name(plan, i): draw(3, products[i].num_inputs) for i in numbers}
    arrays |= {f"weight{i}": draw(*weight_shape(products[i])) for i in numbers}
    results = {
        f"sums{i}": jax.ShapeDtypeStruct((products[i].num_sums, products[i].num_outputs, 8), jnp.float32) for i in numbers
    }

    def keep(refs, index, unit, sums):
        outputs = pl.ds(unit * BLOCK + jax.lax.axis_index("wg") * HALF, HALF)
        for i, each in enumerate(sums):
            refs[f"sums{index}"][i, outputs] = each

    surroundings = streams.Surroundings(keep, *[lambda *_: None] * 5)
    params = _compat.mosaic().InterpretGPUParams(out_of_bounds_reads="uninitialized", uninitialized_memory="zero")
    found = streams.launch(plan, numbers, arrays, results, {}, 2, surroundings, params)
    for i in numbers:
        x, weight = (np.asarray(arrays[name], np.float32) for name in (streams.input_name(plan, i), f"weight{i}"))
        expected = np.einsum("tk,kcn->cnt", x, weight.reshape(len(weight), products[i].num_sums, -1))
        np.testing.assert_allclose(found[f"sums{i}"][..., :3], expected, rtol=1e-4, atol=1e-3)


def weight_shape(product):
    return (product.num_inputs, 2, product.num_outputs) if product.gated else (product.num_inputs, product.num_outputs)


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 64])
def test_the_kernel_lowers_for_a_gpu(num_rows):
    arrays = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, host_arrays(SMALL, num_rows)))
    call = jax.jit(lambda x, residual, weights: chain(x, residual, weights, eps=1e-5, upcoming=[x], implementation="mosaic"))
    with a_gpu_to_lower_for():
        lowered = call.trace(arrays[0], *arrays[1]).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("custom_call @mosaic_gpu") == 1


@pytest.mark.slow
def test_cases_at_an_engines_start_pass_by_plain_jax():
    for case in checking.cases(replace(SMALL, of_heads=None), "xla", interpret=False):
        x, constants = case.make()
        assert case.error(x, constants, case.variants["xla"](*jax.tree.map(jnp.asarray, (x, *constants)))) <= case.tolerance


def test_layers_one_after_the_other_pass_by_plain_jax():
    case = checking.layers_case(SMALL, 4, 2, {"xla": False})
    x, constants = jax.tree.map(jnp.asarray, case.make())
    got = case.variants["xla"](x, *constants)
    assert 0 < case.error(x, constants, got) <= case.tolerance
    assert not case.error(x, (constants[0], constants[1][::-1]), got) <= case.tolerance, "layers differ"


def test_a_wrong_value_is_found():
    x, constants = host_arrays(SMALL, 8)
    h, q = host_chain(x, *constants, SMALL.eps)
    right = h.astype(x.dtype), q.astype(x.dtype)
    assert host_error(SMALL, x, constants, right) <= TOLERANCE
    for part, row, column in itertools.product(range(2), (0, 4), (0, 255)):
        wrong = [each.copy() for each in right]
        wrong[part][row, column] += 0.25
        assert host_error(SMALL, x, constants, wrong) > TOLERANCE


@pytest.mark.parametrize("kind", ["check", "speed"])
def test_the_kernel_is_checked_and_timed_where_there_is_a_gpu(kind, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(_compat, "has_mosaic", lambda: True)
    found = chain_cases.check_cases(tiny=False) if kind == "check" else chain_cases.speed_cases(tiny=False, tune=True)
    assert all(case.bytes > 0 and case.flops > 0 for case in found)
    assert {tuple(case.variants) for case in found} == {("mosaic", "xla"), ("mosaic", "mosaic upcoming", "xla")}
    rows = {int(case.name.split(", ")[1].split()[0]) for case in found}
    assert {1, 16, 64} <= rows and (kind == "speed" or {7, 8, 9, 17, 31, 33, 63} <= rows)
