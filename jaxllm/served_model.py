"""Description of a model for API servers, without its layers."""

from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from jaxllm.errors import shortened
from jaxllm.model_parts.audio import Audio
from jaxllm.model_parts.encoder import Classifier
from jaxllm.model_parts.vision import Vision
from jaxllm.pooling_config import PoolingConfig

GGUF_TYPE = "gguf_type"
"""The key of a config.json made of a GGUF file that says its quantization."""

_MOST_TOKEN_IDS = 1024


def read_token_ids(value: Any) -> tuple[int, ...]:
    """The token ids of a value in a JSON file: an integer, a list or null; ids that no vocabulary has are left out.

    Raises ValueError, whose message goes on after the name of the value.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MOST_TOKEN_IDS:
        raise ValueError(f"has {len(ids)} tokens, must have at most {_MOST_TOKEN_IDS}")
    if not all(type(id) is int for id in ids):
        raise ValueError(f"is {shortened(repr(value))}, must be a token id or a list of them")
    return tuple(dict.fromkeys(id for id in ids if 0 <= id < 2**31))


@dataclass(frozen=True)
class ServedModel:
    """The part of a `ModelConfig` that the engine process sends to API servers."""

    architecture: str
    vocab_size: int
    hidden_size: int
    _: KW_ONLY
    eos_token_ids: tuple[int, ...] = ()
    generates: bool = True
    """Whether it has a head and generates text; otherwise it makes vectors only."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    has_token_types: bool = False
    """Whether it tells the tokens of a second text from those of a first."""
    classifier: Classifier | None = None
    """How it scores the classes of a prompt, which is all that it does; None: it has no such head."""
    vision: Vision | None = None
    """How it sees images; None: it does not."""
    audio: Audio | None = None
    """How it hears; None: it takes no audio."""
    gguf_type: str | None = field(default=None, compare=False)
    """Quantization named by its GGUF file, e.g. Q4_K_M, or "unknown"; None: not from a GGUF file."""
    digest: str = field(default="", compare=False)
    """Fields that are not sent to API servers."""

    def as_served(self) -> "ServedModel":
        """Without the fields that API servers do not need."""
        return ServedModel(**{f.name: getattr(self, f.name) for f in fields(ServedModel)})
