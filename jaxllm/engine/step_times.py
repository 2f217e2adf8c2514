"""How long steps of many tokens take at least."""

from collections import defaultdict, deque

_PARTS_OF_OCTAVE = 4
_NUM_RECENT = 4


class StepTimes:
    """The shortest of the latest times, by number of tokens. What disturbs a step, such as an operation on the devices, makes it longer."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_RECENT))

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step that began when the one before it ended took so long."""
        self._seconds[_size(num_tokens)].append(seconds)

    def least(self, num_tokens: int) -> float | None:
        """Seconds of such a step, or of the next smaller ones that are known; None if there are none."""
        size = self._known_size(num_tokens)
        return None if size is None else min(self._seconds[size])

    def forget(self, num_tokens: int) -> None:
        """Discard the time of this size: a step took less."""
        if (size := self._known_size(num_tokens)) is not None:
            del self._seconds[size]

    def _known_size(self, num_tokens: int) -> int | None:
        """The largest known size of at most so many tokens."""
        return max((size for size in self._seconds if size <= _size(num_tokens)), default=None)


def _size(num_tokens: int) -> int:
    """Number of the padded size; above 2048 each of those has two."""
    below = num_tokens - 1
    octave = below.bit_length() - 1
    return _PARTS_OF_OCTAVE * octave + (_PARTS_OF_OCTAVE * below >> octave)
