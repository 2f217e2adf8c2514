"""Experts in fp8 with a scale per output channel, expert or tensor, computed as stored."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxllm.quantization.formats.fp8_blocks import Fp8Blocks
from jaxllm.weight_format import ParamSpec, WeightSpec

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig
    from jaxllm.model_parts import MoE


@dataclass(frozen=True, kw_only=True)
class Fp8Experts(Fp8Blocks):
    """The experts of a checkpoint whose linear layers are in `fp8.Fp8`: all of a mixture in one tensor, as Mistral 4 has them, or
    without a gate, as Nemotron 3 has them. Others become the model's type."""

    supported: ClassVar[str] = ""

    @staticmethod
    def has(part: "MoE") -> bool:
        """Whether the experts of a mixture are in this format."""
        return not part.gated or ("{}" not in part.down and not part.transposed)

    @property
    def excluded(self) -> tuple[str, ...]:
        return ()

    @property
    def _kind(self) -> str:
        return "experts in fp8"

    def faults(self, config: "ModelConfig") -> list[str]:
        """None: `fp8.Fp8` finds all faults of the modules."""
        return []

    def declare(self, weight: WeightSpec) -> dict[str, ParamSpec] | None:
        return None if weight.modules else super().declare(weight)
