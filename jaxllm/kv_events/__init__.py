"""Publishes which blocks the prefix cache has, as vLLM does, for routers of several engines. Does not import JAX."""

from collections.abc import Sequence

from jaxllm.cache_policy import WindowPolicy
from jaxllm.cache_spec import CacheGroup, CacheLayout
from jaxllm.config import EngineConfig
from jaxllm.kv_events.messages import BatchEncoder, Group
from jaxllm.kv_events.publisher import Publisher
from jaxllm.kv_events.recorder import Recorder
from jaxllm.log import logger
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import LatentAttention
from jaxllm.options.kv_events import KVEventsConfig
from jaxllm.scheduler.cache_tier import CacheTier
from jaxllm.scheduler_stats import SchedulerStats


class KVEvents:
    """The events of an engine: a publisher and a recorder for each data-parallel rank in it."""

    def __init__(self, config: EngineConfig, replica: int):
        """replica: the number of the engine. Raises ConfigError if an address cannot be used."""
        num_ranks = config.parallel.num_ranks
        self._ranks = range(num_ranks) if num_ranks > 1 else range(replica, replica + 1)
        self._publishers: list[Publisher] = []
        self._recorders: list[Recorder] = []
        options = KVEventsConfig.of(config.observe.kv_events_config)
        try:
            for rank in self._ranks:
                self._publishers.append(Publisher(options, rank))
        except BaseException:
            self.close()
            raise

    def new_observer(
        self, config: EngineConfig, model: ModelConfig, cache: CacheLayout, tiers: Sequence[CacheTier]
    ) -> Recorder:
        """Make what the next rank's scheduler reports to, and its tiers."""
        if not config.cache.enable_prefix_caching:
            logger.warning("kv_events_config is on, but %s has no prefix cache, so there are no events", model.architecture)
        index = len(self._recorders)
        publisher, block_size = self._publishers[index], config.block_tokens
        encoder = BatchEncoder(
            [_group(group, model) for group in cache.groups],
            block_size=block_size,
            rank=self._ranks[index],
            int_hashes=config.observe.kv_events_use_int_block_hashes,
        )
        publisher.start(encoder.encode)
        recorder = Recorder(publisher, block_size, has_tiers=bool(tiers))
        for tier in tiers:
            tier.listener = recorder.note_tier
        self._recorders.append(recorder)
        return recorder

    def publish(self) -> None:
        """Hand on what has changed since the last call."""
        for recorder in self._recorders:
            recorder.publish()

    def add_stats(self, stats: SchedulerStats) -> None:
        """Add its numbers."""
        stats.num_kv_event_batches += sum(recorder.num_batches for recorder in self._recorders)
        stats.num_dropped_kv_events += sum(recorder.num_dropped for recorder in self._recorders)

    def close(self) -> None:
        """Send what is queued, and end."""
        for publisher in self._publishers:
            publisher.close()


def _group(group: CacheGroup, model: ModelConfig) -> Group:
    """Return vLLM's description of a group of layers."""
    if isinstance(group.policy, WindowPolicy):
        return Group("sliding_window", group.policy.window)
    has_latents = any(isinstance(model.layers[layer].attention, LatentAttention) for layer in group.layers)
    return Group("mla_attention" if has_latents else "full_attention")
