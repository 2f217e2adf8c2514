"""Bodies of the routes that load and drop LoRA adapters."""

from typing import Any

from server.protocol.common import RequestModel


class LoadLoraAdapterRequest(RequestModel):
    """An adapter to load."""

    lora_name: str
    lora_path: str
    """A directory of the server's machine, or a hub id."""
    load_inplace: bool = False
    """Replace the adapter of this name; requests that run keep the one they began with."""
    is_3d_lora_weight: Any = None
    """Without effect: the form of an adapter's experts is read from its files."""


class UnloadLoraAdapterRequest(RequestModel):
    """An adapter to drop."""

    lora_name: str
    lora_int_id: Any = None
    """Without effect: the name says which."""
