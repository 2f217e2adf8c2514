import pytest

from jaxllm.acceptance import Acceptance, report_lines
from tests.helpers.fake_engine_core import fake_stats

EARLIER = fake_stats(num_drafts=10, num_draft_tokens=20, num_accepted_tokens=5, accepted_per_position=(4, 1))
LATER = fake_stats(num_drafts=14, num_draft_tokens=28, num_accepted_tokens=11, accepted_per_position=(8, 3))


def test_acceptance_between_two_totals() -> None:
    found = Acceptance.of(LATER) - Acceptance.of(EARLIER)  # type: ignore[arg-type]
    assert (found.mean_length, found.rate, found.rates_per_position) == (2.5, 0.75, [1.0, 0.5])
    assert found.report() == {
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 4,
        "spec_decode_draft_tokens": 8,
        "spec_decode_accepted_tokens": 6,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.5],
    }
    assert dict(report_lines(found.report()))["acceptance by position"] == "100% 50%"
    assert Acceptance.of(LATER) - Acceptance() == Acceptance.of(LATER), "nothing before"  # type: ignore[arg-type]


def test_nothing_drafted_is_no_acceptance() -> None:
    assert report_lines({}) == []
    found = Acceptance(accepted_per_position=(0, 0))
    assert (found.mean_length, found.rate, found.rates_per_position) == (1, 0, [0, 0])
    assert found.report()["spec_decode_acceptance_length"] == pytest.approx(1)
