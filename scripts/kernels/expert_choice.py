"""The choice of experts by the kernel and by plain JAX."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.checking.case import Case
from pallas_kernels.checking.expert_choice import TOLERANCE, Shapes, host_arrays, host_error, run
from pallas_kernels.expert_choice import IMPLEMENTATIONS, PLAIN, Rule

QWEN3_30B = Shapes(128, Rule(8, renormalize=True))
GPT_OSS_20B = Shapes(32, Rule(4, "softmax_of_chosen"))
DEEPSEEK_V3 = Shapes(
    256, Rule(8, "sigmoid", renormalize=True, scale=2.5, num_groups=8, top_groups=4, sums_two=True), has_bias=True
)


def speed_cases(tiny: bool, tune: bool) -> list[Case]:
    """Three models, from a token to a prompt."""
    if tiny:
        return [_case(Shapes(5, Rule(2)), num_tokens, is_timed=True) for num_tokens in (1, 7)]
    return [
        _case(shapes, num_tokens, is_timed=True)
        for shapes in (QWEN3_30B, GPT_OSS_20B, DEEPSEEK_V3)
        for num_tokens in (1, 64, 256, 8192)
    ]


def check_cases(tiny: bool) -> list[Case]:
    """All scorings, biases, groups, odd numbers of experts, a token and many."""
    if tiny:
        return [_case(Shapes(5, Rule(2, renormalize=True), has_bias=True), 6)]
    return [
        *(_case(QWEN3_30B, num_tokens) for num_tokens in (1, 2, 300, 8192)),
        *(_case(GPT_OSS_20B, num_tokens) for num_tokens in (1, 65)),
        *(_case(DEEPSEEK_V3, num_tokens) for num_tokens in (1, 500)),
        _case(Shapes(160, Rule(6, scale=16.0, num_groups=8, top_groups=3)), 100),
        _case(Shapes(64, Rule(6, renormalize=True), has_bias=True), 100),
        _case(Shapes(8, Rule(2, renormalize=True)), 100),
        _case(Shapes(384, Rule(8, "sigmoid", renormalize=True, scale=2.872), has_bias=True), 100),
        _case(Shapes(512, Rule(10, renormalize=True)), 100),
        _case(Shapes(128, Rule(1, "sigmoid")), 100),
        _case(Shapes(5, Rule(5, "softmax_of_chosen", scale=3.0)), 100),
        _case(Shapes(2, Rule(1)), 100),
    ]


def _case(shapes: Shapes, num_tokens: int, *, is_timed: bool = False) -> Case:
    rule, on_gpu = shapes.rule, jax.default_backend() == "gpu"
    notes = [rule.scoring] + ["renormalized"] * rule.renormalize + ["bias"] * shapes.has_bias
    notes += [f"{rule.top_groups} of {rule.num_groups} groups"] * (rule.num_groups > 1)
    case: dict[str, Any] = {"platform": jax.default_backend(), "num_experts": shapes.num_experts, "rule": rule}
    takes = [
        name
        for name, path in IMPLEMENTATIONS.items()
        if (name not in PLAIN or is_timed) and importlib.import_module(path).supports(interpret=not on_gpu, **case)
    ]
    variants = {name: functools.partial(run, rule=rule, implementation=name, interpret=not on_gpu) for name in takes}

    def make() -> tuple[Any, tuple[Any, ...]]:
        return jax.device_put(host_arrays(shapes, num_tokens))

    return Case(
        f"choice, {num_tokens} tokens e{shapes.num_experts} k{rule.top_k} {' '.join(notes)}",
        make,
        variants,
        functools.partial(host_error, rule=rule),
        TOLERANCE,
        bytes=4.0 * num_tokens * (shapes.num_experts + 2 * rule.top_k),
        feed=_depend,
    )


def _depend(logits: jax.Array, result: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The logits with one changed, which depends on the results: else equal calls would be made once."""
    return logits.at[0, 0].add(sum(leaf.sum().astype(jnp.float32) for leaf in result) * 1e-20)
