"""An answer that is written to the terminal while it arrives."""

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxllm.cli import terminal
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM
    from jaxllm.lora_request import LoRARequest

_TERMINAL_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass
class Answer:
    """The text so far: on stdout as it is added, reasoning dimmed on stderr."""

    after: str = ""
    """The text that the answer continues, printed on stderr before the first word."""
    text: str = ""
    finished: bool = False
    """False if Ctrl-C ended it."""
    fault: str | None = None
    """Why the request failed, if it did."""
    stats: terminal.RunStats = field(default_factory=terminal.RunStats)
    _began: float = 0.0
    _thinks: bool = False

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """While it arrives. Ctrl-C ends it and is handled; at the end there is a line end after the text."""
        self._began = time.perf_counter()
        try:
            with contextlib.suppress(KeyboardInterrupt):
                yield
        finally:
            self.stats.total_seconds = time.perf_counter() - self._began
            if self.text and not self.text.endswith("\n"):
                print(flush=True)

    def note_token(self) -> None:
        """Time the first token."""
        if not self.stats.first_token_seconds:
            self.stats.first_token_seconds = [time.perf_counter() - self._began]

    def add(self, text: str, shown: str | None = None) -> None:
        """Add text. `shown`: what the terminal gets of it; default: all."""
        if self._thinks or self.after:
            _print_dimmed("\n" if self._thinks else self.after)
            self._thinks, self.after = False, ""
        self.text += text
        sys.stdout.write(text if shown is None else shown)
        sys.stdout.flush()

    def add_thought(self, text: str) -> None:
        """Show reasoning, which is not part of the answer."""
        self._thinks = self._thinks or not self.text
        _print_dimmed(text)


def stream(llm: "LLM", entry: Any, params: SamplingParams, answer: Answer, lora_request: "LoRARequest | None" = None) -> None:
    """Write the answer to one input. `params` must ask for deltas and one answer."""
    stats = answer.stats
    with answer.arriving(), contextlib.closing(llm.generate_iter(entry, params, lora_request=lora_request)) as running:
        for _, output in running:
            with llm.interrupt:  # counted tokens are also written
                part = output.outputs[0]
                if part.token_ids:
                    answer.note_token()
                stats.num_prompt_tokens = len(output.prompt_token_ids)
                stats.num_output_tokens += len(part.token_ids)
                answer.finished = output.finished
                if part.finish_reason == "error":
                    answer.fault = str(part.stop_reason)
                answer.add(part.text)


def printable(text: str) -> str:
    """Remove terminal control codes from untrusted text, except line ends and tabs."""
    return _TERMINAL_CODES.sub("", text)


def _print_dimmed(text: str) -> None:
    print(terminal.styled(text, "dim", sys.stderr), end="", file=sys.stderr, flush=True)
