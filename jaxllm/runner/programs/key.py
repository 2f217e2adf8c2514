"""The key of a program: which kind, for which sizes, with which parts."""

from typing import NamedTuple

from jaxllm.runner.rows import LogprobsKind
from jaxllm.sampling.variants import Variant


class ProgramKey(NamedTuple):
    """Which program. `size` is tokens for forward, propose, prompt_logprobs and add_up, rows for decode, forward_rows, sample and
    pool."""

    kind: str
    size: int = 0
    variant: Variant = Variant.GREEDY
    logprobs: LogprobsKind = LogprobsKind.NONE
    width: int = 1
    """Tokens that a row may sample; in propose, 1 if no drafts are wanted."""
    features: tuple[str, ...] = ()
    """Names of the optional features that the step may need, sorted."""
    part: int = 0
    """Which of the programs that encode an image of this size in parts."""

    @property
    def described(self) -> str:
        """For the log and for clients."""
        what = [self.kind, *([str(self.size)] if self.size else ()), *([f"part {self.part + 1}"] if self.part else ())]
        what += [part.name.lower() for part in (self.variant, self.logprobs) if part]
        return " ".join((*what, *self.features))
