"""Every dialect, whatever the pieces in which its text arrives."""

import pytest

from server.dialects import REASONING_DIALECTS, TOOL_DIALECTS
from tests.server.dialects.samples import SAMPLES, Sample, parse

ALL = pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)


def test_every_dialect_has_a_sample() -> None:
    assert {sample.tool for sample in SAMPLES.values()} >= set(TOOL_DIALECTS)
    assert {sample.reasoning for sample in SAMPLES.values()} >= set(REASONING_DIALECTS)


@ALL
def test_an_answer_means_the_same_whole_and_letter_by_letter(sample: Sample) -> None:
    assert parse(sample.text, sample.tool, sample.reasoning, **sample.options) == sample.message
    assert parse(list(sample.text), sample.tool, sample.reasoning, **sample.options) == sample.message


@ALL
def test_an_answer_means_the_same_cut_anywhere(sample: Sample) -> None:
    """At every second letter, so within each mark; at all of them at once: above."""
    for cut in range(1, len(sample.text), 2):
        pieces = [sample.text[:cut], sample.text[cut:]]
        assert parse(pieces, sample.tool, sample.reasoning, **sample.options) == sample.message, cut


@ALL
def test_complete_calls_mean_the_same_when_they_are_held(sample: Sample) -> None:
    assert parse(sample.text, sample.tool, sample.reasoning, **{**sample.options, "hold_calls": True}) == sample.message
