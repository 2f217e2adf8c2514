"""Whole engines give the same tokens with drafts of each kind as without, whatever happens to them."""

from collections.abc import Callable

import pytest

from jaxllm.engine.core import EngineCore
from tests.helpers import draft_workout, engines

pytestmark = pytest.mark.slow

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("options", "size", "workouts"),
    [
        (NGRAM, 1, (draft_workout.interruptions, draft_workout.the_longest_requests)),
        (NGRAM, 4, (draft_workout.the_longest_requests,)),
    ],
    ids=["n-gram", "n-gram of 4 devices"],
)
def test_tokens_are_those_of_an_engine_without_drafts(
    options, size, workouts: tuple[Callable[[EngineCore], None], ...]
) -> None:
    core = engines.make_core(draft_workout.NAME, speculative_config=options, tensor_parallel_size=size)
    for work_out in workouts:
        engines.renew(core)
        work_out(core)
    core.shutdown()
