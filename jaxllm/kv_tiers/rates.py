"""Whether it takes less time to load tokens than to compute them, by what steps and copies took."""

from collections import deque

FIXED_SECONDS = 0.003
"""Time of a load in addition to its copies: it waits for steps in flight, before and after them."""
MARGIN = 0.9
"""A load must take this fraction of the time of computing, or less."""
MIN_STEP_TOKENS = 256
"""Steps of fewer tokens do not tell how long each takes: they read weights most of the time."""
_BYTES_PER_SECOND = 10e9
"""Rate of copies before the first: pageable memory is as fast."""
_FIRST_TOKEN_SECONDS = 1e-4
"""Time of a token before the first large step. An engine whose prompts are all in slow files would never make one if it loaded them."""
_NUM_RECENT = 32


class Rates:
    """Time of a token and of a copied block: the lower quartile of recent steps and copies.

    Whatever disturbs them makes them slower: programs that compile in the background, the first use of a buffer, steps and copies at the
    same time. A few such numbers change nothing, and steps that loads slow down do not make loads look better.
    """

    def __init__(self, block_bytes: int):
        self._block_seconds = deque([block_bytes / _BYTES_PER_SECOND], _NUM_RECENT)
        """Seconds per block of recent copies."""
        self._token_seconds: deque[float] = deque(maxlen=_NUM_RECENT)
        """Seconds per token of recent large steps."""

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if num_tokens >= MIN_STEP_TOKENS:
            self._token_seconds.append(seconds / num_tokens)

    def note_copy(self, num_blocks: int, seconds: float) -> None:
        """A copy of blocks, to the devices or from there, took so long."""
        self._block_seconds.append(seconds / num_blocks)

    def step_seconds(self, num_tokens: int) -> float:
        """About how long a step of so many tokens takes: too little for small ones; 0 while unknown."""
        return num_tokens * _lower_quartile(self._token_seconds) if self._token_seconds else 0.0

    def is_worth_loading(self, num_blocks: int, num_tokens: int, seconds: float = 0.0) -> bool:
        """Whether to load so many blocks, rather than to compute so many tokens. seconds: until host memory has them."""
        token_seconds = _lower_quartile(self._token_seconds) if self._token_seconds else _FIRST_TOKEN_SECONDS
        computing = num_tokens * token_seconds
        loading = seconds + FIXED_SECONDS + num_blocks * _lower_quartile(self._block_seconds)
        return loading <= MARGIN * computing


def _lower_quartile(values: deque[float]) -> float:
    """The smallest of up to four values."""
    return sorted(values)[(len(values) - 1) // 4]
