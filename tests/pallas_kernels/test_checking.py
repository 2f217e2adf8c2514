"""The cases that an engine checks at its start: their oracles agree with plain JAX, and what they are for is in them."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checking import (
    attention_at_start,
    delta_decode,
    expert_choice,
    gated_delta,
    grouped_matmul,
    rope_cache_write,
    router_scores,
    sampling,
    segment_attention,
)
from pallas_kernels.checking.attention import Batch, call, make_arrays, worst_error
from pallas_kernels.checking.attention_at_start import Layer, attend, batches, host_arrays, host_error
from pallas_kernels.checking.case import Case
from pallas_kernels.checking.check import check
from pallas_kernels.expert_choice import Rule
from pallas_kernels.paged_attention import reference
from scripts.kernels import grouped_matmul as grouped_matmul_cases
from tests.helpers.lowering import a_gpu_to_lower_for

TOY = Batch(
    "toy",
    decodes=(3, 0, 9),
    prompts=((4, 5), (0, 0), (3, 0)),
    num_kv_heads=2,
    num_groups=2,
    head_dim=16,
    page_size=8,
    dtype="float32",
    padding=2,
    poison=True,
    table_width=5,
)
VARIANTS = {
    "ragged": TOY,
    "decode": replace(TOY, prompts=(), padding=0),
    "window and cap": replace(TOY, window=4, soft_cap=2.0, scale=0.4),
    "few queries": replace(TOY, prompts=(), padding=0, num_queries=3, window=5),
    "sinks": replace(TOY, has_sinks=True),
    "fp8": replace(TOY, cache_dtype="float8_e4m3fn", has_scales=True, has_sinks=True),
    "bfloat16": replace(TOY, dtype="bfloat16"),
}
SHAPES = attention_at_start.Shapes("bfloat16", "bfloat16", 8, 4, 128, 16, 64, (Layer(0.1), Layer(0.1, 100)))


@pytest.mark.parametrize("stored", grouped_matmul_cases.STORED, ids=str)
def test_random_experts_are_as_large_as_weights(stored):
    """Else results would consist of biases alone."""
    weight = np.asarray(grouped_matmul.random_experts(stored, (2, 128, 256)).astype(jnp.float32))

    assert 0.5 < weight.std() * math.sqrt(256) < 2 and abs(weight.mean()) < weight.std()


def plain(function):
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_in_numpy_is_the_reference(name):
    batch = VARIANTS[name]
    q, constants = host_arrays(batch)
    got = np.asarray(plain(call(reference, batch))(q, *constants)).astype(np.float64)
    exact = 1e-5 if batch.dtype == "float32" else 1e-2
    np.testing.assert_allclose(got[: len(attend(batch, q, constants))], attend(batch, q, constants), rtol=exact, atol=exact)
    assert host_error(batch, q, constants, got) < exact
    assert worst_error(batch, jnp.asarray(q), tuple(map(jnp.asarray, constants)), jnp.asarray(got)) < exact


def test_one_wrong_head_shows_and_padding_must_be_finite():
    q, constants = host_arrays(TOY)
    got = np.asarray(plain(call(reference, TOY))(q, *constants))
    wrong, lost = got.copy(), got.copy()
    wrong[5, 1, 1] *= 1.01
    lost[-1] = np.nan
    assert host_error(TOY, q, constants, wrong) == pytest.approx(0.01, rel=0.01)
    assert math.isnan(host_error(TOY, q, constants, lost))


def test_arrays_of_host_and_device_have_the_same_shapes_and_what_nobody_owns_is_nan():
    host, device = host_arrays(VARIANTS["fp8"]), make_arrays(VARIANTS["fp8"])
    for a, b in zip(jax.tree.leaves(host), jax.tree.leaves(device), strict=True):
        assert np.shape(a) == b.shape and a.dtype == b.dtype
    keys = host[1][0].astype(np.float32)
    assert np.isnan(keys[0]).all() and np.isfinite(keys).all(axis=(1, 3)).sum() == sum(TOY.kv_lengths)


@pytest.mark.parametrize("num_kv_heads", [1, 8])
def test_the_ragged_batch_has_what_once_went_wrong(num_kv_heads):
    shapes = replace(SHAPES, num_kv_heads=num_kv_heads)
    for layer in shapes.layers:
        ragged, small, few, many = batches(shapes, layer)
        starts = np.concatenate([[0], np.cumsum(ragged.query_lengths)])
        longer = [(begin, new) for begin, new in zip(starts, ragged.query_lengths, strict=False) if new > 1]
        assert (6, 130) in longer and sum(begin % 8 > 0 for begin, _ in longer) > len(longer) / 2
        lengths = ragged.query_lengths
        assert any(lengths[i] == 1 and lengths[i - 1] > 1 and lengths[i + 1] > 1 for i in range(1, len(lengths) - 1))
        assert len(longer) * num_kv_heads * shapes.num_groups > 2 * 132, "more work than cores"
        assert lengths[-1] == 0 and ragged.padding and ragged.poison
        assert {1, 15, 16, 17} <= {new for new, _ in ragged.prompts if new}
        assert small.num_tokens == 16 and len(few.decodes) == 8 and len(many.decodes) == 24 and 0 in few.decodes
        if layer.window:
            assert {layer.window - 1, layer.window, layer.window + 1} <= {*ragged.kv_lengths, *few.decodes, *many.decodes}


def test_decodes_of_several_queries_are_checked_where_there_are_such():
    *others, few, many = batches(replace(SHAPES, num_queries=17), Layer(0.1, 100))
    assert others == batches(SHAPES, Layer(0.1, 100))
    assert (few.num_queries, len(few.decodes)) == (17, 8) and (many.num_queries, len(many.decodes)) == (17, 24)
    assert min(filter(None, few.decodes)) == 17 and 0 in few.decodes


def test_a_wide_window_is_checked_at_a_smaller_width():
    window = attention_at_start.MAX_WINDOW
    assert {batch.window for batch in batches(SHAPES, Layer(0.1, 10 * window))} == {window}


EXPERTS = grouped_matmul.Shapes("float32", num_experts=9, num_choices=3, width=32, hidden=16, has_biases=True)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_plain_experts_pass_and_a_wrong_token_or_padding_that_is_not_zero_do_not(activation):
    case = grouped_matmul.cases(replace(EXPERTS, activation=activation), "xla", interpret=False)[1]
    x, constants = case.make()
    (run,) = case.variants.values()
    got = np.asarray(plain(run)(x, *constants))
    assert case.error(x, constants, got) <= case.tolerance
    wrong = got.copy()
    wrong[[0, 1]] = wrong[[1, 0]]
    assert case.error(x, constants, wrong) > case.tolerance
    wrong = got.copy()
    wrong[-1, 0] = 1e-3
    assert case.error(x, constants, wrong) == math.inf
    assert math.isnan(case.error(x, constants, np.where(np.arange(len(got))[:, None] == 0, np.nan, got)))


def test_a_wrong_state_or_a_changed_one_of_another_row_does_not_pass():
    for case in gated_delta.cases(gated_delta.Shapes("float32", 2, 2, 16, 8), "xla", interpret=False):
        state, constants = case.make()
        (run,) = case.variants.values()
        out, after = map(np.asarray, plain(run)(state, *constants))
        assert case.error(state, constants, (out, after)) <= case.tolerance
        row_R = constants[5]
        for row in range(len(state) - 1):
            wrong = after.copy()
            wrong[row, 0, 0, 0, 0] += 1
            error = case.error(state, constants, (out, wrong))
            assert error == math.inf if row not in row_R else case.tolerance < error < math.inf
        wrong = out.copy()
        wrong[0, 0, 0, 0] += 1
        assert case.error(state, constants, (wrong, after)) > case.tolerance


ROUTERS = (
    expert_choice.Shapes(128, Rule(8, renormalize=True)),
    expert_choice.Shapes(32, Rule(4, "softmax_of_chosen")),
    expert_choice.Shapes(160, Rule(6, "sigmoid", num_groups=8, top_groups=3, sums_two=True), has_bias=True),
)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "has_norms", "norm_offset"),
    [
        ("float32", "float32", False, 0.0),
        ("float32", "float32", True, 0.0),
        ("float32", "bfloat16", True, 1.0),
        ("bfloat16", "float8_e4m3fn", False, 0.0),
        ("bfloat16", "float8_e4m3fn", True, 1.0),
    ],
)
def test_plain_rope_and_write_pass_and_a_stray_write_does_not(dtype, cache_dtype, has_norms, norm_offset):
    scaled = cache_dtype == "float8_e4m3fn"
    shapes = rope_cache_write.Shapes(
        dtype, cache_dtype, 2, 2, 16, 8, has_norms=has_norms, norm_offset=norm_offset, has_scales=scaled
    )
    case = rope_cache_write.cases(shapes, "xla", interpret=False)[0]
    carry, constants = case.make()
    (run,) = case.variants.values()
    q, k, v = map(np.asarray, plain(run)(carry, *constants))
    assert case.error(carry, constants, (q, k, v)) <= case.tolerance
    stray = v.copy()
    page, slot = np.argwhere(np.isnan(v[:, 0, :, 0].astype(np.float32)))[0]
    stray[page, :, slot] = 0
    assert case.error(carry, constants, (q, k, stray)) == math.inf
    assert case.error(carry, constants, (q, v, k)) > case.tolerance
    assert math.isnan(case.error(carry, constants, (np.full_like(q, np.nan), k, v)))


def of_sampling(name: str) -> Case:
    shapes = sampling.Shapes(300, num_padded=9, num_top_values=5)
    (case,) = [case for case in sampling.cases(shapes, "triton", interpret=True) if case.name == name]
    return case


def test_argmax_takes_the_first_of_equals_and_no_padding():
    case = of_sampling("argmax")
    logits, _ = case.make()
    right = sampling.plain_argmax(jnp.asarray(logits))
    assert case.error(logits, (), right) == 0.0 and case.error(logits, (), right.at[0].add(1)) == math.inf
    assert np.all(logits[:, -9:] == -np.inf)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draw", "draw adjusted"])
def test_a_draw_must_be_the_largest_of_what_the_filters_keep(name):
    case = of_sampling(name)
    logits, params = case.make()
    (draw,) = case.variants.values()
    right = np.asarray(plain(draw)(logits, *params))
    assert case.error(logits, params, right) <= case.tolerance
    for row in range(len(right)):
        wrong = right.copy()
        wrong[row] = (right[row] + 1) % 291
        assert case.error(logits, params, wrong) > case.tolerance, row


def test_top_values_are_exact_but_for_logsumexp():
    case = of_sampling("top_values")
    logits, (own,) = case.make()
    right = plain(functools.partial(sampling.plain_top_values, k=5))(logits, own)
    assert case.error(logits, (own,), right) <= case.tolerance
    ids, values, rank, total = right
    assert case.error(logits, (own,), (ids.at[0, 1].add(1), values, rank, total)) == math.inf
    assert case.error(logits, (own,), (ids, values, rank.at[3].add(1), total)) == math.inf
    assert case.error(logits, (own,), (ids, values, rank, total * 1.001)) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.slow
@pytest.mark.newer
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_the_cases_lower_for_a_gpu():
    """Where there is none: what an engine on a GPU compiles at its start can at least be lowered."""
    common = {
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
        "num_kv_heads": 2,
        "num_groups": 4,
        "head_dim": 64,
        "page_size": 16,
    }
    attention = attention_at_start.Shapes(**common, table_width=8, layers=(Layer(0.1, 50),))
    found = [
        *attention_at_start.cases(attention, "triton", interpret=False),
        *rope_cache_write.cases(rope_cache_write.Shapes(**common, has_norms=True), "triton", interpret=False),
        *sampling.cases(sampling.Shapes(4096), "triton", interpret=False),
        *grouped_matmul.cases(replace(EXPERTS, dtype="bfloat16"), "triton", interpret=False),
        *grouped_matmul.cases(replace(EXPERTS, dtype="bfloat16", hidden=32, is_packed=True), "triton", interpret=False),
        *(case for shapes in ROUTERS for case in expert_choice.cases(shapes, "triton", interpret=False)),
        *gated_delta.cases(gated_delta.Shapes("bfloat16", 2, 2, 128, 96), "triton", interpret=False),
        *delta_decode.cases(delta_decode.Shapes("bfloat16", 2, 2, 128, 96), "triton", interpret=False),
        *router_scores.cases(router_scores.Shapes("bfloat16", 6, 300), "triton", interpret=False),
        *segment_attention.cases(segment_attention.Shapes("bfloat16", 16, 72), "triton", interpret=False),
    ]
    assert len(found) == 4 + 2 + 4 + 3 + 3 + 3 + 2 + 1 + 1 + 4
    with a_gpu_to_lower_for():
        for case in found:
            carry, constants = case.make()
            (function,) = case.variants.values()
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (carry, *constants))
            assert "triton" in jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text(), case.name


def toy_case(function, tolerance=0.0) -> Case:
    def make():
        return np.arange(8.0, dtype=np.float32), (np.float32(2),)

    def error(carry, constants, got):
        return float(np.abs(np.asarray(got) - carry - constants[0]).max())

    return Case("toy", make, {"one": function}, error, tolerance)


def test_cases_are_judged_in_their_order_and_nothing_runs_after_a_fatal_error():
    def breaks(*_):
        raise ValueError("no such\ninstruction")

    right, wrong, nan = (toy_case(f) for f in (lambda x, c: x + c, lambda x, c: x, lambda x, c: x * jnp.nan))
    faults = check([right, wrong, toy_case(breaks), nan])
    assert [fault and fault.text for fault in faults] == [
        None,
        "error 2, allowed 0",
        "ValueError: no such instruction",
        "error nan, allowed 0",
    ]
    faults = check([right, toy_case(breaks), nan], is_fatal=lambda error: isinstance(error, ValueError))
    assert len(faults) == 2 and faults[0] is None
