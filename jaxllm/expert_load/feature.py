"""What the options of an engine make of the load of experts."""

from dataclasses import dataclass

from jaxllm.config import EngineConfig
from jaxllm.expert_load.layout import Layout
from jaxllm.expert_load.reader import Counter, LoadReader
from jaxllm.model_config import ModelConfig


@dataclass(frozen=True)
class ExpertLoad:
    """See `jaxllm.engine.features.ExpertLoad`."""

    layout: Layout

    def new_reader(self, counter: Counter) -> LoadReader:
        """See ExpertLoad."""
        return LoadReader(counter, self.layout)


def make_expert_load(config: EngineConfig, model_config: ModelConfig) -> ExpertLoad:
    """The feature of a model with mixtures."""
    parallel = config.parallel
    return ExpertLoad(Layout.of(model_config, num_devices=parallel.num_lanes * parallel.tensor_parallel_size))
