"""How an engine is laid out over its devices: the named sizes that everything else counts by. Does not import JAX."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm.config import ParallelOptions


@dataclass(frozen=True)
class Topology:
    """The devices of one engine: `num_devices` of them, in stages or data-parallel ranks of `context` times `tensor` devices."""

    tensor: int = 1
    """Devices that each layer is split over."""
    stage: int = 1
    """Stages of a pipeline, each with its own layers."""
    has_expert_parallel: bool = False
    """Whether each of these holds whole experts of a mixture, instead of a share of each."""
    context: int = 1
    """Devices, or groups of `tensor` devices, with the same weights that split tokens and the KV cache by tokens."""
    data: int = 1
    """Data-parallel ranks: groups of `tensor` devices with requests of their own, which share the experts of a mixture."""
    hosts: int = 1
    """Hosts that the devices are spread over, as many on each."""

    @classmethod
    def of(cls, options: "ParallelOptions") -> "Topology":
        """The topology that an engine's options ask for."""
        return cls(
            options.tensor_parallel_size,
            options.pipeline_parallel_size,
            options.enable_expert_parallel,
            options.prefill_context_parallel_size,
            options.num_ranks,
            options.nnodes,
        )

    @property
    def expert(self) -> int:
        """Devices that the experts of a mixture are distributed to, each with all its weights."""
        return self.data * self.tensor if self.has_expert_parallel else 1

    @property
    def num_devices(self) -> int:
        return self.data * self.stage * self.stage_devices

    @property
    def stage_devices(self) -> int:
        """Devices of a stage or of a data-parallel rank, which share its cache."""
        return self.context * self.tensor

    @property
    def has_exchange(self) -> bool:
        """Whether devices exchange through NCCL: those of a stage or of data-parallel ranks, or stages on different hosts."""
        return self.data * self.stage_devices > 1 or (self.stage > 1 and self.hosts > 1)

    def describe(self) -> str:
        """The requested sizes, by the names of their options."""
        others = {
            "pipeline_parallel_size": self.stage,
            "prefill_context_parallel_size": self.context,
            "data_parallel_size": self.data,
        }
        said = [f"{name} is {size}" for name, size in others.items() if size > 1]
        if not said:
            return f"tensor_parallel_size is {self.tensor}"
        return f"{', '.join(said)} and tensor_parallel_size {self.tensor}, which takes {self.num_devices} devices"


ONE_DEVICE = Topology()
