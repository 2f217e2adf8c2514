"""Parameters of pooling (one vector per prompt, or one per token), with their validation."""

import numbers
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxllm.errors import InvalidRequestError
from jaxllm.sampling_params import RequestOutputKind

PoolingTask = Literal["embed", "token_embed", "classify"]
TASKS: tuple[str, ...] = get_args(PoolingTask)
_NOT_SUPPORTED = {
    "token_classify": "classes are those of whole prompts",
    "score": "classify a pair of texts, or compare their embeddings (LLM.score, /score)",
    "plugin": "there are no plugins",
}


@dataclass(kw_only=True)
class PoolingParams:
    """Pooling

    How the hidden states of a prompt are pooled; names and meanings are vLLM's. Construction raises InvalidRequestError for
    a value that no model supports.
    """

    task: PoolingTask | None = None
    """embed: one vector for the prompt; token_embed: one for each token; classify: a number for each class. None: what the method that is
    called makes, or the model."""
    use_activation: bool | None = None
    """Whether vectors are divided by their length, in float32, and scores of classes become probabilities; None: as the model says."""
    dimensions: int | None = None
    """Number of leading values of each vector, for models trained for it (Matryoshka); None: all."""
    truncate_prompt_tokens: int | None = None
    """Most tokens of the prompt, the special ones that the tokenizer adds included; -1: what the model takes; None: a longer
    prompt is an error."""
    truncation_side: Literal["left", "right"] = "right"
    """Where tokens are cut off."""
    skip_reading_prefix_cache: bool | None = None
    """None: read it unless the hidden state of every token is needed."""

    @property
    def output_kind(self) -> RequestOutputKind:
        """There is one output, at the end."""
        return RequestOutputKind.FINAL_ONLY

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            reason = _NOT_SUPPORTED.get(self.task) if isinstance(self.task, str) else None
            raise _wrong("task", self.task, f"one of {', '.join(TASKS)}" + (f": {reason}" if reason else ""))
        for name in ("use_activation", "skip_reading_prefix_cache"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise _wrong(name, value, "true, false or None")
        if self.dimensions is not None and not _is_integer(self.dimensions, 1):
            raise _wrong("dimensions", self.dimensions, "an integer of at least 1")
        limit = self.truncate_prompt_tokens
        if limit is not None and not (limit == -1 or _is_integer(limit, 1)):
            raise _wrong("truncate_prompt_tokens", limit, "an integer of at least 1, or -1 for what the model takes")
        if self.truncation_side not in ("left", "right"):
            raise _wrong("truncation_side", self.truncation_side, "left or right")


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least


def _wrong(name: str, value: Any, must_be: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r}, must be {must_be}", name)
