"""The options of adapters (LoRA), and the ranks that the engine's arrays have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of the device's arrays; adapters of other ranks are padded with zeros to the next."""


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """LoRA adapters"""

    enable_lora: Annotated[bool, "serve LoRA adapters over the model (docs/LORA.md)"] = False
    max_loras: Annotated[int, "most different adapters in one step, held on the device"] = 1
    max_lora_rank: Annotated[
        int,
        "largest rank of an adapter; the device holds arrays of 8, 16, 32, 64, 128, 256, 320 or 512, the next that is enough",
    ] = 16
    max_cpu_loras: Annotated[
        int | None, "adapters held in host memory, ready for the device; at least max_loras; default: max_loras"
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], "type of adapters on the device; auto: the model's"
    ] = "auto"
    lora_target_modules: Annotated[
        list[str] | None,
        "last names of the modules that adapters may change, such as q_proj, several after one flag; fewer take less memory; "
        "default: every linear layer, not embed_tokens and lm_head",
    ] = None

    @property
    def padded_rank(self) -> int:
        """Rank of the device's arrays."""
        return next(rank for rank in RANKS if rank >= self.max_lora_rank)


def lora_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe the options of adapters that contradict each other."""
    on_host, on_device = flat["max_cpu_loras"], flat["max_loras"]
    if isinstance(on_host, int) and isinstance(on_device, int) and on_host < on_device:
        return [
            f"max_cpu_loras is {on_host}, must be at least max_loras, {on_device}: what is on the device is in host memory too"
        ]
    return []


def without_effect(options: LoRAOptions) -> list[str]:
    """The options that are set although adapters are off."""
    defaults = LoRAOptions()
    if options.enable_lora:
        return []
    names = ("max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules")
    return [f"{name}={getattr(options, name)!r}" for name in names if getattr(options, name) != getattr(defaults, name)]
