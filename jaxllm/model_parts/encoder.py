"""Parts of encoders other than layers, and heads that score the classes of prompts."""

from dataclasses import dataclass
from typing import Literal

from jaxllm.model_parts.mlp import Activation
from jaxllm.model_parts.norm import Norm

ClassActivation = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True)
class Encoder:
    """An encoder's own parts. Each token sees all others of its prompt, or with a window those at most so far away on both sides."""

    embedding_norm: Norm
    """Norm of the embeddings, whose result enters the first layer."""
    token_types: str | None = None
    """Name of learned embeddings of types, added to those of the tokens: type 0 in a first text, 1 in a second one."""
    num_token_types: int = 0


@dataclass(frozen=True)
class ClassifierHidden:
    """The layer of a classifier before the last: norm(activation(dense(x)))."""

    dense: str
    activation: Activation | Literal["tanh"]
    bias: bool = True
    norm: Norm | None = None


@dataclass(frozen=True)
class Classifier:
    """Scores the classes of a prompt by its pooled vector."""

    labels: tuple[str, ...]
    """Name of each class."""
    out: str
    """Name of the last layer, which gives a score for each class."""
    activation: ClassActivation
    """Function from scores to probabilities."""
    bias: bool = True
    hidden: ClassifierHidden | None = None
    takes_pairs: bool = False
    """Whether the tokenizer puts its special tokens between two texts; if not, they are one text."""
    token_ids: tuple[int, ...] = ()
    """The score of the only class is the logit of the last of these tokens, minus that of the one before it if there are two. `out` is
    then the head, or with a tied one the embedding; empty: it has a row for each class."""
