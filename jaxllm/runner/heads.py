"""Interfaces on the host to what is computed from a step's hidden states: tokens, prompt logprobs, pooled vectors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from jaxllm.parallel.ranks import Ranks
from jaxllm.runner.batch import Chunk, request_failed
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.feature_inputs import FeatureInputs
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.row_arrays import Logprobs, RowArrays
from jaxllm.runner.split_program import CompiledProgram
from jaxllm.scheduler_output import ModelRunnerOutput, TokenLogprobs


@dataclass(frozen=True)
class Hidden:
    """Results of a step's forward pass, on the devices: joint arrays of all data-parallel ranks."""

    hidden_TD: jax.Array
    """Hidden states of all tokens."""
    hidden_NWD: jax.Array
    """Hidden states of the last token of each row, or with drafts of the last ones."""
    columns_NC: jax.Array
    """The rows' columns, of which sampling reads its parameters."""
    shown: Any = None
    """`LatestTokens.shown`, if there is anything."""


class Device(Protocol):
    """The part of the runner that heads use."""

    buckets: Buckets
    ranks: Ranks
    """The data-parallel ranks. Programs take and return joint arrays."""

    params: tuple[jax.Array, ...]
    row_arrays: RowArrays

    @property
    def workspace(self) -> jax.Array | None: ...

    @property
    def inputs(self) -> FeatureInputs:
        """The needs of the features."""

    def program(self, key: ProgramKey) -> CompiledProgram:
        """A compiled program."""

    def run_on_rows(self, program: CompiledProgram, *arguments: Any) -> list[Any]:
        """Start a program that changes caches and rows."""

    def put(self, arrays: Any) -> Any:
        """Host arrays on the device, or the same on each of several."""


class PendingPart(Protocol):
    """A head's results of a step in flight, of one data-parallel rank."""

    @property
    def arrays(self) -> Any:
        """Results that the host reads."""

    def collect(self, output: ModelRunnerOutput) -> None:
        """Wait for the device and add the results. A request that fails alone adds its error."""


class Head(Protocol):
    """Computes something from hidden states in addition to sampling. `launch` is called for steps of which `select` takes some chunks."""

    def select(self, chunks: Sequence[Chunk]) -> Sequence[Any]:
        """The work in a rank's step with these parts of prompts; empty for none."""

    def keys(self, work: Sequence[Any], num_tokens: int) -> list[ProgramKey]:
        """The programs that `launch` calls in a step of so many tokens. work: of each rank."""

    def launch(self, work: Sequence[Any], hidden: Hidden | None) -> Sequence[PendingPart]:
        """Start the work of all ranks. Returns what the host reads, of the ranks of this process. hidden: None in a step of the decode
        program, which computes only the last tokens of prompts."""

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


def trim(scores: Logprobs, rows: slice, num_logprobs: int) -> TokenLogprobs:
    """Some rows of scores on the host, with as many likeliest tokens as were asked for (-1: all)."""
    token_ids, logprobs, ranks = map(np.asarray, scores)
    columns = slice(0, None if num_logprobs == -1 else num_logprobs + 1)
    return TokenLogprobs(token_ids[rows, columns], logprobs[rows, columns], ranks[rows])
