"""The interface between the body of a step and its features: what an engine adds to a step that others may do without."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.config import EngineConfig
from jaxllm.kernel_policy import KernelPolicy
from jaxllm.layers.decoder import CausalLM
from jaxllm.layers.step import Adapt, Step
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import Shards
from jaxllm.request import PromptItem
from jaxllm.runner.batch import Chunk
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.heads import Device, Head
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.ops import OpRunner
from jaxllm.runner.places import Places
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import ProgramKind
from jaxllm.runner.row_arrays import Params, RowArrays
from jaxllm.runner.token_split import TokenSplit
from jaxllm.scheduler_output import NewRequestData


@dataclass
class StepRun:
    """A step whose program is traced: what features read and change of it."""

    params: Params
    rows: RowArrays
    caches: list[jax.Array]
    """Layers replace them as they write."""
    shards: Shards
    columns_RC: jax.Array
    """Columns of the step's rows, with all starts known."""
    places: Places
    token_ids_T: jax.Array
    """Ids of all tokens of the step."""
    step: Step
    """The input of the model."""
    own_columns: Mapping[str, jax.Array] = field(default_factory=dict)
    """[R, …]: the columns that features have added to those of each row, by name of the feature."""
    token_inputs: Mapping[str, jax.Array] = field(default_factory=dict)
    """[…, T]: the values of each token that the features of the program have added, by name of the feature."""
    hidden_TD: jax.Array = field(init=False)
    """Hidden state of each token, once the layers have run."""
    share: Callable[[jax.Array], jax.Array] = lambda x_T: x_T
    """Selects from an array by token the tokens that this device computes."""
    count: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array] = lambda add, counts: add(counts)
    """(add, counts) -> the counts with what `add` adds to them on each device that computes tokens of the step."""
    adapts: Callable[[], tuple[Adapt, ...]] = tuple
    """The functions that adapt the logits of `hidden_TD`: further arguments of the model's `logits`."""


class StepFeature:
    """A part of a step that an engine may do without. Each method does nothing unless a feature overrides it."""

    name = ""
    """The name of its module, if it is optional or has columns."""
    is_optional = False
    """Whether the programs that compute layers are also compiled without the feature, for steps that do not need it."""
    is_in_decodes = True
    """Of an optional feature: whether programs of decodes are also compiled with it. If not, steps that need it run as `forward`."""
    changes_logits = False
    """Whether `of_logits` changes something."""
    num_columns = 0
    """Columns that it adds to those of each row; `row_columns` fills them, and `before` finds them in `StepRun.own_columns`."""
    num_token_inputs = 0
    """Values of each token that an optional feature adds to the buffers of programs with it, if it is not in decodes. Its
    `OpRunner.before_step` fills them (`FeatureInputs.token_inputs_of`), and `before` finds them in `StepRun.token_inputs`."""

    def programs(self) -> Sequence[ProgramKind]:
        """Its own kinds of programs."""
        return ()

    def is_needed(self, columns_RC: np.ndarray, chunks: Sequence[Chunk]) -> bool:
        """Whether a step with these rows and known tokens needs the optional feature. Asked in each step, so it does no work by row."""
        return True

    def computes(self, items: Sequence[PromptItem]) -> bool:
        """Whether steps that compute some of these items need the optional feature."""
        return False

    def row_columns(self, data: NewRequestData) -> Sequence[int]:
        """Its columns of a request's row."""
        return ()

    def is_common(self, num_tokens: int) -> bool:
        """Whether almost every engine with the optional feature runs programs of so many tokens with it."""
        return True

    def compiler_options(self, mesh: Mesh, key: ProgramKey) -> dict[str, str | bool]:
        """XLA's options for a program of the engine, its own or another's, on a GPU."""
        return {}

    def head(self, device: Device) -> Head | None:
        """The head that runs programs on the step's hidden states, after the step's own."""
        return None

    def op_runner(self, device: Any) -> OpRunner | None:
        """The runner of its operations of plans, on the devices of a `ModelRunner`."""
        return None

    def row_arrays(self, buckets: Buckets) -> dict[str, Any]:
        """Arrays that it keeps on the device between steps, most of them by row, for `RowArrays.of_features`: trees of shapes by name."""
        return {}

    def before(self, run: StepRun) -> None:
        """Change the step before the layers run."""

    def after(self, run: StepRun) -> None:
        """Take or change what the layers left. Features do so in the reverse order of `before`."""

    def of_logits(self, params: Params, slot_T: jax.Array, shards: Shards) -> tuple[Adapt, ...]:
        """The functions that adapt the logits of tokens with adapters in these slots, in programs that do not run the layers."""
        return ()


@dataclass(frozen=True)
class WeightsPart:
    """The weights of one of an engine's models."""

    merge: Callable[[Params], Any]
    """All weights -> the model."""
    part: slice
    """Where its arrays are among all weights."""


@dataclass(frozen=True)
class FeatureParts:
    """Parts that features are made from: the options and parts of an engine, or of a stage of a pipeline."""

    config: EngineConfig
    model_config: ModelConfig
    model: CausalLM
    kernels: Kernels
    policy: KernelPolicy
    weights: Mapping[str, WeightsPart]
    """Those of `WeightsSource.named_models`."""
    max_len: int
    """Positions that the blocks of a request hold."""
    beside: Mapping[str, Any]
    """`WeightsSource.beside`."""
    token_split: TokenSplit | None = None

    @property
    def is_last(self) -> bool:
        """Whether no stage of a pipeline follows."""
        return self.model.layers.stop == self.model_config.num_layers

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled here."""
        return self.is_last and self.model_config.generates
