"""Warnings about blocks that were lost."""

import pytest

from jaxllm.kv_tiers.copy_counts import WARN_BLOCKS, WARN_SECONDS, LostBlocks


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("for_slots", [True, False])
def test_many_lost_blocks_are_told_at_most_once_a_minute_with_the_way_out(
    for_slots: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    lost = LostBlocks(clock)
    lost.note_stored(3 * WARN_BLOCKS)
    for _ in range(3):
        clock.now += WARN_SECONDS / 2
        lost.note(WARN_BLOCKS // 2, for_slots=for_slots)
    (told,) = caplog.messages
    assert told.startswith("host memory: 100 of the 400 blocks that left the devices in the last 60 s were lost, because ")
    assert ("raise --kv-offloading-size" in told) is for_slots and ("copies are behind" in told) is not for_slots
    assert (lost.num_without_slot, lost.num_without_buffer) == ((150, 0) if for_slots else (0, 150))


@pytest.mark.parametrize(("num_stored", "num_lost"), [(10, WARN_BLOCKS - 1), (10 * WARN_BLOCKS, WARN_BLOCKS)])
def test_a_few_lost_blocks_are_only_counted(num_stored: int, num_lost: int, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    lost = LostBlocks(clock)
    lost.note_stored(num_stored)
    clock.now += 2 * WARN_SECONDS
    lost.note(num_lost, for_slots=True)
    assert not caplog.messages and lost.num_without_slot == num_lost
