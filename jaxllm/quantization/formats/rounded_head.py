"""A head that is rounded to 8 bits while it is loaded."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from jaxllm.quantization.formats.compressed_tensors import Group
from jaxllm.quantization.formats.rounded import NUMBERS_BY_OPTION, Rounded
from jaxllm.quantization.numbers import Scheme
from jaxllm.weight_format import Options

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class RoundedHead(Rounded):
    """The weight of an untied head, symmetric int8 with a float32 scale per token, as `Rounded` has those of layers."""

    @property
    def of_head(self) -> bool:
        return True

    @classmethod
    def read(cls, given: Mapping[str, Any], options: Options, faults: list[str]) -> Self | None:
        if options.quantize_lm_head is None:
            return None
        scheme = Scheme(NUMBERS_BY_OPTION[options.quantize_lm_head])
        return cls(groups=(Group((f"re:{re.escape(options.lm_head)}$",), scheme),))

    def faults(self, config: "ModelConfig") -> list[str]:
        if not config.generates:
            return ["quantize_lm_head is set, but the model makes no logits here; leave --quantize-lm-head out"]
        if config.tie_word_embeddings:
            return [
                "quantize_lm_head is set, but the head is tied: its weights are those of the embedding, which stays as it is; leave "
                "--quantize-lm-head out (--quantization makes the layers smaller)"
            ]
        return []

    def unrestorable(self, names: Collection[str]) -> str:
        return "holds an orbax checkpoint, whose head stays as it is; leave --quantize-lm-head out, or load the original"
