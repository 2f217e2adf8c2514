"""A line of a benchmark's table: a figure next to what another engine reaches, what the device allows and what was aimed at."""

from dataclasses import dataclass, field

HEADER = ("work", "jaxllm", "vLLM", "ratio", "limit", "of the limit", "goal", "idle")


@dataclass
class Row:
    """`value`, `vllm`, `limit` and `goal` are in the row's unit."""

    name: str
    unit: str
    value: float
    limit: float
    vllm: float | None = None
    goal: float | None = None
    idle: float | None = None
    seconds: list[float] = field(default_factory=list)
    details: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    """Why the figure may not match the row's name."""

    def better(self, than: float | None) -> float | None:
        """How many times as good as another figure: above 1 is ahead."""
        if than is None:
            return None
        return than / self.value if self.unit == "ms" else self.value / than

    def cells(self) -> list[str]:
        ratio, share = self.better(self.vllm), self.better(self.limit)
        met = self.better(self.goal)
        return [
            f"{self.name}, {self.unit}" + (f" ({self.note})" if self.note else ""),
            figure(self.value),
            figure(self.vllm),
            "–" if ratio is None else f"{ratio:.2f}×",
            figure(self.limit),
            f"{share:.0%}",
            "–" if met is None else f"{figure(self.goal)} {'met' if met >= 1 else 'missed'}",
            "–" if self.idle is None else f"{self.idle:.1%}",
        ]


def markdown_table(header: tuple[str, ...], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(
        ["| " + " | ".join(header) + " |", "|---" * len(header) + "|", *("| " + " | ".join(c) + " |" for c in lines)]
    )


def figure(value: float | None) -> str:
    """Two places below 100, none above."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}".replace(",", " ")
