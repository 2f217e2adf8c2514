"""Makes the drafter and its control that a `speculative_config` asks for."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxllm.cache_spec import row_bytes
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError
from jaxllm.model_config import ModelConfig
from jaxllm.runner.drafter import Drafter
from jaxllm.scheduler.draft_control import DraftControl
from jaxllm.speculative.control import AdaptiveControl
from jaxllm.speculative.ngram import NGramDrafter
from jaxllm.speculative.options import SpeculativeConfig, of_engine


@dataclass(frozen=True)
class Drafters:
    """See `jaxllm.engine.features.Speculation`."""

    options: SpeculativeConfig
    drafter: Drafter

    @property
    def described(self) -> Mapping[str, Any]:
        """See Speculation."""
        return dataclasses.asdict(self.options)

    def new_control(self, cost_of: Callable[[int], float]) -> DraftControl:
        """See Speculation."""
        return AdaptiveControl(
            self.options.num_speculative_tokens,
            self.drafter.num_lookahead,
            most_drafts=self.options.most_drafts,
            cost_of=cost_of,
        )


def make(config: EngineConfig, target: ModelConfig) -> Drafters:
    """For an engine with these options, of which speculative_config is set. Raises ConfigError or ModelLoadError."""
    options = of_engine(config)
    assert options is not None
    if not target.generates:
        raise ConfigError("speculative_config: this model writes no tokens; leave speculative_config out")
    if row_bytes(target):
        raise ConfigError(
            f"speculative_config: {target.architecture} has layers with linear attention, whose states cannot drop a wrong draft; "
            "leave speculative_config out"
        )
    return Drafters(options, _drafter(options, config, target))


def _drafter(options: SpeculativeConfig, config: EngineConfig, target: ModelConfig) -> Drafter:
    num_drafts = options.num_speculative_tokens
    if options.method == "ngram":
        rates = options.synthetic_rates_after_each
        return NGramDrafter(num_drafts, options.prompt_lookup_min, options.prompt_lookup_max, synthetic_rates=rates)
    raise ConfigError(f"speculative_config: method {options.method} is not there yet")
