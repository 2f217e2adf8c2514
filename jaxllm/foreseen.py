"""Programs that a request will need, as an executor foresees them. Does not import JAX."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxllm.pooling_params import PoolingParams
from jaxllm.request import PromptItem
from jaxllm.sampling_params import SamplingParams


class Needs(NamedTuple):
    """Properties of a request that say which programs its steps run."""

    params: SamplingParams
    pooling: PoolingParams | None = None
    is_masked: bool = False
    items: Sequence[PromptItem] = ()
    """Items of its prompt."""


@dataclass(frozen=True)
class StepLimit:
    """A limit of steps that compute items of a request."""

    num_tokens: int
    """The most that programs can compute which are there, or which the request waits for."""
    until: "Future[Any]"
    """The program of the largest steps."""


@dataclass(frozen=True)
class Foreseen:
    """Programs that a request needs and that are being made."""

    awaited: Mapping[str, "Future[Any]"] = field(default_factory=dict)
    """Programs that it waits for, by their names in the log. Each has the error if it cannot be compiled."""
    limit: StepLimit | None = None


NOTHING_AWAITED = Foreseen()
