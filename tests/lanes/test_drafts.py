"""Lanes with drafts answer as one device does without, whatever proposes them; enough drafts are right to notice if they were not used."""

from dataclasses import replace

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.prepare import lay_out, resolve_sizes
from jaxllm.engine.features import Features
from jaxllm.model_parts import MoE
from jaxllm.runner.drafter import NO_DRAFT
from jaxllm.speculative.control import AdaptiveControl
from tests.helpers import engines, every_kind, goldens
from tests.helpers.every_kind import check
from tests.lanes.conftest import NAME
from tests.lanes.test_requests import PROMPTS, pinned, requests
from tests.speculative.by_hand import MAX_LENGTH, target_hidden_states
from tests.speculative.checkpoints import MTP_TARGET, NextTokenOracle, write_with_next_token_layer

LANES = {"data_parallel_size": 2, "enable_expert_parallel": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
ITSELF = {"method": "draft_model", "model": str(goldens.golden(NAME).directory), "num_speculative_tokens": 2}


@pytest.fixture(autouse=True)
def _drafts_in_all_steps(monkeypatch):
    """However long they take on this machine."""
    monkeypatch.setattr(AdaptiveControl, "note_seconds", lambda *_: None)


@pytest.fixture(scope="module")
def expected(one_device):
    engines.renew(one_device)
    return engines.run(one_device, requests())


@pytest.fixture(scope="module")
def two_lanes(new_core):
    """A model that drafts for itself. As a draft model each lane has all its experts, as the target they share them."""
    core = new_core(**LANES, speculative_config=ITSELF)
    yield core
    core.shutdown()


@pytest.fixture
def core(two_lanes):
    return engines.renew(two_lanes)


def test_n_grams_while_one_lane_has_nothing_and_from_cached_prefixes(new_core):
    core = new_core(**LANES, speculative_config=NGRAM)
    results = goldens.golden(NAME).results
    for lanes in ((0, 1), (1,), (0, 1)):
        wanted = [engines.request(str(i), result.prompt, max_tokens=64) for i, result in enumerate(results)]
        before = core.stats()
        found = engines.run(core, [pinned(request, lanes[i % len(lanes)]) for i, request in enumerate(wanted)])
        assert [answer.tokens for answer in found.values()] == [result.tokens for result in results]
        after = core.stats()
        num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
        print(num_accepted)
        assert num_accepted > 2 and len(after.accepted_per_position) == 2
        assert sum(after.accepted_per_position) - sum(before.accepted_per_position or (0,)) == num_accepted
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_num_batched_tokens": 21}, {"num_blocks": 8, "max_in_flight": 3}], ids=str)
def test_requests_of_every_kind(core, expected, options):
    before = core.stats().num_accepted_tokens
    every_kind.check_twice(core, requests, expected, **options)
    assert core.stats().num_accepted_tokens > before + 50


@pytest.mark.slow
@pytest.mark.parametrize("lane", [0, 1])
def test_one_lane_has_drafts_while_the_other_has_nothing(core, expected, lane):
    before = core.stats()
    check(engines.run(core, [pinned(request, lane) for request in requests()]), expected)
    assert core.stats().num_accepted_tokens > before.num_accepted_tokens + 50
    assert core.scheduler.lanes[1 - lane].stats().num_step_tokens == 0
