"""How many drafts of speculative decoding were accepted, for the log, the metrics and the benchmarks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.scheduler_stats import SchedulerStats


@dataclass(frozen=True)
class Acceptance:
    """Totals, or what was added between two."""

    num_drafts: float = 0
    """Runs of drafts: one for each row of a step that had any."""
    num_draft_tokens: float = 0
    num_accepted_tokens: float = 0
    accepted_per_position: tuple[float, ...] = ()

    @classmethod
    def of(cls, load: SchedulerStats) -> "Acceptance":
        """The totals of an engine core."""
        return cls(load.num_drafts, load.num_draft_tokens, load.num_accepted_tokens, load.accepted_per_position)

    def __sub__(self, earlier: "Acceptance") -> "Acceptance":
        before = earlier.accepted_per_position or (0,) * len(self.accepted_per_position)
        return Acceptance(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_per_position, before, strict=False)),
        )

    @property
    def mean_length(self) -> float:
        """Tokens that a row gets in a step with drafts, on average: the accepted ones and one more."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def rate(self) -> float:
        """The accepted part of all drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def rates_per_position(self) -> list[float]:
        """By position, the part of runs whose draft there was accepted."""
        return [count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_position]

    def report(self) -> dict[str, Any]:
        """Under the names of vLLM's benchmark. The rate is in percent, those by position are fractions."""
        return {
            "spec_decode_acceptance_rate": 100 * self.rate,
            "spec_decode_acceptance_length": self.mean_length,
            "spec_decode_num_drafts": int(self.num_drafts),
            "spec_decode_draft_tokens": int(self.num_draft_tokens),
            "spec_decode_accepted_tokens": int(self.num_accepted_tokens),
            "spec_decode_per_position_acceptance_rates": self.rates_per_position,
        }


def report_lines(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What `Acceptance.report` added to a benchmark's results, as names and texts; empty if it added nothing."""
    if "spec_decode_num_drafts" not in report:
        return []
    return [
        ("mean acceptance length", f"{report['spec_decode_acceptance_length']:.2f}"),
        ("acceptance rate", f"{report['spec_decode_acceptance_rate']:.1f}%"),
        ("drafts of all rows", str(report["spec_decode_draft_tokens"])),
        ("accepted drafts", str(report["spec_decode_accepted_tokens"])),
        ("acceptance by position", percentages(report["spec_decode_per_position_acceptance_rates"])),
    ]


def percentages(rates: list[float]) -> str:
    """`61% 42% 20%`"""
    return " ".join(f"{rate:.0%}" for rate in rates)
