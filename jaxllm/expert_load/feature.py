"""Counts and moves experts as the options of an engine say."""

from dataclasses import dataclass

from jaxllm.config import EngineConfig
from jaxllm.expert_load.layout import Layout
from jaxllm.expert_load.reader import LoadReader, Ops
from jaxllm.expert_load.rebalancer import Rebalancer
from jaxllm.model_config import ModelConfig
from jaxllm.options.eplb import EplbConfig


@dataclass(frozen=True)
class ExpertLoad:
    """See `jaxllm.engine.features.ExpertLoad`."""

    layout: Layout
    eplb: EplbConfig | None
    """None: experts do not move."""

    def new_reader(self, ops: Ops) -> LoadReader:
        """See ExpertLoad."""
        rebalancer = None if self.eplb is None else Rebalancer(ops, self.layout, self.eplb)
        return LoadReader(ops, self.layout, rebalancer)


def make_expert_load(config: EngineConfig, model_config: ModelConfig) -> ExpertLoad:
    """The feature of a model with mixtures."""
    parallel = config.parallel
    eplb = EplbConfig.of(parallel.eplb_config) if parallel.enable_eplb else None
    return ExpertLoad(Layout.of(model_config, num_devices=parallel.num_ranks * parallel.tensor_parallel_size), eplb)
