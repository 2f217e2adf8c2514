"""How each token chooses its experts."""

from dataclasses import dataclass

SCORINGS = ("softmax", "sigmoid", "softmax_of_chosen", "sparsemixer")


@dataclass(frozen=True)
class Rule:
    """How each token chooses its experts from the logits of the router.

    softmax and sigmoid: the largest scores, of which the weights are those chosen; softmax_of_chosen: the largest logits, weighted by
    the softmax over these alone; sparsemixer: two experts, one after the other.
    """

    top_k: int
    """Experts of a token."""
    scoring: str = "softmax"
    renormalize: bool = False
    """Whether the weights of a token are divided by their sum. Softmax and sigmoid."""
    scale: float = 1.0
    """Factor of the weights. All but sparsemixer."""
    num_groups: int = 1
    top_groups: int = 1
    """Only experts of so many groups are chosen: of those with the largest score. Softmax and sigmoid."""
    sums_two: bool = False
    """Whether the score of a group is the sum of its two largest, instead of its largest."""
    jitter: float = 0.0
    """Of sparsemixer: relative distance from the largest logit within which experts share the weight, halved."""
