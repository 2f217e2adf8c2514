"""The switch interval of the process while engines copy blocks."""

import sys
from collections.abc import Iterator

import pytest

from jaxllm.runner.features.block_copies.short_turns import SECONDS, ShortTurns


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.003)
    yield
    sys.setswitchinterval(before)


def test_the_last_of_several_engines_gives_the_setting_back() -> None:
    turns = ShortTurns()
    turns.begin()
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(SECONDS)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(SECONDS), "the other engine needs it"
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(0.003)


@pytest.mark.parametrize("own", [0.00001, 0.5])
def test_what_the_process_sets_itself_stays(own: float) -> None:
    turns = ShortTurns()
    turns.begin()
    sys.setswitchinterval(own)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(own)
    turns.begin()
    assert sys.getswitchinterval() == pytest.approx(min(own, SECONDS)), "a shorter one is not made longer"
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(own)
