"""Requests to engines that count tokens of experts, and the expected counts."""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxllm.engine.core import EngineCore
from jaxllm.layers.build import build_model
from jaxllm.layers.dense_attention import dense_step
from pallas_kernels.expert_choice import reference
from tests.helpers import engines, goldens

PROMPTS = [[5, 9, 2, 31, 7], [40] * 11, [3, 77], [8, 1, 60, 12, 33, 90, 4], [17, 18, 19]]
NUM_TOKENS = 9
OPTIONS: dict[str, Any] = {"enable_prefix_caching": False, "expert_load": True}


def run(core: EngineCore) -> list[list[int]]:
    """All tokens that the engine computes for the prompts: all but the last that it draws."""
    answers = engines.run(core, [engines.request(str(i), p, max_tokens=NUM_TOKENS) for i, p in enumerate(PROMPTS)])
    return [prompt + answers[str(i)].tokens[:-1] for i, prompt in enumerate(PROMPTS)]


EPLB = {"step_interval": 6, "window_size": 4}


def new_core(name: str, num_devices: int, num_redundant: int, **options: Any) -> EngineCore:
    return engines.make_core(
        name,
        **{**OPTIONS, "expert_load": None, **options},
        tensor_parallel_size=num_devices,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config={**EPLB, "num_redundant_experts": num_redundant},
    )


def check_greedy(name: str, sequences: list[list[int]]) -> None:
    """Each token after the prompt is the likeliest of a plain pass."""
    config, state = goldens.load(goldens.golden(name).directory)
    longest = max(map(len, sequences))
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        logits_TV = goldens.logits(config, state, sequence, pad_to=longest)[len(prompt) - 1 : -1]
        assert logits_TV.argmax(1).tolist() == sequence[len(prompt) :]


def chosen_by_hand(name: str, sequences: list[list[int]]) -> np.ndarray:
    """The tokens of each expert [mixtures, experts], chosen by NumPy from the logits of a plain pass."""
    config, state = goldens.load(goldens.golden(name).directory)
    rules = []

    @functools.partial(jax.jit, static_argnums=1)
    def logits_of_routers(state: Any, length: int, token_ids_T: jax.Array) -> list[Any]:
        step, seen = dense_step(token_ids_T, np.arange(length)), []
        choose = step.choose_experts

        def watch(logits_TE: jax.Array, bias_E: Any, is_real_T: Any, *, rule: Any) -> Any:
            seen.append((logits_TE, bias_E))
            rules.append(rule)
            return choose(logits_TE, bias_E, is_real_T, rule=rule)

        step.choose_experts = watch
        nnx.merge(nnx.graphdef(build_model(config)), state)(step)
        return seen

    longest = max(map(len, sequences))
    total = 0
    for sequence in sequences:
        padded = np.zeros(longest, np.int32)
        padded[: len(sequence)] = sequence
        total += np.stack(
            [
                np.bincount(reference.choose_experts(x[: len(sequence)], bias, rule=rule)[0].reshape(-1), minlength=x.shape[1])
                for (x, bias), rule in zip(logits_of_routers(state, longest, padded), rules, strict=False)
            ]
        )
    return total


def check(name: str, core: EngineCore) -> np.ndarray:
    """Ask the engine, and compare what it counts [mixtures, experts], which is returned."""
    before = np.array(core.expert_load()["tokens"])
    sequences = run(core)
    found = np.array(core.expert_load()["tokens"]) - before
    np.testing.assert_array_equal(found, chosen_by_hand(name, sequences))
    return found
