"""What a front knows of a model, whose layers only the engine needs."""

from dataclasses import KW_ONLY, dataclass, field, fields

from jaxllm.pooling_config import PoolingConfig

GGUF_TYPE = "gguf_type"
"""The key of a config.json made of a GGUF file that says its quantization."""


@dataclass(frozen=True)
class ServedModel:
    """The part of a `ModelConfig` that the engine process sends to fronts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    _: KW_ONLY
    eos_token_ids: tuple[int, ...] = ()
    generates: bool = True
    """Whether it has a head and generates text; otherwise it makes vectors only."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    gguf_type: str | None = field(default=None, compare=False)
    """What the GGUF file that it comes from calls its quantization, e.g. Q4_K_M, or "unknown"; None: it comes from no such file."""
    digest: str = field(default="", compare=False)
    """Of all fields, those that fronts are not sent too."""

    def as_served(self) -> "ServedModel":
        """Without what fronts do not need."""
        return ServedModel(**{f.name: getattr(self, f.name) for f in fields(ServedModel)})
