"""Chooses the padded sizes of steps. Every size is a compiled program, so there are few."""

import bisect
from dataclasses import dataclass

from jaxllm.config import EngineConfig
from jaxllm.scheduler.draft_control import levels

# From eight on: XLA turns products of fewer rows into reductions, which read small weights at a third of the speed.
_DECODE_ROWS_GPU = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
# XLA computes products of two rows on a CPU about as fast as of four.
_DECODE_ROWS_CPU = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SAMPLE_ROWS = (8, 64, 256)
_ROWS_APART = (8, 16, 32, 64, 128, 256, 512, 1024)
_SCORED_POSITIONS = (64, 256)
MAX_DRAFT_ROWS = 64
"""Most rows of a step with drafts: with more, drafts cost more than the few steps that they save."""


@dataclass(frozen=True)
class Buckets:
    """Sorted sizes. The last of each holds the largest step."""

    decode_rows: tuple[int, ...]
    """Rows of a step in which every request computes one token."""
    tokens: tuple[int, ...]
    """Tokens of every other step."""
    sample_rows: tuple[int, ...]
    """Rows that a step other than decode samples."""
    max_rows: int
    rows_apart: tuple[int, ...] = ()
    """Rows of such a step that another program samples, with logprobs, state or masks; empty: it runs as any other step."""
    widths: tuple[int, ...] = (1,)
    """Tokens that a row may sample in a step: 1, and 1 with drafts."""

    @classmethod
    def choose(cls, config: EngineConfig, *, on_gpu: bool, num_drafts: int = 0) -> "Buckets":
        """The configured sizes, or the usual ones up to the scheduler's limits. num_drafts: most of a row."""
        scheduler, max_rows = config.scheduler, config.scheduler.max_num_seqs
        usual_tokens, max_tokens = scheduler.max_num_batched_tokens, scheduler.max_step_tokens
        assert max_rows is not None and usual_tokens is not None, "platform defaults are resolved before buckets are chosen"
        decode = config.compile.decode_buckets or (_DECODE_ROWS_GPU if on_gpu else _DECODE_ROWS_CPU)
        if num_drafts:
            decode = (*decode, MAX_DRAFT_ROWS)  # larger steps have no program with drafts
        tokens = config.compile.token_buckets or _token_sizes(max_tokens, fine=on_gpu)
        # Lanes and hosts must choose alike, whatever programs each has; drafts are proposed of mixed steps; a CPU compiles slowly.
        samples_apart = on_gpu and not num_drafts and config.parallel.num_lanes == config.parallel.nnodes == 1
        return cls(
            decode_rows=_up_to(decode, max_rows),
            tokens=_up_to((*tokens, usual_tokens), max_tokens),
            sample_rows=_up_to(_SAMPLE_ROWS, max_rows),
            max_rows=max_rows,
            rows_apart=_up_to(config.compile.decode_buckets or _ROWS_APART, max_rows) if samples_apart else (),
            widths=(1, *(1 + level for level in levels(num_drafts))) if num_drafts else (1,),
        )

    @property
    def scored_positions(self) -> int:
        """Prompt positions that one program scores: as many as rows are sampled at once, within bounds. On a GPU the product with the
        head takes as long for 256 rows as for 64; a CPU, which has fewer rows, would compute the padding."""
        return min(max(self.sample_rows[-1], _SCORED_POSITIONS[0]), _SCORED_POSITIONS[1])

    def fit_decode(self, num_rows: int) -> int:
        """The smallest decode size that holds `num_rows`."""
        return self.decode_rows[bisect.bisect_left(self.decode_rows, num_rows)]

    def fit_rows_apart(self, num_rows: int) -> int | None:
        """The smallest size of a step sampled apart that holds `num_rows`; None if there are no such steps."""
        return self.rows_apart[bisect.bisect_left(self.rows_apart, num_rows)] if self.rows_apart else None

    def fit_tokens(self, num_tokens: int) -> int:
        """The smallest token size that holds `num_tokens`."""
        return self.tokens[bisect.bisect_left(self.tokens, num_tokens)]

    def fit_sample(self, num_rows: int) -> int:
        """The smallest sample size that holds `num_rows`."""
        return self.sample_rows[bisect.bisect_left(self.sample_rows, num_rows)]

    def fit_width(self, num_drafts: int) -> int:
        """The smallest width that holds a token and its drafts."""
        return self.widths[bisect.bisect_left(self.widths, 1 + num_drafts)]

    def widths_of(self, num_rows: int) -> tuple[int, ...]:
        """The widths of a step of so many rows."""
        return self.widths if num_rows <= MAX_DRAFT_ROWS else self.widths[:1]

    def rows_for_tokens(self, num_tokens: int) -> int:
        """Rows of a step of `num_tokens` tokens: each request computes at least one."""
        return min(num_tokens, self.max_rows)


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return (*sorted({size for size in sizes if size < limit}), limit)


def _token_sizes(limit: int, *, fine: bool) -> tuple[int, ...]:
    """Powers of four from 4. `fine`: of two from 16; from 256, where time follows the padded size, also quarters between them, and above
    2048 halves."""
    sizes, size = [], 16 if fine else 4
    while size < limit:
        parts = (1 if size < 256 else 4 if size < 2048 else 2) if fine else 1
        sizes += [size + size * part // parts for part in range(parts)]
        size *= 2 if fine else 4
    return tuple(sizes)
