"""Reads adapters: from a directory as PEFT writes it to the factors of each layer that they change."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from jaxllm.errors import AdapterError, ModelLoadError
from jaxllm.files import read_bounded
from jaxllm.hub import resolve_model
from jaxllm.log import logger
from jaxllm.lora.match import Factors, Match
from jaxllm.lora.peft import CONFIG, MAX_CONFIG_BYTES, PeftConfig, read_config
from jaxllm.lora.shapes import ExpertPart, TargetShape
from jaxllm.lora.weights import NAMES, WeightsFile

_KEPT = 4
"""Tensors of a layer's experts: A and B of two parameters."""
_TENSORS_PER_TARGET = 4
"""Limit of an adapter's tensors, of which a target has two. To look at more holds up other threads."""
_MIN_TENSORS = 4096
"""The limit for a small model: adapters of other models are still recognised by their names."""


class AdapterFiles:
    """An adapter whose names, shapes and types fit the model. Its values are read when they are asked for."""

    def __init__(
        self,
        directory: Path,
        config: PeftConfig,
        weights: WeightsFile,
        targets: Mapping[str, TargetShape],
        factors: Mapping[str, Factors],
        padded_rank: int,
    ):
        self.directory = directory
        self.config = config
        self.rank = max(each.rank for each in factors.values())
        """The largest of its modules'."""
        self._padded_rank = padded_rank
        self._weights, self._targets, self._factors = weights, targets, factors
        self._recent: dict[str, np.ndarray] = {}

    @property
    def modules(self) -> tuple[str, ...]:
        """The targets that it changes."""
        return tuple(self._factors)

    def digest(self) -> str:
        """A hash of the files, whose factors and scales change keys and values. Raises AdapterError if one cannot be read."""
        digest = hashlib.sha256(read_bounded(self.directory / CONFIG, MAX_CONFIG_BYTES, AdapterError))
        self._weights.add_to(digest)
        return digest.hexdigest()

    def tensor(self, name: str) -> np.ndarray:
        """A target's "….lora_A.weight", float32 [rank, inputs], or "….lora_B.weight", float32 [outputs, rank] with the scale
        multiplied in; zeros if the adapter does not change the target. The same for embeddings, whose inputs are tokens.

        Raises AdapterError if the file was deleted or changed, or has values that are not finite.
        """
        module, _, side = name.removesuffix(".weight").rpartition(".lora_")
        target, factors = self._targets[module], self._factors.get(module)
        tensor = np.zeros(
            (self._padded_rank, target.inputs) if side == "A" else (target.outputs, self._padded_rank), np.float32
        )
        if factors is None:
            return tensor
        with np.errstate(over="ignore", invalid="ignore"):
            if side == "A":
                tensor[: factors.rank] = self._a(factors, target.part)
            else:
                np.multiply(self._b(factors, target.part), np.float32(factors.scale), out=tensor[:, : factors.rank])
        if not np.isfinite(tensor).all():
            raise AdapterError(
                f"adapter {self.directory}: {name} has values that are not finite numbers; train or save the adapter again"
            )
        return tensor

    def _a(self, factors: Factors, part: ExpertPart | None) -> np.ndarray:
        if part is None or factors.form == "module":
            return self._weights.values(factors.a)
        if factors.form == "swapped":
            return self._columns(factors.b, part, factors.rank).T
        return self._rows(factors.a, part, factors.rank)

    def _b(self, factors: Factors, part: ExpertPart | None) -> np.ndarray:
        if part is None or factors.form == "module":
            return self._weights.values(factors.b)
        if factors.form == "swapped":
            return self._rows(factors.a, part, factors.rank).T[slice(*part.rows)]
        return self._columns(factors.b, part, factors.rank)[slice(*part.rows)]

    def _rows(self, tensor: str, part: ExpertPart, rank: int) -> np.ndarray:
        """An expert's part of A: its rows are [experts, rank]."""
        return self._of_all_experts(tensor).reshape(part.num_experts, rank, -1)[part.expert]

    def _columns(self, tensor: str, part: ExpertPart, rank: int) -> np.ndarray:
        """An expert's part of B: its columns are [rank, experts]."""
        return self._of_all_experts(tensor).reshape(-1, rank, part.num_experts)[..., part.expert]

    def _of_all_experts(self, tensor: str) -> np.ndarray:
        if tensor not in self._recent:
            if len(self._recent) == _KEPT:
                del self._recent[next(iter(self._recent))]
            self._recent[tensor] = self._weights.values(tensor)
        return self._recent[tensor]


def read_adapter(
    path: str | Path,
    targets: Mapping[str, TargetShape],
    max_rank: int,
    rank: int,
    *,
    target_modules: Sequence[str] | None = None,
    left_out: Mapping[str, TargetShape] = MappingProxyType({}),
    model: str | None = None,
) -> AdapterFiles:
    """An adapter of PEFT, checked without reading its values.

    path: its directory, or a hub id, which is downloaded.
    targets: what adapters may change, by the checkpoint's names of modules.
    max_rank: the highest rank that adapters may have.
    rank: of the tensors that are handed out, which are padded with zeros; at least max_rank.
    target_modules: the option lora_target_modules, for errors.
    left_out: what adapters could change with other values of it.
    model: the name of the served model, for the log.

    Raises AdapterError.
    """
    directory = _directory(str(path))
    config = read_config(directory)
    weights = WeightsFile(directory, max(_MIN_TENSORS, _TENSORS_PER_TARGET * len(targets)))
    factors = Match(directory, config, weights.entries, targets, max_rank, target_modules, left_out).factors()
    if config.base_model not in ("", model):
        logger.debug("adapter %s was made for %s, and is used with %s", directory, config.base_model, model)
    if config.task_type not in ("", "CAUSAL_LM"):
        logger.debug("adapter %s was made for the task %s", directory, config.task_type)
    return AdapterFiles(directory, config, weights, targets, factors, rank)


def _directory(path: str) -> Path:
    try:
        return resolve_model(path, files=(CONFIG, *NAMES))
    except (ModelLoadError, OSError, ValueError) as error:
        raise AdapterError(f"adapter {path}: {error}") from error
