"""Chooses the padded sizes of steps. Every size is a compiled program, so there are few."""

import bisect
from dataclasses import dataclass

from jaxllm.config import EngineConfig
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.scheduler.draft_control import levels

_SCORED_POSITIONS = (64, 256)


@dataclass(frozen=True)
class Buckets:
    """Sorted sizes. The last of each holds the largest step."""

    policy: KernelPolicy
    decode_rows: tuple[int, ...]
    """Rows of a step in which every request computes one token: at least those of the policy, even if `max_rows` is less."""
    tokens: tuple[int, ...]
    """Tokens of every other step."""
    sample_rows: tuple[int, ...]
    """Rows that a step other than decode samples."""
    max_rows: int
    rows_apart: tuple[int, ...] = ()
    """Rows of such a step that another program samples, with logprobs, state or masks; empty: it runs as any other step."""
    widths: tuple[int, ...] = (1,)
    """Tokens that a row may sample in a step: 1, and 1 with drafts."""
    proposes: bool = False
    """Whether rows without masks have drafts: those that programs propose."""

    @classmethod
    def choose(
        cls, config: EngineConfig, policy: KernelPolicy, *, num_drafts: int = 0, proposes: bool | None = None
    ) -> "Buckets":
        """The configured sizes, or those of the policy up to the scheduler's limits. num_drafts: most of a row. proposes: whether programs
        propose them; None: they do."""
        proposes = num_drafts > 0 and proposes is not False
        scheduler, max_rows = config.scheduler, config.scheduler.max_num_seqs
        usual_tokens, max_tokens = scheduler.max_num_batched_tokens, scheduler.max_step_tokens
        assert max_rows is not None and usual_tokens is not None, "platform defaults are resolved before buckets are chosen"
        decode = config.compile.decode_buckets or policy.decode_rows
        if num_drafts:
            decode = (*decode, policy.max_draft_rows)  # larger steps have no program with drafts
        most_rows = max(max_rows, policy.least_rows)
        tokens = config.compile.token_buckets or policy.tokens
        # Ranks and hosts must choose alike, whatever programs each has; drafts are proposed of mixed steps.
        samples_apart = bool(policy.rows_apart) and not proposes and config.parallel.num_ranks == config.parallel.nnodes == 1
        return cls(
            policy,
            decode_rows=_up_to(decode, most_rows),
            tokens=_up_to((*tokens, usual_tokens), max_tokens),
            sample_rows=_up_to(policy.sample_rows, max_rows),
            max_rows=max_rows,
            rows_apart=_up_to(config.compile.decode_buckets or policy.rows_apart, most_rows) if samples_apart else (),
            widths=(1, *(1 + level for level in levels(num_drafts))) if num_drafts else (1,),
            proposes=proposes,
        )

    @property
    def num_rows(self) -> int:
        """Rows of the arrays on the device, with that of padding."""
        return self.max_rows + 1

    @property
    def max_tokens(self) -> int:
        """No step has more tokens, drafts and padding included."""
        return max(self.tokens[-1], self.decode_rows[-1] * self.widths[-1])

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
        return self.widths if self.policy.has_drafts(num_rows) else self.widths[:1]

    def widths_without_masks(self, num_rows: int) -> tuple[int, ...]:
        """The widths of a step of so many rows, none of which has a mask."""
        return self.widths_of(num_rows) if self.proposes else self.widths[:1]

    def rows_for_tokens(self, num_tokens: int) -> int:
        """Rows of a step of `num_tokens` tokens: each request computes at least one."""
        return min(num_tokens, self.max_rows)


def _up_to(sizes: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return (*sorted({size for size in sizes if 0 < size < limit}), limit)
