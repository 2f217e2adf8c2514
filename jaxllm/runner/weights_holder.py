"""The weights of an executor on its devices: how they come, stay on the host while the engine sleeps, and go."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import jax
from flax import nnx

from jaxllm.parallel.arrays import delete
from jaxllm.progress import SILENT, Progress
from jaxllm.runner.row_arrays import Params
from jaxllm.runner.weights import HostCopies, Weights, WeightsSource, host_copies
from jaxllm.start_times import StartTimes


class WeightsHolder:
    """The part of an Executor that has to do with weights."""

    def __init__(self, weights: Weights, source: WeightsSource, times: StartTimes):
        """weights: the shapes of all weights."""
        self.weights, self.times = weights, times
        self.params: Params = ()
        """Weights as programs take them; empty before they are loaded and while they are dropped."""
        self._source, self._model_dir = source, Path(source.config.model.model)
        self._kept: HostCopies | None = None

    def set_params(self, params: Params) -> None:
        """Have programs take these from now on."""
        self.params = params

    def replace_params(self, changed: Mapping[int, jax.Array]) -> None:
        """Have programs take these in place of some, by their index."""
        self.params = tuple(changed.get(index, array) for index, array in enumerate(self.params))

    def set_weights(self, *weights: nnx.State) -> None:
        """Set the weights of the model, of its drafter, the slots of adapters and the places of experts, as far as there are any, with the
        shapes and placement that they declare."""
        self.set_params(self.weights.flatten(weights))

    def load_weights(self, model_dir: Path, progress: Progress) -> None:
        """Read the weights of the model and of its drafter from their checkpoints; the slots of adapters are empty. Waits until they are on
        the devices. Raises ModelLoadError."""
        self._model_dir = model_dir
        with self.times.part("weights"):
            weights = self._source.read(model_dir, progress)
            try:
                self.set_weights(*weights)
            except BaseException:
                delete(weights)  # the error keeps this call's variables alive
                raise

    def take_weights(self, other: Self) -> None:
        """Take over the weights of an executor of the same models, which loses them."""
        self._model_dir = other._model_dir
        self.set_params(other.params)
        other.set_params(())

    def memory(self, action: str, part: str) -> None:
        """See Executor."""
        call: Callable[[], None] = {
            ("keep", "weights"): self._keep_weights,
            ("restore", "weights"): self._restore_weights,
            ("drop", "weights"): self._drop_weights,
            ("drop", "copies"): self._drop_copies,
            ("restore", "kv_cache"): self.start_over,
            ("drop", "kv_cache"): self.drop_caches,
        }[action, part]
        call()

    def start_over(self) -> None:
        """See Executor."""
        raise NotImplementedError

    def drop_caches(self) -> None:
        """Free all rows and the arrays that steps change."""
        raise NotImplementedError

    def _keep_weights(self) -> None:
        self._kept = host_copies(self.params)

    def _drop_copies(self) -> None:
        self._kept = None

    def _restore_weights(self) -> None:
        if self._kept is None:
            self.load_weights(self._model_dir, SILENT)
        else:
            self.set_params(self.weights.place(self._kept))

    def _drop_weights(self) -> None:
        delete(self.params)
        self.set_params(())
