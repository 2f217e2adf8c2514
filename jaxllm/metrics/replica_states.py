"""Which replicas of the engine serve, as metrics of an API server."""

from collections.abc import Iterable, Sequence

from jaxllm.metrics.collect import Collected
from jaxllm.metrics.metric import Metric


def replica_states(model_name: str, replicas: Sequence[tuple[str, float]], possible: Iterable[str]) -> list[Metric]:
    """A gauge for each replica and possible state, and one for its latest tick; `replicas`: state and seconds since then."""
    listed, found = list(possible), []
    tick = "seconds since the engine's loop last began a step or a call, or was known to wait for work"
    for rank, (now, tick_seconds) in enumerate(replicas):
        of_one = Collected({"model_name": model_name, "engine": str(rank)})
        for state in listed:
            of_one.gauge(
                "replica_state", int(state == now), "of each replica of the engine: 1 for the state that it is in", state=state
            )
        of_one.gauge("engine_last_tick_seconds", tick_seconds, tick)
        found += of_one.metrics
    return found
