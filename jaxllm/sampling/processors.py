"""Custom logits processors: pure JAX functions that are compiled into the FULL sampling program.

def no_repeats(logits_RV, context):
    return jnp.where(context.output_count_RV > context.arguments_RA[:, :1], -jnp.inf, logits_RV)

processor = Processor("no_repeats", no_repeats, num_arguments=1)
LLM(logits_processors=[processor])                        # or "my_module:processor", as in --logits-processors
SamplingParams(extra_args={"no_repeats": [2.0]})          # a request that wants it; all others are untouched

A processor with `read` makes the numbers itself, of whatever numbers and texts a request gives:
Processor("tone", tone, num_arguments=1, read=lambda given: [TONES.index(given[0])])      # extra_args={"tone": ["calm"]}
"""

import importlib
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.sampling_params import READS_ITSELF, SamplingParams

if TYPE_CHECKING:
    from jaxllm.sampling.state import SamplingState


@dataclass(frozen=True)
class ProcessorContext:
    """The data available to a processor, for each of R rows."""

    arguments_RA: jax.Array
    """float32[R, num_arguments]: what the request gave in extra_args."""
    output_count_RV: jax.Array
    """int32: how often each token occurs in the output so far."""
    in_prompt_RV: jax.Array
    """bool: whether each token occurs in the prompt."""
    num_outputs_R: jax.Array
    """int32: tokens of the output so far."""
    recent_RM: jax.Array
    """int32: the last tokens of the output, newest last, -1 before its beginning."""


@dataclass(frozen=True)
class Processor:
    """A named function from logits to logits of the same shape, applied after the penalties and before the temperature."""

    name: str
    function: Callable[[jax.Array, ProcessorContext], jax.Array]
    num_arguments: int = 0
    read: Callable[[Sequence[float | str]], Sequence[float]] | None = None
    """Makes these numbers of what a request gives, in the engine before the request is queued; an exception refuses the request.
    Without it, a request gives the numbers."""


def load_processors(given: Sequence[Processor | str]) -> tuple[Processor, ...]:
    """The processors; imports those given as "module:Name": a Processor, or a class that makes one.

    Raises ConfigError for an import error or an object that is not a Processor.
    """
    loaded = []
    for each in given:
        found = _imported(each) if isinstance(each, str) else each
        if not isinstance(found, Processor):
            raise ConfigError(
                f"logits processor {each!r} is not a jaxllm.sampling.processors.Processor but of type {type(found).__name__}; wrap a "
                "pure JAX function from logits to logits in one (processors that work on torch tensors cannot be compiled)"
            )
        loaded.append(found)
    return tuple(loaded)


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
        is_class = isinstance(found, type) and issubclass(found, Processor)
        return found() if is_class else found
    except Exception as error:  # whatever the module raises
        raise ConfigError(
            f"logits processor {path!r} cannot be imported: {type(error).__name__}: {error}; name it as module:Name, and install "
            "the module or put its directory into PYTHONPATH"
        ) from error


def check_processors(processors: Sequence[Processor]) -> dict[str, int]:
    """Number of arguments by name, as `SamplingParams.verify` takes it. Raises ConfigError if two have the same name."""
    arguments = {each.name: each.num_arguments if each.read is None else READS_ITSELF for each in processors}
    if len(arguments) < len(processors):
        raise ConfigError(f"logits processors need different names, these are {[p.name for p in processors]}")
    return arguments


def read_arguments(params: SamplingParams, processors: Sequence[Processor]) -> SamplingParams:
    """The parameters with numbers for every processor: a copy if one reads them itself.

    Raises InvalidRequestError with the exception's text for arguments that it cannot read.
    """
    read: dict[str, list[float]] = {}
    for processor in processors:
        given = (params.extra_args or {}).get(processor.name)
        if processor.read is None or given is None:
            continue
        try:
            numbers = [float(number) for number in processor.read(list(given))]
        except Exception as error:  # whatever the processor raises
            text = f"{type(error).__name__}: {error}"
            raise InvalidRequestError(f"the logits processor {processor.name!r} cannot read {given!r}: {text}", None) from error
        if len(numbers) != processor.num_arguments or not all(map(math.isfinite, numbers)):
            raise InvalidRequestError(
                f"the logits processor {processor.name!r} read {numbers} of {given!r}, not {processor.num_arguments} numbers",
                None,
            )
        read[processor.name] = numbers
    if not read:
        return params
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), **read}
    return params


def num_argument_columns(processors: Sequence[Processor]) -> int:
    """Width of the state's arguments: for each processor a flag whether the row uses it, then its arguments.

    At least 1: XLA crashes while it compiles a shard_map that takes an empty array (jaxlib 0.11.2).
    """
    return max(1, sum(1 + processor.num_arguments for processor in processors))


def pack_arguments(params: SamplingParams, processors: Sequence[Processor]) -> np.ndarray:
    """float32[num_argument_columns] of a request that `SamplingParams.verify` has passed."""
    wanted = params.extra_args or {}
    packed: list[float] = []
    for processor in processors:
        arguments = wanted.get(processor.name)
        packed += [0.0] * (1 + processor.num_arguments) if arguments is None else [1.0, *arguments]
    return np.array(packed or [0.0], np.float32)


def apply_processors(
    logits_RV: jax.Array, rows: "SamplingState", position_R: jax.Array, processors: Sequence[Processor]
) -> jax.Array:
    """Apply each processor, in order, to the rows that use it."""
    first = 0
    for processor in processors:
        last = first + 1 + processor.num_arguments
        context = ProcessorContext(
            arguments_RA=rows.arguments[:, first + 1 : last],
            output_count_RV=rows.output_count,
            in_prompt_RV=rows.in_prompt,
            num_outputs_R=position_R - rows.num_prompt_tokens,
            recent_RM=rows.recent,
        )
        wanted_R1 = rows.arguments[:, first : first + 1] != 0
        logits_RV = jnp.where(wanted_R1, processor.function(logits_RV, context), logits_RV)
        first = last
    return logits_RV
