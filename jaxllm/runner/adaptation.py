"""Interface of the runner to adapters, which change a model per request. It is traced into the step's programs."""

from collections.abc import Collection
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.layers.step import Adapt
from jaxllm.parallel.shards import Shards
from jaxllm.progress import Progress
from jaxllm.runner.kernels import Kernels
from pallas_kernels.lora import Parts


class Adaptation(Protocol):
    """Keeps adapters in slots: arrays on the device that a program writes without being compiled anew. It is of a whole model or of one
    stage of it, whose slots are those of the whole model for what the stage computes."""

    @property
    def model(self) -> nnx.Module:
        """The arrays of all slots, as shapes with logical axes."""

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """Empty slots, on the devices."""

    @property
    def changes_logits(self) -> bool:
        """Whether logits depend on adapters not only by the hidden states."""

    @property
    def num_slots(self) -> int: ...

    @property
    def rank(self) -> int:
        """Largest rank that a slot holds."""

    @property
    def products(self) -> Collection[tuple[int, Parts]]:
        """Each kind of product that adapters change, on one device: its inputs, and the modules of its outputs."""

    @property
    def packed_size(self) -> int:
        """Values of one adapter on one device."""

    @property
    def dtype(self) -> str:
        """Type of the values of an adapter."""

    def of_stage(self, model: nnx.Module) -> "Adaptation | None":
        """The adaptation of a stage of the model, or of the whole model, which is itself a stage; None: adapters change nothing in it."""

    def own(self, packed_1P: np.ndarray) -> np.ndarray:
        """The values of a stage, of an adapter of the whole model. [devices, values of one device]"""

    def adapt(self, model: Any, slot_T: jax.Array, shards: Shards, kernels: Kernels) -> Adapt:
        """The function that applies adapters to a step's products. slot_T: the slot of each token, NO_ADAPTER for none."""

    def write(self, arrays: tuple[jax.Array, ...], packed_1P: jax.Array, slot: jax.Array) -> tuple[jax.Array, ...]:
        """The arrays of `model`, flat, with an adapter in a slot; on each device with its own part of all of them."""
