"""An engine of two devices gives the same tokens with n-grams as drafts as without, whatever happens to it."""

import pytest

from tests.helpers import draft_workout, engines

pytestmark = pytest.mark.slow

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def test_tokens_are_those_of_an_engine_without_drafts() -> None:
    core = engines.make_core(draft_workout.NAME, speculative_config=NGRAM, tensor_parallel_size=2)
    engines.renew(core)
    few_tokens = draft_workout.FULL[3]  # so that they repeat themselves
    draft_workout.interruptions(core, (draft_workout.DECODED[0], few_tokens))
    core.shutdown()
