"""Lanes with drafts answer as one device does without, and most of the drafts of a model that drafts for itself are right."""

import pytest

from jaxllm.speculative.control import AdaptiveControl
from tests.helpers import engines, every_kind, goldens
from tests.lanes.conftest import NAME
from tests.lanes.test_requests import PROMPTS, pinned, requests

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LANES = {"data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(autouse=True)
def _drafts_in_all_steps(monkeypatch):
    """However long they take on this machine."""
    monkeypatch.setattr(AdaptiveControl, "note_seconds", lambda *_: None)


@pytest.fixture(scope="module")
def expected(one_device):
    engines.renew(one_device)
    return engines.run(one_device, requests())


@pytest.fixture(scope="module")
def with_ngrams(new_core):
    core = new_core(**LANES, speculative_config=NGRAM)
    yield core
    core.shutdown()


@pytest.fixture
def core(with_ngrams):
    engines.renew(with_ngrams)
    return with_ngrams


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 21}, {"num_blocks": 8, "max_in_flight": 3}],
    ids=str,
)
def test_requests_of_every_kind_have_the_answers_of_one_device_without_drafts(core, expected, options):
    before = core.stats().num_accepted_tokens
    every_kind.check_twice(core, requests, expected, **options)
    assert core.stats().num_accepted_tokens > before + 20
