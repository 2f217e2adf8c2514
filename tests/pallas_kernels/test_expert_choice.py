"""The choice of experts by every implementation, against a stable sort in NumPy and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.checking.expert_choice import TOLERANCE, Shapes, cases, host_arrays, host_error
from pallas_kernels.expert_choice import Rule, candidates, choose, choose_experts, reference
from tests.helpers.slow import slow_except

RULES = {
    "softmax": Shapes(128, Rule(8)),
    "softmax, renormalized": Shapes(64, Rule(6, renormalize=True, scale=1.5)),
    "softmax with bias": Shapes(5, Rule(3, renormalize=True), has_bias=True),
    "softmax, largest of a group": Shapes(160, Rule(6, scale=16.0, num_groups=8, top_groups=3)),
    "sigmoid": Shapes(128, Rule(1, "sigmoid")),
    "sigmoid with bias": Shapes(160, Rule(7, "sigmoid", renormalize=True, scale=2.5), has_bias=True),
    "sum of two of a group": Shapes(
        64, Rule(4, "sigmoid", renormalize=True, num_groups=8, top_groups=4, sums_two=True), has_bias=True
    ),
    "odd groups": Shapes(15, Rule(4, "sigmoid", num_groups=3, top_groups=2, sums_two=True), has_bias=True),
    "fewer in the chosen groups than are chosen": Shapes(12, Rule(5, "sigmoid", num_groups=4, top_groups=1)),
    "softmax of chosen": Shapes(32, Rule(4, "softmax_of_chosen", scale=2.0)),
    "all are chosen": Shapes(5, Rule(5, "softmax_of_chosen")),
    "one expert": Shapes(1, Rule(1, renormalize=True)),
    "sparsemixer": Shapes(16, Rule(2, "sparsemixer", jitter=0.01)),
}


BY_IMPLEMENTATION = [
    (name, implementation)
    for name, shapes in RULES.items()
    for implementation in candidates(platform="cpu", num_experts=shapes.num_experts, rule=shapes.rule, interpret=True)
]
QUICK = ("sigmoid with bias", "softmax, largest of a group", "sparsemixer")


@pytest.mark.parametrize(
    ("name", "implementation"), slow_except([case for case in BY_IMPLEMENTATION if case[0] in QUICK], BY_IMPLEMENTATION)
)
def test_choice_against_a_stable_sort(name, implementation):
    shapes = RULES[name]
    (case,) = cases(shapes, implementation, interpret=True, num_tokens=12)
    logits, constants = case.make()
    (run,) = case.variants.values()
    expert_Tk, weight_Tk = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})(logits, *constants)
    assert expert_Tk.dtype == jnp.int32 and weight_Tk.dtype == jnp.float32
    assert expert_Tk.shape == weight_Tk.shape == (12, shapes.rule.top_k)
    assert case.error(logits, constants, (expert_Tk, weight_Tk)) < TOLERANCE


@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize(("rule", "expected"), [(Rule(3), [1, 3, 0]), (Rule(4, "softmax_of_chosen"), [1, 3, 0, 2])])
def test_of_equals_the_first_is_chosen_and_minus_infinity_last(rule, expected, implementation):
    logits_TE = jnp.array([[0.0, 2.0, -jnp.inf, 2.0, -jnp.inf]])
    expert_Tk, weight_Tk = choose_experts(logits_TE, rule=rule, implementation=implementation, interpret=True)
    assert expert_Tk.tolist() == [expected] and weight_Tk[0, 0] == weight_Tk[0, 1]


def test_wrong_choices_are_found():
    shapes = RULES["sigmoid with bias"]
    logits, constants = host_arrays(shapes, 12)
    right = reference.choose_experts(np.where(np.isnan(logits), 0, logits), *constants[1:], rule=shapes.rule)
    expert_Tk, weight_Tk = np.where(constants[0][:, None], right[0], -1), np.where(np.isnan(logits[:, :1]), np.nan, right[1])
    error = functools.partial(host_error, logits, constants, rule=shapes.rule)
    assert error((expert_Tk, weight_Tk)) == 0
    twice, outside, swapped, lost, padded = (expert_Tk.copy() for _ in range(5))
    twice[0, 1] = twice[0, 0]
    outside[0, 0] = shapes.num_experts
    swapped[1, [0, 1]] = swapped[1, [1, 0]]
    lost[3, -1] = np.setdiff1d(np.arange(shapes.num_experts), lost[3])[-1]
    padded[-1] = right[0][-1]
    for wrong in (twice, outside, swapped, lost, padded):
        assert error((wrong, weight_Tk)) > TOLERANCE
    assert error((expert_Tk, weight_Tk * 1.001)) > TOLERANCE
    assert error((expert_Tk, np.nan_to_num(weight_Tk))) > TOLERANCE


def test_bad_input_is_named():
    logits_TE = jnp.zeros((2, 6))
    with pytest.raises(ValueError, match="no scoring 'tanh' of experts; there are softmax"):
        choose_experts(logits_TE, rule=Rule(2, "tanh"))
    with pytest.raises(ValueError, match="top_k is 7, expected 1 to 6"):
        choose_experts(logits_TE, rule=Rule(7))
    with pytest.raises(ValueError, match="num_groups is 4, which does not divide 6 experts"):
        choose_experts(logits_TE, rule=Rule(2, num_groups=4))
    with pytest.raises(ValueError, match=r"bias_E is \[5\], expected \[6\]"):
        choose_experts(logits_TE, jnp.zeros(5), rule=Rule(2))
    with pytest.raises(ValueError, match=r"is_real_T is \[3\], expected \[T\] for logits_TE \[2, 6\]"):
        choose_experts(logits_TE, None, jnp.ones(3, bool), rule=Rule(2))
    with pytest.raises(
        ValueError, match="'triton' of the choice of experts does not take 6 experts with the scoring 'sparsemixer'"
    ):
        choose_experts(logits_TE, rule=Rule(2, "sparsemixer"), implementation="triton")
    with pytest.raises(ValueError, match="no implementation 'cuda' of the choice of experts"):
        choose_experts(logits_TE, rule=Rule(2), implementation="cuda")


def test_the_kernel_is_chosen_on_its_own_only_where_it_was_verified():
    assert candidates(platform="cpu", num_experts=128, rule=Rule(8)) == ("xla",)
    assert candidates(platform="gpu", num_experts=128, rule=Rule(8)) == ("triton", "xla")
    assert candidates(platform="gpu", num_experts=513, rule=Rule(8)) == ("xla",)
    assert choose(platform="gpu", num_experts=128, rule=Rule(8)) == "xla", "this machine's device has no record"
