"""The interface of a kind of program: which there are of it, what each is traced from, and how it runs for the first time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jaxllm.foreseen import Needs
from jaxllm.pooling_params import PoolingParams
from jaxllm.request import PromptItem
from jaxllm.runner.feature_inputs import Names
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.rows import NO_DECODE, LogprobsKind, sampled_by
from jaxllm.runner.split_program import CompiledProgram, Lowered
from jaxllm.sampling.variants import Variant
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.runner.step_programs import StepPrograms


@dataclass(frozen=True)
class Wanted:
    """Needs of a request's steps in addition to common programs."""

    params: SamplingParams
    pooling: PoolingParams | None
    variant: Variant
    logprobs: LogprobsKind
    is_masked: bool
    items: Sequence[PromptItem] = ()
    features: Names = ()
    """Optional features of the program that computes its prompt's items; empty: there are none."""
    num_tokens: int = 0
    """The size of that program, if a step computes the prompt up to the last item or as much as it can."""

    @classmethod
    def of(cls, needs: Needs, *, full_logprobs: bool) -> "Wanted":
        """Make the needs of a request, without those of the items in its prompt."""
        params, pooling, is_masked, _ = needs
        return cls(params, pooling, *sampled_by(params, full_logprobs=full_logprobs, is_masked=is_masked), is_masked)

    @property
    def is_sampled_apart(self) -> bool:
        """Whether another program samples its decodes."""
        return self.variant >= NO_DECODE or self.logprobs != LogprobsKind.NONE


class ProgramKind:
    """A kind of program, by the name that keys have. What a kind does not override holds for most."""

    name: str
    only: Literal["common", "at_start", "rare"] | None = None
    """Which method lists the program, if there is one of the kind."""
    draws = False
    """Whether it draws tokens by its key's variant: one with random draws can then do the work of a greedy one."""
    is_hurried = False
    """Whether a missing one is made next when a step asks for it, even if no others are made ahead."""

    def common(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        """Programs that almost every request needs, the slowest to compile first."""
        return self._only("common")

    def at_start(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        """Programs that only the start runs."""
        return self._only("at_start")

    def rare(self, programs: "StepPrograms") -> Iterable[ProgramKey]:
        """Programs that only some requests need."""
        return self._only("rare")

    def _only(self, which: str) -> Iterable[ProgramKey]:
        return [ProgramKey(self.name)] if self.only == which else []

    def rank(self, key: ProgramKey) -> int:
        """Rare programs of a higher rank are made after those of all kinds with a lower one."""
        return 0

    def is_first(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        """Whether a start that waits for few programs waits for this one, which must be able to stand in for the others."""
        return True

    def is_needed(self, key: ProgramKey, wanted: Wanted) -> bool:
        """Whether the steps of such a request may run this rare program."""
        return False

    def awaited(self, programs: "StepPrograms", wanted: Wanted) -> "Iterable[Sequence[ProgramKey]]":
        """Programs that a request waits for before it runs, because a step would: one of each sequence, of which the first is made if there
        is none. Programs of sizes that follow from the rest of a step are not among them."""
        return [(key,) for key in self.rare(programs) if not key.size and self.is_needed(key, wanted)]

    def is_storable(self, programs: "StepPrograms", key: ProgramKey) -> bool:
        """Whether another process may use the program."""
        return True

    def uses_peers(self, key: ProgramKey) -> bool:
        """Whether devices that exchange through their memory wait for each other inside the program's kernels."""
        return False

    def compiler_options(self, programs: "StepPrograms", key: ProgramKey) -> dict[str, str | bool]:
        """XLA's options for a GPU in addition to those of all kinds."""
        return {}

    def lower(self, programs: "StepPrograms", key: ProgramKey) -> Lowered:
        """Trace one program."""
        raise NotImplementedError

    def run_on_nothing(self, runner: Any, key: ProgramKey, program: CompiledProgram) -> None:
        """Run a common program on an empty step, which writes nothing but trash. runner: a `ModelRunner`."""


def fit(sizes: tuple[int, ...], wanted: int) -> int:
    """The smallest of the sizes that holds what is wanted, or the largest."""
    return next((size for size in sizes if size >= wanted), sizes[-1])


def first_sizes(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> set[int]:
    """The sizes that a start with few programs waits for: those that hold what is wanted, and the largest."""
    return {fit(sizes, size) for size in wanted} | {sizes[-1]}
