"""The choice of experts for each token."""

from jaxllm.model_parts import Routing
from pallas_kernels.expert_choice import Rule


def rule_of(routing: Routing) -> Rule:
    """A routing as `pallas_kernels.expert_choice` takes it."""
    return Rule(
        top_k=routing.top_k,
        scoring=routing.scoring,
        renormalize=routing.renormalize,
        scale=routing.scale,
        num_groups=routing.num_groups,
        top_groups=routing.top_groups,
        sums_two=routing.sums_two,
        jitter=routing.jitter,
    )
