"""What is computed of a step's hidden states: tokens (`sampling`), logprobs of prompts, pooled vectors. A file per consumer."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxllm.runner.batch import Chunk, request_failed
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.runner.split_program import CompiledProgram
from jaxllm.runner.step_programs import ProgramKey
from jaxllm.scheduler_output import ModelRunnerOutput


@dataclass(frozen=True)
class Hidden:
    """Results of a step's forward pass, on the device."""

    hidden_TD: jax.Array
    """Of all tokens."""
    hidden_NWD: jax.Array
    """Of the last token of each row, or with drafts of the last ones."""
    columns_NC: jax.Array
    """The rows' columns, of which sampling reads its parameters."""
    for_drafter: Any = None
    """What drafts are proposed of: token_ids_T, and features of the drafter's choice."""


class Device(Protocol):
    """What consumers use of the runner."""

    params: tuple[jax.Array, ...]
    row_arrays: RowArrays

    @property
    def workspace(self) -> jax.Array | None: ...

    @property
    def adapts_logits(self) -> bool:
        """Whether adapters change logits not only by the hidden states."""

    def program(self, key: ProgramKey) -> CompiledProgram:
        """A compiled program."""

    def put(self, arrays: Any) -> Any:
        """Host arrays on the device, or the same on each of several."""


class PendingPart(Protocol):
    """What a consumer computes of a step in flight."""

    @property
    def arrays(self) -> Any:
        """Results that the host reads."""

    def collect(self, output: ModelRunnerOutput) -> None:
        """Wait for the device and add the results. A request that fails alone adds its error."""


class HiddenConsumer(Protocol):
    """Computes something of hidden states beside sampling. `launch` is called for steps of which `select` takes some chunks."""

    def select(self, chunks: Sequence[Chunk]) -> Sequence[Any]:
        """The work in a step with these parts of prompts; empty for none."""

    def keys(self, work: Any, num_tokens: int) -> list[ProgramKey]:
        """The programs that `launch` calls in a step of so many tokens."""

    def launch(self, work: Any, hidden: Hidden | None) -> PendingPart:
        """Start the work. hidden: None in a step of the decode program, which computes only the last tokens of prompts."""

    def delete_arrays(self) -> None:
        """Release the device memory of what is kept between steps."""


@contextmanager
def alone(request_id: str, output: ModelRunnerOutput) -> Iterator[None]:
    """An error in this block is that request's, unless it is the device's, which affects all."""
    try:
        yield
    except jax.errors.JaxRuntimeError:
        raise
    except Exception as error:
        output.errors[request_id] = request_failed(request_id, error)
