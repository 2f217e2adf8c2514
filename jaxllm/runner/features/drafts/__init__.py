"""Drafts: tokens that a drafter proposes, and that a step verifies."""

from jaxllm.runner.drafter import Drafter
from jaxllm.runner.features.drafts.step import Drafts
from jaxllm.runner.step_feature import FeatureParts, StepFeature


def make(parts: FeatureParts) -> StepFeature | None:
    """For engines with a drafter."""
    drafter: Drafter | None = parts.beside["drafter"]
    if drafter is None:
        return None
    weights, config = parts.weights.get("drafter"), parts.model_config
    merge = None if weights is None else weights.merge
    return Drafts(drafter, parts.policy, merge, config.num_layers, parts.max_len, config.padded_vocab_size)
