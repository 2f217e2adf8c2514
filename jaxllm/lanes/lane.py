"""One lane: rows, batches, and the programs that its devices run alone."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jaxllm.lanes.arrays import LaneWeights
from jaxllm.lanes.programs import LanePrograms
from jaxllm.parallel.arrays import delete
from jaxllm.runner.row_arrays import RowArrays
from jaxllm.runner.runner import ModelRunner
from jaxllm.runner.weights import Weights


class Lane(ModelRunner):
    """A runner without caches and without the programs that compute layers: `LanesRunner` has these, for all lanes."""

    programs_type = LanePrograms
    take_rows: Callable[[], Any]
    """Gives every lane the arrays of its rows that a program of all lanes has left."""

    def __init__(self, config: Any, model_config: Any, model: Any, mesh: Mesh, *arguments: Any, joint: Weights, **options: Any):
        """As ModelRunner. joint: the weights of all lanes."""
        super().__init__(config, model_config, model, mesh, *arguments, weights=LaneWeights(joint, mesh), **options)

    @property
    def row_arrays(self) -> RowArrays:  # type: ignore[override]
        if self._row_arrays is None:
            self.take_rows()
        assert self._row_arrays is not None
        return self._row_arrays

    @row_arrays.setter
    def row_arrays(self, arrays: RowArrays | None) -> None:
        self._row_arrays = arrays

    def allocate_caches(self) -> None:
        """The caches are those of all lanes."""
        self.keep_small_places()

    def drop_caches(self) -> None:
        """Free all rows and what full sampling and other heads keep. The arrays of rows may lie in those of all lanes."""
        self.rows.clear()
        delete(self._row_arrays)
        self._delete_heads_arrays()
