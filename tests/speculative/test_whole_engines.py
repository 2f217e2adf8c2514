"""An engine of four devices gives the same tokens with n-grams as drafts as without, whatever happens to it."""

from collections.abc import Callable, Iterator

import pytest

from jaxllm.engine.core import EngineCore
from tests.helpers import draft_workout, engines

pytestmark = pytest.mark.slow

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    core = engines.make_core(draft_workout.NAME, speculative_config=NGRAM, tensor_parallel_size=4)
    yield core
    core.shutdown()


@pytest.mark.parametrize("work_out", [draft_workout.interruptions, draft_workout.the_longest_requests])
def test_tokens_are_those_of_an_engine_without_drafts(core: EngineCore, work_out: Callable[[EngineCore], None]) -> None:
    engines.renew(core)
    work_out(core)
