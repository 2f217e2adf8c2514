"""Whether it takes less time to load tokens than to compute them, by what steps and copies took."""

FIXED_SECONDS = 0.003
"""Time of a load in addition to its copies: it waits for steps in flight, before and after them."""
MARGIN = 0.9
"""A load must take this fraction of the time of computing, or less."""
MIN_STEP_TOKENS = 256
"""Steps of fewer tokens do not tell how long each takes: they read weights most of the time."""
_BYTES_PER_SECOND = 10e9
"""Rate of copies before the first: pageable memory is as fast."""
_NEW_SHARE = 0.1
"""Weight of a new observation in the average."""


class Rates:
    """Running averages."""

    def __init__(self, block_size: int, block_bytes: int):
        self._block_size = block_size
        self._blocks_of_copy, self._seconds_of_copy = 1.0, block_bytes / _BYTES_PER_SECOND
        self._token_seconds: float | None = None
        """None: no large step was seen."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if num_tokens >= MIN_STEP_TOKENS:
            new = seconds / num_tokens
            self._token_seconds = new if self._token_seconds is None else _average(self._token_seconds, new)

    def note_copy(self, num_blocks: int, seconds: float) -> None:
        """A copy of blocks, to the devices or from there, took so long."""
        self._blocks_of_copy = _average(self._blocks_of_copy, num_blocks)
        self._seconds_of_copy = _average(self._seconds_of_copy, seconds)

    def is_worth_loading(self, num_blocks: int, seconds: float = 0.0) -> bool:
        """Whether to load so many blocks, rather than to compute their tokens. seconds: until host memory has them."""
        if self._token_seconds is None:
            return True
        computing = num_blocks * self._block_size * self._token_seconds
        loading = seconds + FIXED_SECONDS + num_blocks * self._seconds_of_copy / self._blocks_of_copy
        return loading <= MARGIN * computing


def _average(old: float, new: float) -> float:
    return old + _NEW_SHARE * (new - old)
