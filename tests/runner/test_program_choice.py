"""A step takes the smallest program that can do its work; while that one is missing, another that is there and can."""

import pytest

from jaxllm.kernel_policy import CPU
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.program_choice import ProgramChoice
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.rows import LogprobsKind
from jaxllm.sampling.variants import Variant

ADAPTERS = ("adapters",)
GREEDY, RANDOM, FULL = Variant.GREEDY, Variant.RANDOM, Variant.FULL
BUCKETS = Buckets(
    CPU, decode_rows=(2, 4, 8), tokens=(16, 64, 256), sample_rows=(4, 8), max_rows=8, rows_apart=(4, 8), widths=(1, 3)
)


def decode(size: int, variant: Variant, **more) -> ProgramKey:
    return ProgramKey("decode", size, variant, **more)


class Shop:
    """A choice among programs that a test makes one by one."""

    def __init__(self, *there: ProgramKey, reach: int | None = None):
        self.there, self.asked = set(there), []
        self.choice = ProgramChoice(BUCKETS, is_there=self.there.__contains__, ask=self.asked.append, reach=reach)


@pytest.mark.parametrize(
    ("there", "found"),
    [
        ([(8, RANDOM)], (8, RANDOM)),
        ([(8, GREEDY), (8, RANDOM)], (8, GREEDY)),
        ([(8, GREEDY), (2, RANDOM), (4, GREEDY)], (2, RANDOM)),
        ([(8, RANDOM), (4, GREEDY), (2, GREEDY)], (2, GREEDY)),
        ([], (2, GREEDY)),
    ],
)
def test_a_greedy_decode_takes_the_next_program_that_can_do_its_work(there, found):
    """The smallest size first, and of a size the greedy variant; without any it waits for its own."""
    shop = Shop(*(decode(*key) for key in there))
    assert shop.choice.decode(1, GREEDY, 1, ()) == found
    assert shop.choice.decode(2, GREEDY, 1, ()) == found
    assert shop.asked == ([] if found == (2, GREEDY) else [decode(2, GREEDY)]), "asked once for what it did without"


def test_a_stand_in_samples_no_less_and_has_the_same_width_and_adapters():
    shop = Shop(decode(8, GREEDY), decode(4, RANDOM, width=3), decode(4, RANDOM, features=ADAPTERS))
    assert shop.choice.decode(1, RANDOM, 1, ()) == (2, RANDOM), "nothing can do it"
    assert shop.choice.decode(1, RANDOM, 3, ()) == shop.choice.decode(1, GREEDY, 1, ADAPTERS) == (4, RANDOM)


def test_each_missing_program_makes_way_when_it_comes():
    shop = Shop(ProgramKey("forward", 256), ProgramKey("sample", 8, RANDOM), ProgramKey("sample", 8, FULL, LogprobsKind.TOP))
    assert shop.choice.tokens(10, ()) == 256
    shop.there.add(ProgramKey("forward", 64))
    assert shop.choice.tokens(10, ()) == 64 and shop.choice.tokens(100, ()) == 256
    assert shop.choice.sample(1, GREEDY, LogprobsKind.NONE, 1, ()) == (8, RANDOM)
    assert shop.choice.sample(1, FULL, LogprobsKind.TOP, 1, ()) == (8, FULL)
    shop.there |= {ProgramKey("forward", 16), ProgramKey("sample", 4, GREEDY)}
    assert shop.choice.tokens(10, ()) == 16
    assert shop.choice.sample(1, GREEDY, LogprobsKind.NONE, 1, ()) == (4, GREEDY)


def test_a_decode_that_another_program_samples_never_waits_for_its_program():
    shop = Shop()
    assert shop.choice.rows_apart(1, ()) is None and shop.asked == [ProgramKey("forward_rows", 4)]
    shop.there.add(ProgramKey("forward_rows", 8))
    assert shop.choice.rows_apart(1, ()) == 8
    shop.there.add(ProgramKey("forward_rows", 4))
    assert shop.choice.rows_apart(1, ()) == 4 and len(shop.asked) == 1


def test_with_a_short_reach_a_step_takes_the_next_size_or_waits_as_an_earlier_one_does():
    shop = Shop(ProgramKey("forward", 256), reach=1)
    assert shop.choice.tokens(10, ()) == 16, "the largest is too far"
    assert shop.choice.tokens(10, ()) == 16 and not shop.asked
    other = Shop(reach=1)
    assert [other.choice.tokens(count, ()) for count in (50, 10, 50)] == [64, 64, 64], "a step waits for it already"
    assert other.asked == [ProgramKey("forward", 16)]


def test_without_stand_ins_sizes_follow_from_the_step_alone():
    """As several devices need it, which must choose alike."""
    shop = Shop(ProgramKey("forward", 256), decode(8, RANDOM), ProgramKey("sample", 8, RANDOM), reach=0)
    assert shop.choice.tokens(10, ()) == 16 and shop.choice.decode(3, GREEDY, 1, ()) == (4, GREEDY)
    assert shop.choice.sample(3, GREEDY, LogprobsKind.NONE, 1, ()) == (4, GREEDY) and not shop.asked
