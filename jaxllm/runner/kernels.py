"""The implementation of each op in an engine's programs."""

from dataclasses import dataclass

OPS = ("paged_attention", "rope_cache_write", "sampling", "collectives", "expert_choice", "grouped_matmul")


@dataclass(frozen=True)
class Kernels:
    """An implementation by name for each op of `pallas_kernels` that a step runs."""

    paged_attention: str
    rope_cache_write: str
    sampling: str
    """"xla" is plain JAX (`jaxllm.sampling`)."""
    collectives: str = "xla"
    """What several devices exchange sums and logits by: "peer" reads and writes the peers' memory."""
    expert_choice: str = "xla"
    """Which experts of a mixture compute each token."""
    grouped_matmul: str = "xla"
    """Experts of a mixture."""
    interpret: bool = False
    """Run Pallas kernels as plain JAX: on a CPU."""

    def by_op(self) -> dict[str, str]:
        """The names alone."""
        return {op: getattr(self, op) for op in OPS}
