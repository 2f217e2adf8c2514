"""Which layers of a model an adapter's tensors belong to, and whether they fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from jaxllm.errors import AdapterError
from jaxllm.loaders.checkpoint import TensorEntry
from jaxllm.lora.names import Experts, LoraName, TargetNames, is_covered, module_of, name_in_config, parse
from jaxllm.lora.peft import CONFIG, MERGE, PeftConfig
from jaxllm.lora.shapes import EXPERT_PARAMETERS, ExpertPart, TargetShape
from jaxllm.options.lora import RANKS

_DTYPES = ("F32", "F16", "BF16")
_SHOWN = 3
"""Names that an error lists."""

Shape = tuple[int, ...]
Form = Literal["module", "experts", "swapped"]
"""A module alone; all experts; all experts, A being B transposed: PEFT took the parameter's inputs for its outputs, as their
order does not tell which are which."""


@dataclass(frozen=True)
class Factors:
    """A and B of a module, or of a parameter of all experts."""

    a: str
    """A tensor of the file."""
    b: str
    rank: int
    scale: float
    form: Form = "module"


class Match:
    """The modules of one file."""

    def __init__(
        self,
        directory: Path,
        config: PeftConfig,
        entries: Mapping[str, TensorEntry],
        targets: Mapping[str, TargetShape],
        max_rank: int,
        target_modules: Sequence[str] | None,
        left_out: Mapping[str, TargetShape],
    ):
        self._directory, self._config, self._entries, self._targets = directory, config, entries, targets
        self._max_rank, self._option = max_rank, target_modules
        self._names, self._left_out = TargetNames(targets), TargetNames(left_out)
        self._sides = self._read_names()

    def factors(self) -> dict[str, Factors]:
        """The factors of each target. Raises AdapterError."""
        targets = {module: self._names.target(module) for module in self._sides}
        owners = {module: self._names.owner(module) for module, target in targets.items() if target is None}
        self._check_known([module for module, owner in owners.items() if owner is None])
        single = {module: target for module, target in targets.items() if target is not None}
        self._check_pairs(single)
        self._complain(
            (module for module in single if not is_covered(module, self._config)),
            f"{CONFIG} does not list in target_modules {{}}, of which there are weights; add it there, or remove the weights",
        )
        parameters = self._parameters({module: owner for module, owner in owners.items() if owner is not None})
        self._check_shapes(single, parameters)
        found: dict[str, Factors] = {}
        for module, target in single.items():
            self._add(
                found, target, self._made(module, name_in_config(module, self._config), self._shapes(module)[0][0], "module")
            )
        for module, experts in parameters.items():
            rank = self._shapes(module)[0][0] // _part(experts).num_experts
            form = self._form(module, experts)
            assert form is not None, "the shapes were checked"
            made = self._made(module, experts.name, rank, form)
            for target in experts.targets:
                self._add(found, target, made)
        self._check_rank(max(each.rank for each in found.values()))
        return found

    def _add(self, found: dict[str, Factors], target: str, factors: Factors) -> None:
        if target in found:
            self._fail(f"it has weights of {target} twice, {found[target].a} and {factors.a}; remove one of them")
        found[target] = factors

    def _made(self, module: str, name: str, rank: int, form: Form) -> Factors:
        """name: what the config's patterns are about."""
        expected = self._config.rank_of(name)
        if rank != expected:
            self._fail(
                f"{module} has rank {rank}, but {CONFIG} says {expected} (r or rank_pattern); "
                "give config and weights of the same training"
            )
        own = self._sides[module]
        return Factors(own["A"].tensor, own["B"].tensor, rank, self._config.scale_of(name), form)

    def _check_rank(self, rank: int) -> None:
        if rank > RANKS[-1]:
            self._fail(f"its rank is {rank}, the highest that is supported is {RANKS[-1]}; {MERGE}")
        if rank > self._max_rank:
            self._fail(f"its rank is {rank}, above max_lora_rank ({self._max_rank}); raise --max-lora-rank to {rank}")

    def _read_names(self) -> dict[str, dict[str, LoraName]]:
        """The tensors of each module by side."""
        found: dict[str, dict[str, LoraName]] = {}
        others = []
        for tensor in self._entries:
            name = parse(tensor)
            if name is None:
                others.append(tensor)
                continue
            own = found.setdefault(name.module, {})
            if name.side in own:
                self._fail(f"it has weights of {name.module} twice, {own[name.side].tensor} and {tensor}; remove one of them")
            own[name.side] = name
        for tensor in others:
            self._check_other(tensor)
        if not found:
            self._fail("its weights have no tensor named ….lora_A.weight; save the adapter again with PEFT's save_pretrained")
        self._complain(
            (f"{name} ({entry.dtype})" for name, entry in self._entries.items() if entry.dtype not in _DTYPES),
            "weights must be float32, float16 or bfloat16: {}; save the adapter in one of these",
        )
        return found

    def _check_other(self, tensor: str) -> None:
        """PEFT writes the base's weights of an embedding or a head next to their LoRA. They are not needed."""
        module = module_of(tensor)
        target = self._names.target(module.removesuffix(".base_layer.weight"))
        if target is not None and module.endswith(".base_layer.weight"):
            shape = self._targets[target]
            expected = (shape.inputs, shape.outputs) if shape.kind == "embedding" else (shape.outputs, shape.inputs)
            found = self._entries[tensor].shape
            if found == expected:
                return
            self._fail(f"{tensor} is {list(found)}, the model's {target} {list(expected)}: its vocabulary was resized; {MERGE}")
        kind = (
            "part of DoRA" if "lora_magnitude_vector" in tensor else "a bias" if tensor.endswith(".bias") else "a whole weight"
        )
        self._fail(f"it has {tensor}, {kind}, and only lora_A and lora_B are supported; {MERGE}")

    def _check_known(self, strangers: Sequence[str]) -> None:
        left_out = {module: names for module in strangers if (names := self._left_out.last_names(module))}
        missing = ", ".join(sorted({name for names in left_out.values() for name in names}))
        way_out = (
            f"name them in lora_target_modules: {missing}, beside all others that adapters change"
            if self._option is None
            else f"add {missing} to lora_target_modules ({', '.join(self._option)})"
        )
        self._complain(left_out, f"it changes {{}}, for which the engine has no slots; {way_out}")
        known = _listed(sorted({name.rpartition(".")[2] for name in self._targets}), 20)
        self._complain(
            strangers,
            f"it changes {{}}, which the model does not have or adapters cannot change (they can change {known}); "
            f"use an adapter of this model{self._origin}, or train one without them",
        )

    def _check_pairs(self, single: Mapping[str, str]) -> None:
        self._complain(
            (f"{module} has only lora_{side}" for module, own in self._sides.items() for side in own if len(own) == 1),
            "it is incomplete: {}; save or copy it again",
        )
        self._complain(
            (
                each.tensor
                for module, own in self._sides.items()
                for each in own.values()
                if each.is_embedding != (module in single and self._targets[single[module]].kind == "embedding")
            ),
            "embeddings must have lora_embedding_A and lora_embedding_B, other layers lora_A and lora_B: {}; save the adapter again",
        )
        shapes = [(each.tensor, self._entries[each.tensor].shape) for own in self._sides.values() for each in own.values()]
        self._complain(
            (f"{tensor} {list(shape)}" for tensor, shape in shapes if len(shape) != 2 or 0 in shape),
            "tensors must be matrices and not empty: {}; where training shards weights (ZeRO-3, FSDP), gather them before saving",
        )

    def _parameters(self, owners: Mapping[str, str]) -> dict[str, Experts]:
        """The parameter of all experts that each wrapper adapts."""
        found: dict[str, Experts] = {}
        for owner in dict.fromkeys(owners.values()):
            own = [module for module in owners if owners[module] == owner]
            found |= self._names.parameters(owner, own, self._config, lambda m, each: self._form(m, each) is not None)
        self._complain(
            (module for module in owners if module not in found),
            f"cannot tell which of {' and '.join(EXPERT_PARAMETERS)} these adapt: {{}}; name them in {CONFIG} as "
            f"target_parameters, or use an adapter of this model{self._origin}",
        )
        return found

    def _check_shapes(self, single: Mapping[str, str], parameters: Mapping[str, Experts]) -> None:
        faults = []
        for module, name in single.items():
            target, rank = self._targets[name], self._shapes(module)[0][0]
            faults += self._misfits(module, ((rank, target.inputs), (target.outputs, rank)))
        for module, experts in parameters.items():
            if self._form(module, experts) is None:
                rows = self._config.rank_of(experts.name) * _part(experts).num_experts
                faults += self._misfits(module, _expert_shapes(experts, rows)[0])
        self._complain(faults, f"it does not fit the model: {{}}; use an adapter of this model{self._origin}")

    def _misfits(self, module: str, expected: tuple[Shape, Shape]) -> list[str]:
        each = zip("AB", self._shapes(module), expected, strict=True)
        return [
            f"{module}.lora_{side} is {list(shape)}, must be {list(wanted)}" for side, shape, wanted in each if shape != wanted
        ]

    def _form(self, module: str, experts: Experts) -> Form | None:
        """How the tensors of a wrapper hold a parameter; None: they have other shapes."""
        shapes = self._shapes(module)
        if shapes[0][0] % _part(experts).num_experts:
            return None
        as_it_is, swapped = _expert_shapes(experts, shapes[0][0])
        return "experts" if shapes == as_it_is else "swapped" if shapes == swapped else None

    def _shapes(self, module: str) -> tuple[Shape, Shape]:
        """Shapes of A and B."""
        own = self._sides[module]
        return self._entries[own["A"].tensor].shape, self._entries[own["B"].tensor].shape

    @property
    def _origin(self) -> str:
        return f" (this one was made for {self._config.base_model})" if self._config.base_model else ""

    def _complain(self, faults: Iterable[str], text: str) -> None:
        if found := list(faults):
            self._fail(text.replace("{}", _listed(found)))

    def _fail(self, why: str) -> NoReturn:
        raise AdapterError(f"adapter {self._directory}: {why}")


def _part(experts: Experts) -> ExpertPart:
    part = next(iter(experts.targets.values())).part
    assert part is not None
    return part


def _expert_shapes(experts: Experts, rows: int) -> tuple[tuple[Shape, Shape], tuple[Shape, Shape]]:
    """Shapes of A and B, as they are and swapped. rows: rank times experts."""
    inputs, outputs = next(iter(experts.targets.values())).inputs, _part(experts).num_outputs
    return ((rows, inputs), (outputs, rows)), ((rows, outputs), (inputs, rows))


def _listed(names: Iterable[str], limit: int = _SHOWN) -> str:
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
