"""How many requests and tokens a step may have."""

from collections.abc import Sequence

from jaxllm.config import SchedulerOptions

_LEAST_BESIDE_DECODES = 1024
"""An 8B model on an H200 computes so many tokens a step about as fast as more."""
_PART_BESIDE_DECODES = 3
"""Part of the usual tokens that a step with decodes has, if that is more; it has as many as it is padded to."""
_STEPS_BESIDE_DECODES = 4
"""With more such steps left, they are as large as usual."""
_PART_OF_DECODES = 4
"""So are they if decodes take more than this part of one."""


class StepLimits:
    """The step sizes of the options, lowered after failures and while programs of larger steps are missing."""

    def __init__(self, options: SchedulerOptions, *, min_chunk: int, token_sizes: Sequence[int] = ()):
        """min_chunk: tokens of one request that every step must be able to compute. token_sizes: sorted numbers of tokens that steps are
        padded to."""
        self.min_chunk = min_chunk
        self.token_sizes = token_sizes
        self._options = options
        self._divisor = 1
        self._most_tokens: int | None = None
        assert options.max_num_seqs is not None and options.max_num_batched_tokens is not None
        assert min_chunk <= options.max_num_batched_tokens
        self.max_num_seqs = options.max_num_seqs
        self.max_num_batched_tokens = options.max_num_batched_tokens
        self.max_num_prefill_tokens = options.max_step_tokens
        """Most tokens of a step without decodes that begins with a long prompt."""

    def divide(self, divisor: int) -> None:
        """Divide the step sizes of the options, from the next step on. Without chunked prefill only the number of requests is divided."""
        self._divisor = divisor
        self._set()

    def limit_tokens(self, most: int | None) -> None:
        """Plan no steps of more tokens, if chunked prefill is on, but enough for a token of each request, and for an item that a step
        computes whole; None: as many as the options say."""
        self._most_tokens = most
        self._set()

    def _set(self) -> None:
        usual, largest, divisor = self._options.max_num_batched_tokens, self._options.max_step_tokens, self._divisor
        assert self._options.max_num_seqs is not None and usual is not None
        self.max_num_seqs = max(1, self._options.max_num_seqs // divisor)
        if self._options.enable_chunked_prefill:
            if (most := self._most_tokens) is not None:
                most = max(most, self._options.max_num_seqs)
                usual, largest = min(usual, most), min(largest, most)
            self.max_num_batched_tokens = max(self.min_chunk, usual // divisor)
            self.max_num_prefill_tokens = max(self.min_chunk, largest // divisor)

    def beside_decodes(self, num_decoded: int, num_left: int) -> int:
        """Most tokens of a step in which requests decode, at most so many tokens with drafts, and prompts have so many left. With few left
        it is smaller than usual: the first of them need not wait for all, and decodes wait less. With many left, large steps compute them
        sooner."""
        usual = self.max_num_batched_tokens
        fewer = max(usual // _PART_BESIDE_DECODES, _LEAST_BESIDE_DECODES, 2 * self.min_chunk)
        fewer = next((size for size in self.token_sizes if size >= fewer), fewer)
        is_enough = num_left <= _STEPS_BESIDE_DECODES * fewer and num_decoded * _PART_OF_DECODES <= fewer
        return min(usual, fewer) if is_enough and self._options.enable_chunked_prefill else usual

    def chunk(self, num_unfinished: int) -> int:
        """Most tokens of a request in a step, with so many unfinished ones: a single request may take the whole step."""
        options = self._options
        if not options.long_prefill_token_threshold or num_unfinished <= 1:
            return self.max_num_prefill_tokens
        most = options.long_prefill_token_threshold
        if options.long_prefill_token_threshold_adaptive:
            most = max(most, self.max_num_batched_tokens // num_unfinished)
        return max(most, self.min_chunk)
