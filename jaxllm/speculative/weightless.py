"""The parts of a drafter that has neither weights nor a cache."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from jaxllm.cache_spec import CacheSpec
from jaxllm.model_parts import Layer
from jaxllm.progress import Progress


class WeightlessDrafter:
    """See Drafter."""

    num_lookahead = 0
    feature_layers: tuple[int, ...] = ()
    cache_specs: tuple[CacheSpec, ...] = ()
    model: nnx.Module | None = None
    layers: tuple[Layer, ...] = ()
    is_drawn = False

    @property
    def described(self) -> Mapping[str, Any]:
        """Nothing but the options."""
        return {}

    def load(self, mesh: Mesh, progress: Progress) -> nnx.State:
        """There are no weights."""
        raise AssertionError("the drafter has no weights")
