"""LoRA adapters: what they change, how they are read, and which of them are in the slots of the device."""

from jaxllm.lora.feature import make_adapters

__all__ = ["make_adapters"]
