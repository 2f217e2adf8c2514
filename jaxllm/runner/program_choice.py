"""Chooses the programs of a step: the smallest that can do its work, or while that one is missing another that is there."""

from collections.abc import Callable, Sequence

from jaxllm.runner.buckets import Buckets
from jaxllm.runner.feature_inputs import Names
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.rows import LogprobsKind
from jaxllm.sampling.variants import Variant


class ProgramChoice:
    """Sizes and variants of the programs that run steps.

    A stand-in does the work of a missing program: the next larger size, or random in place of greedy, which draws the same tokens where
    the temperature is 0. If there is none either, the step takes the missing program and waits for it.
    """

    def __init__(
        self,
        buckets: Buckets,
        *,
        is_there: Callable[[ProgramKey], bool] = lambda key: True,
        ask: Callable[[ProgramKey], None] = lambda key: None,
        reach: int | None = 0,
    ):
        """is_there: whether a program is ready. ask: have a missing one made; called once for each that a step wanted and did without.
        reach: how many sizes further a stand-in may be; None: any; 0: there are no stand-ins."""
        self.buckets = buckets
        self._is_there, self._ask, self._reach = is_there, ask, reach
        self._asked: set[ProgramKey] = set()
        self._taken: set[ProgramKey] = set()
        """Missing programs that steps took: those steps may not be launched yet, and later ones need not wait longer."""

    def tokens(self, num_tokens: int, features: Names) -> int:
        """The token size of a step of any kind but decode."""
        wanted = ProgramKey("forward", self.buckets.fit_tokens(num_tokens), features=features)
        return self._found(wanted, self.buckets.tokens).size

    def decode(self, num_rows: int, variant: Variant, width: int, features: Names) -> tuple[int, Variant]:
        """The size of a decode that samples, greedy or random, and its variant."""
        wanted = ProgramKey("decode", self.buckets.fit_decode(num_rows), variant, width=width, features=features)
        found = self._found(wanted, self.buckets.decode_rows)
        return found.size, found.variant

    def rows_apart(self, num_rows: int, features: Names) -> int | None:
        """The size of a decode that another program samples; None if no program for it is ready: the step runs as any other."""
        size = self.buckets.fit_rows_apart(num_rows)
        if size is None:
            return None
        wanted = ProgramKey("forward_rows", size, features=features)
        found = self._ready(wanted, self.buckets.rows_apart, may_do_without=True)
        return None if found is None else found.size

    def sample(
        self, num_rows: int, variant: Variant, logprobs: LogprobsKind, width: int, features: Names
    ) -> tuple[int, Variant]:
        """The size and variant of the program that samples after a step other than decode."""
        wanted = ProgramKey("sample", self.buckets.fit_sample(num_rows), variant, logprobs, width, features)
        found = self._found(wanted, self.buckets.sample_rows)
        return found.size, found.variant

    def _found(self, wanted: ProgramKey, sizes: Sequence[int]) -> ProgramKey:
        found = self._ready(wanted, sizes)
        if found is None:
            self._taken.add(wanted)
        return found or wanted

    def _ready(self, wanted: ProgramKey, sizes: Sequence[int], *, may_do_without: bool = False) -> ProgramKey | None:
        """The program, or its stand-in, that is there or that an earlier step waits for; None if there is none. may_do_without: the step
        then runs without, instead of waiting."""
        if self._is_there(wanted) or wanted in self._taken:
            return wanted
        found = next((key for key in self._stand_ins(wanted, sizes) if self._is_there(key) or key in self._taken), None)
        if (found is not None or may_do_without) and wanted not in self._asked:
            self._asked.add(wanted)
            self._ask(wanted)
        return found

    def _stand_ins(self, wanted: ProgramKey, sizes: Sequence[int]) -> list[ProgramKey]:
        """Programs that can replace `wanted`, the fastest first."""
        if self._reach == 0:
            return []
        first = sizes.index(wanted.size)
        last = len(sizes) if self._reach is None else first + 1 + self._reach
        is_greedy = wanted.kind in ("decode", "sample") and wanted.variant == Variant.GREEDY
        variants = (wanted.variant, Variant.RANDOM) if is_greedy else (wanted.variant,)
        return [wanted._replace(size=size, variant=variant) for size in sizes[first:last] for variant in variants][1:]
