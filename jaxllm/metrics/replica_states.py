"""Which of several replicas serve, as metrics of a front."""

from collections.abc import Iterable, Sequence

from jaxllm.metrics.collect import Collected
from jaxllm.metrics.metric import Metric


def replica_states(model_name: str, states: Sequence[str], possible: Iterable[str]) -> list[Metric]:
    """A gauge for each replica and possible state; `states`: that of each replica."""
    listed, found = list(possible), []
    for rank, now in enumerate(states):
        of_one = Collected({"model_name": model_name, "engine": str(rank)})
        for state in listed:
            of_one.gauge("replica_state", int(state == now), "of several replicas: 1 for the state that it is in", state=state)
        found += of_one.metrics
    return found
