"""LoRARequest: the adapter that a request asks for, as scripts written for vLLM name it."""

from dataclasses import dataclass

from jaxllm.adapters import check_name
from jaxllm.errors import InvalidRequestError


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: a directory in PEFT's format, or a hub id. The engine loads it with the first request.

    Raises InvalidRequestError for an empty name or path, or an id below 1.
    """

    lora_name: str
    """Unique in the engine."""
    lora_int_id: int
    """Number for `remove_lora`, `pin_lora` and `list_loras`; at least 1, one for each name."""
    lora_path: str
    base_model_name: str | None = None
    """Only reported, by `/v1/models`."""
    load_inplace: bool = False
    """Load the files again if there is an adapter of this name already, and use them from now on."""

    def __post_init__(self) -> None:
        check_name(self.lora_name, "lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequestError(f"lora_int_id is {self.lora_int_id!r}, must be an integer above 0", "lora_int_id")
        if not isinstance(self.lora_path, str) or not self.lora_path:
            raise InvalidRequestError(f"lora_path is {self.lora_path!r}, must be a directory or a hub id", "lora_path")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id
