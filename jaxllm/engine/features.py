"""Registers the features that live in packages of their own. A package and its line here can be deleted together."""

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError

if TYPE_CHECKING:
    from jaxllm.model_config import ModelConfig
    from jaxllm.runner.drafter import Drafter
    from jaxllm.scheduler.draft_control import DraftControl

DRAFTERS: str | None = "jaxllm.speculative:make_drafter"
"""What makes the drafter of a speculative_config, as module:function; None: this build has no drafters."""


def check_speculative_config(config: EngineConfig) -> None:
    """Raise ConfigError for a speculative_config that is wrong in itself or that other options exclude. Does not import JAX."""
    if config.speculative.speculative_config is not None:
        module, _ = _drafters()
        module.of_engine(config)


class Speculation(Protocol):
    """What the package of drafters makes of a speculative_config."""

    @property
    def drafter(self) -> "Drafter": ...

    @property
    def described(self) -> Mapping[str, Any]:
        """All that the compiled programs depend on, as JSON values."""

    def new_control(self) -> "DraftControl":
        """What decides how many drafts requests get."""


def make_speculation(config: EngineConfig, target: "ModelConfig") -> Speculation | None:
    """The drafter of a config and its control; None without speculative_config. Raises ConfigError or ModelLoadError."""
    if config.speculative.speculative_config is None:
        return None
    module, name = _drafters()
    made: Speculation = getattr(module, name)(config, target)
    return made


def _drafters() -> tuple[ModuleType, str]:
    """The package of drafters, and the name of the function that makes one. Raises ConfigError if there is none."""
    if DRAFTERS is None:
        raise ConfigError("speculative_config is set, but this build has no drafters; leave it out")
    module, _, name = DRAFTERS.partition(":")
    return importlib.import_module(module), name
