"""Registers what engines add to their steps, a file or folder each. A feature and its line here can be deleted together."""

import importlib

from jaxllm.runner.step_feature import FeatureParts, StepFeature

FEATURES = (
    "drafts",
    "token_split",
    "adapters",
    "expert_slots",
    "expert_counts",
    "prompt_logprobs",
    "pooling",
)
"""Modules here, in the order of `StepFeature.before`. Each has make(parts), which returns None for engines without the feature."""


def make_features(parts: FeatureParts) -> tuple[StepFeature, ...]:
    """The features of an engine."""
    made = (importlib.import_module(f"{__name__}.{module}").make(parts) for module in FEATURES)
    return tuple(feature for feature in made if feature is not None)
