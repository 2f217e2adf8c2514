"""A model that computes NaN or infinity for a request: the request ends with a clear error, the others continue."""

import jax
import numpy as np
import pytest

from jaxllm.request import ErrorKind, FinishReason
from server.endings import failure
from tests.helpers import engines, goldens

NAME = "llama_gqa"
DAMAGED = 7
"""A token whose embedding holds NaN."""
REQUESTS = {
    "greedy": {},
    "random": {"temperature": 1.0, "top_p": 0.9},
    "full": {"temperature": 1.0, "presence_penalty": 0.5},
    "logprobs": {"logprobs": 3},
}


@pytest.fixture(scope="module")
def core():
    core = engines.make_core(NAME, max_num_seqs=8, decode_buckets=(8,))
    yield core
    core.shutdown()


@pytest.fixture
def damage(core):
    """Sets elements of the weight of this name, until the test ends."""
    whole = core.runner.params

    def set_elements(name: str, index, value: float) -> None:
        paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(core.runner.weights.structures[0], whole))[0]
        [at] = [i for i, (path, _) in enumerate(paths) if name in jax.tree_util.keystr(path)]
        weight = np.array(whole[at])
        weight[index] = value
        params = list(whole)
        params[at] = jax.device_put(weight, whole[at].sharding)
        core.runner.params = tuple(params)

    yield set_elements
    core.runner.params = whole


def run(core, prompts: dict[str, list[int]]):
    requests = [engines.request(name, prompt, max_tokens=6, **REQUESTS[name.split()[0]]) for name, prompt in prompts.items()]
    return engines.run(engines.reschedule(core, max_in_flight=3), requests)


@pytest.mark.slow
def test_only_the_requests_whose_logits_are_not_finite_end(core, damage):
    clean = [token for token in goldens.golden(NAME).results[0].prompt if token != DAMAGED]
    expected = run(core, dict.fromkeys(REQUESTS, clean))
    damage("embed", DAMAGED, np.nan)
    results = run(core, dict.fromkeys(REQUESTS, clean) | {f"{name} damaged": [*clean, DAMAGED, 3] for name in REQUESTS})
    for name in REQUESTS:
        assert results[name].tokens == expected[name].tokens
        end = results[f"{name} damaged"]
        assert (end.finish_reason, end.error_kind, end.tokens) == (FinishReason.ERROR, ErrorKind.NOT_FINITE, [])
        assert "NaN or infinity" in end.stop_reason
    assert core.stats().num_not_finite == len(REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", REQUESTS)
def test_one_bad_column_of_the_head_is_found_too(core, damage, name, value):
    damage("head", (slice(None), 40), value)
    end = run(core, {name: [3, 4, 5]})[name]
    assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, ErrorKind.NOT_FINITE)


def test_clients_are_told():
    error = failure(ErrorKind.NOT_FINITE)
    assert (error.status, error.code) == (500, "not_finite")
