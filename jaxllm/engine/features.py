"""Registers the features that live in packages of their own. A package and its line here can be deleted together."""

import importlib

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError

DRAFTERS: str | None = "jaxllm.speculative:make_drafter"
"""What makes the drafter of a speculative_config, as module:function; None: this build has no drafters."""


def check_speculative_config(config: EngineConfig) -> None:
    """Raise ConfigError for a speculative_config that is wrong in itself or that other options exclude. Does not import JAX."""
    if config.speculative.speculative_config is None:
        return
    if DRAFTERS is None:
        raise ConfigError("speculative_config is set, but this build has no drafters; leave it out")
    importlib.import_module(DRAFTERS.partition(":")[0]).of_engine(config)
