"""The names of an adapter's tensors, and which modules of the model they stand for."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from jaxllm.lora.peft import PeftConfig
from jaxllm.lora.shapes import EXPERT_PARAMETERS, TargetShape

_PREFIX = "base_model.model."
_INNER = ".base_layer"
"""Name of a module inside the wrapper of another of its parameters."""
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.(?!weight$)[^.]+)?(\.weight)?")
"""PEFT before 0.3 wrote the adapter's name behind lora_A too: "….lora_A.default.weight"."""
_WRAPPERS = {"model", "language_model", "text_model", "transformer"}
"""Parts of names before the layers that differ between classes of the same model."""


@dataclass(frozen=True)
class LoraName:
    """A tensor of the file."""

    tensor: str
    """Name in the file."""
    module: str
    """PEFT's name: "model.layers.0.self_attn.q_proj"."""
    side: str
    """A or B."""
    is_embedding: bool


def parse(tensor: str) -> LoraName | None:
    """None: it is no part of a LoRA."""
    found = None if tensor.endswith(".bias") else _TENSOR.fullmatch(tensor)
    if found is None:
        return None
    return LoraName(tensor, module_of(found["module"]), found["side"], found["embedding"] is not None)


def module_of(name: str) -> str:
    """A name of the file without PEFT's common prefix."""
    return name.removeprefix(_PREFIX)


@dataclass(frozen=True)
class Experts:
    """A parameter of all experts of a layer."""

    module: str
    """PEFT's name of the module."""
    parameter: str
    targets: Mapping[str, TargetShape]
    """By the name of the target."""

    @property
    def name(self) -> str:
        """PEFT's name of the parameter."""
        return f"{self.module}.{self.parameter}"


class TargetNames:
    """The targets by the names that adapters have for them."""

    def __init__(self, targets: Mapping[str, TargetShape]):
        self._names = {_canonical(name): name for name in targets}
        experts: dict[str, dict[str, dict[str, TargetShape]]] = defaultdict(lambda: defaultdict(dict))
        for name, target in targets.items():
            if target.part is not None:
                experts[_canonical(target.part.module)][target.part.parameter][name] = target
        self._experts = experts

    def target(self, module: str) -> str | None:
        """The target that PEFT calls `module`; None: there is no such."""
        return self._names.get(_canonical(module))

    def owner(self, module: str) -> str | None:
        """The module that has parameters of all experts, if `module` is a wrapper of one of them."""
        while module.endswith(_INNER):
            module = module.removesuffix(_INNER)
        return module if _canonical(module) in self._experts else None

    def last_names(self, module: str) -> list[str]:
        """Last names of the targets that `module` stands for; empty if it stands for none."""
        target, owner = self.target(module), self.owner(module)
        of_owner = [] if owner is None else [name for each in self._experts[_canonical(owner)].values() for name in each]
        return list(dict.fromkeys(name.rpartition(".")[2] for name in ([] if target is None else [target]) + of_owner))

    def parameters(
        self, owner: str, wrappers: Iterable[str], config: PeftConfig, fits: Callable[[str, Experts], bool]
    ) -> dict[str, Experts]:
        """The parameter that each of the wrappers around a module's parameters adapts; without those for which it is unknown.

        PEFT puts a wrapper around the module for each parameter, in the order in which they are declared, and names it by its
        depth alone.

        fits: whether the tensors of a wrapper have the shapes of a parameter's.
        """
        known = self._experts[_canonical(owner)]
        all_parameters = [Experts(owner, name, known[name]) for name in EXPERT_PARAMETERS if name in known]
        innermost_first = sorted(wrappers, key=len, reverse=True)
        wrapped = [each for each in all_parameters if _is_named(each.name, config.target_parameters)]
        if len(wrapped) != len(innermost_first):
            wrapped = all_parameters
        if len(wrapped) == len(innermost_first):
            return dict(zip(innermost_first, wrapped, strict=True))
        if len(innermost_first) > 1:
            return {}
        return {wrapper: each for wrapper in innermost_first for each in all_parameters if fits(wrapper, each)}


def name_in_config(module: str, config: PeftConfig) -> str:
    """The name that patterns for ranks and alphas match: that of the weight if `target_parameters` names it, as for routers."""
    weight = f"{module}.weight"
    return weight if _is_named(weight, config.target_parameters) else module


def is_covered(module: str, config: PeftConfig) -> bool:
    """Whether the config names a module. Patterns are not tried: they may take for ever."""
    names = config.target_modules
    if config.ties_weights or not isinstance(names, frozenset) or name_in_config(module, config) != module:
        return True
    return not names or _is_named(module, names)


def _is_named(name: str, ends: Collection[str]) -> bool:
    """ends: a set, which may be large."""
    return name in ends or any(name[i + 1 :] in ends for i, letter in enumerate(name) if letter == ".")


def _canonical(name: str) -> str:
    """One name for all names of a module, whichever class of the model it belongs to."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part not in _WRAPPERS), len(parts) - 1)
    return ".".join("mlp" if part == "block_sparse_moe" else part for part in parts[first:])
