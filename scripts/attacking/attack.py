"""An attack, its observations, and the checks that judge it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from scripts.attacking.target import Target

ATTACKS: "dict[str, Attack]" = {}
"""All attacks by name, in the order in which the files of this package define them."""


class Patience:
    """Factor on every limit of time, for machines that do something else too."""

    factor = 1.0


@dataclass(frozen=True)
class Check:
    """A condition that must hold."""

    what: str
    seen: str
    bar: str
    held: bool


@dataclass
class Seen:
    """Observations of an attack."""

    checks: list[Check] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether all of it is as it must be; an attack that checked nothing did not hold."""
        return bool(self.checks) and all(check.held for check in self.checks)

    def seconds(self, what: str, found: float, limit: float) -> None:
        """A time, and the longest that it may take."""
        limit *= Patience.factor
        self.checks.append(Check(what, f"{found:.1f} s", f"≤ {limit:g} s", found <= limit))

    def mebibytes(self, what: str, found: int, limit: int) -> None:
        """Bytes, and the most that they may be."""
        self.checks.append(Check(what, f"{found / 2**20:.0f} MiB", f"≤ {limit / 2**20:.0f} MiB", found <= limit))

    def none_of(self, what: str, found: list[str], count: int) -> None:
        """Number of tries that got through."""
        told = f"{len(found)} of {count}" + (f" ({', '.join(found[:4])}{' …' if len(found) > 4 else ''})" if found else "")
        self.checks.append(Check(what, told, "0", not found and count > 0))

    def equal(self, what: str, found: object, wanted: object) -> None:
        """A value, and what it must be."""
        self.checks.append(Check(what, str(found), str(wanted), found == wanted))

    def that(self, what: str, seen: str, bar: str, held: bool) -> None:
        """Anything else."""
        self.checks.append(Check(what, seen, bar, held))

    def status(self, what: str, found: int, low: int, high: int) -> None:
        """An HTTP status (0: no answer), and the range it must be in."""
        self.checks.append(Check(what, str(found or "no answer"), f"{low}–{high}", low <= found <= high))

    def told(self) -> str:
        """The observations in one line."""
        return "; ".join(f"{check.what}: {check.seen}" for check in self.checks)

    def bars(self) -> str:
        """The conditions, in the same order; failed ones are marked."""
        return "; ".join(f"{check.bar}{'' if check.held else ' ✗'}" for check in self.checks)


Run = Callable[[Target, Seen], None]


@dataclass(frozen=True)
class Attack:
    """An attack on a server, or on a command that reads files."""

    name: str
    group: str
    """The file that has it."""
    severity: str
    """Severity if the server did not hold: high, medium, low or information."""
    title: str
    run: Run
    is_quick: bool
    """Whether it needs nothing but HTTP, and a few seconds."""


def attack(severity: str, title: str, *, quick: bool = False) -> Callable[[Run], Run]:
    """Register a function, under its name, as an attack."""

    def register(run: Run) -> Run:
        name = run.__name__.replace("_", "-")
        assert name not in ATTACKS, f"there are two attacks {name}"
        ATTACKS[name] = Attack(name, run.__module__.rpartition(".")[2], severity, title, run, quick)
        return run

    return register
