"""Whole engines with adapters against the model with the same adapter merged into its weights, computed by dense attention."""

import numpy as np
import pytest

from tests.helpers import engines, goldens, peft_files
from tests.helpers.adapted import add, check, run

ADAPTERS = {
    "all layers": {"rank": 4},
    "rank of its own": {
        "rank": 16,
        "rank_pattern": {"o_proj": 3, "up_proj": 8},
        "alpha_pattern": {"q_proj": 5},
        "rslora": True,
    },
    "few modules": {"rank": 8, "targets": ["v_proj", "down_proj"], "layers": [1], "strength": 2.0},
}
"""More than slots. The weights are so large that every answer changes."""


@pytest.fixture(
    scope="module",
    params=[("qwen3", 1), pytest.param(("llama_gqa", 4), marks=pytest.mark.slow)],
    ids=lambda p: f"{p[0]} {p[1]}",
)
def served(request, tmp_path_factory):
    """A model, its adapters, and an engine that has them."""
    name, size = request.param
    model, folder = goldens.FOLDER / name, tmp_path_factory.mktemp("adapters")
    core = engines.make_core(
        name, tensor_parallel_size=size, num_gpu_blocks_override=300, enable_lora=True, max_loras=2, max_lora_rank=16
    )
    for seed, (adapter, options) in enumerate(ADAPTERS.items()):
        add(core, adapter, peft_files.write(folder / adapter, model, seed=seed, **options))
    yield model, folder, core
    core.shutdown()


def test_answers_are_those_of_merged_models(served, tmp_path):
    """Of all adapters and of none in the same steps, with more adapters than slots."""
    model, folder, core = served
    names = [None, *ADAPTERS]
    answers = run(core, names, prompt_logprobs=0)
    check(model, answers[None])
    for name in ADAPTERS:
        check(peft_files.merged(model, folder / name, tmp_path / name), answers[name])
        assert all(a.tokens != b.tokens for a, b in zip(answers[name], answers[None], strict=True))


def test_neighbours_and_cached_prefixes_do_not_matter(served):
    """Other adapters' keys and values of the same prompts are in the cache."""
    _, _, core = served
    engines.reschedule(core)
    together = run(core, [None, *ADAPTERS])
    for name in (None, *ADAPTERS):
        alone = run(core, [name])
        for first, second in zip(together[name], alone[name], strict=True):
            assert first.tokens == second.tokens
            np.testing.assert_allclose(first.token_logprobs.logprobs, second.token_logprobs.logprobs, atol=2e-5)
        assert [answers[name][-1].num_cached_tokens for answers in (together, alone)] == [0, 32]
