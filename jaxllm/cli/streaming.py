"""One answer, written to stdout token by token."""

import contextlib
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxllm.cli import terminal
from jaxllm.lora_request import LoRARequest
from jaxllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxllm.llm import LLM


@dataclass
class Streamed:
    """The text written."""

    text: str = ""
    finished: bool = False
    """False if Ctrl-C ended it."""
    fault: str | None = None
    """Why the request failed, if it did."""
    stats: terminal.RunStats = field(default_factory=terminal.RunStats)


def stream(
    llm: "LLM", entry: Any, params: SamplingParams, *, lora_request: LoRARequest | None = None, after: str = ""
) -> Streamed:
    """Write the answer to one input as it arrives, with a line end after it. `params` must ask for deltas and one answer.

    `after` is the text that the answer continues: printed on stderr before the first word.
    """
    streamed = Streamed()
    stats = streamed.stats
    began = time.perf_counter()
    iterator = llm.generate_iter(entry, params, lora_request=lora_request)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(iterator) as running:
        for _, output in running:
            with llm.interrupt:  # counted tokens are also written
                part = output.outputs[0]
                if part.token_ids and not stats.first_token_seconds:
                    stats.first_token_seconds = [time.perf_counter() - began]
                stats.num_prompt_tokens = len(output.prompt_token_ids)
                stats.num_output_tokens += len(part.token_ids)
                streamed.text += part.text
                streamed.finished = output.finished
                if part.finish_reason == "error":
                    streamed.fault = str(part.stop_reason)
                if after:
                    print(terminal.styled(after, "dim", sys.stderr), end="", file=sys.stderr, flush=True)
                    after = ""
                sys.stdout.write(part.text)
                sys.stdout.flush()
    stats.total_seconds = time.perf_counter() - began
    if streamed.text and not streamed.text.endswith("\n"):
        print(flush=True)
    return streamed
