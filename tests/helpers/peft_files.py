"""Random adapters for tiny checkpoints, as PEFT would write them, and the same checkpoints with an adapter merged in."""

import json
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.loaders import safetensors
from jaxllm.loaders.checkpoint import DTYPES
from jaxllm.lora.checkpoint import read_adapter
from jaxllm.lora.shapes import ExpertPart, TargetShape, expert_targets
from jaxllm.models.load_config import load_model_config, read_config_json
from scripts.saving import write_safetensors

EMBEDDINGS = ("embed_tokens", "wte")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NO_LINEAR = re.compile(r"norm|layernorm|ln_|embed|wte|wpe|conv1d|router|lm_head|gate$|shared_expert_gate$")
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def targets_of(model: Path) -> dict[str, TargetShape]:
    """All that has a matrix: linear layers, the head, the embedding and experts."""
    found = {}
    for name, matrix in _matrices(model).items():
        outputs, inputs = matrix.shape
        is_embedding = name.endswith(EMBEDDINGS)
        found[name] = TargetShape(outputs, inputs, "embedding") if is_embedding else TargetShape(inputs, outputs)
    config = load_model_config(model)
    head = next((name for name in found if name.endswith(EMBEDDINGS)), None)
    if head is not None and "lm_head" not in found:
        found["lm_head"] = TargetShape(found[head].outputs, found[head].inputs)
    for i, layer in enumerate(config.layers):
        if layer.mlp in config.mixtures:
            found |= expert_targets(layer.mlp, f"model.layers.{i}.", config.hidden_size)
    return found


def write(
    directory: Path,
    model: Path,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    rslora: bool = False,
    stacked: bool = False,
    dtype: str = "float32",
    strength: float = 0.5,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write an adapter whose weights change those of the model by `strength` of their size; returns its directory.

    targets: the last parts of modules' names; None: all linear layers but the head, with experts.
    layers: only these.
    stacked: of experts, write PEFT's parameters of all of them instead of a module for each.
    config: more fields of adapter_config.json.
    """
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "rank_pattern": dict(rank_pattern or {}),
        "alpha_pattern": dict(alpha_pattern or {}),
        **config,
    }
    rng = np.random.default_rng(seed)
    matrices = _matrices(model)
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, shapes: tuple[tuple[int, int], tuple[int, int]], size: float, letters: tuple[str, str]) -> None:
        own = _pattern(fields["rank_pattern"], name, rank)
        a, b = (rng.standard_normal(shape) for shape in shapes)
        b *= strength * size / (abs(_scale(fields, name)) * math.sqrt(own))
        for letter, tensor in zip(letters, (a, b), strict=True):
            tensors[f"base_model.model.{letter}"] = tensor.astype(DTYPES[_CODES[dtype]])

    names = set()
    all_targets = targets_of(model)
    for name, target in all_targets.items():
        leaf = name.rpartition(".")[2]
        layer = re.search(r"\.(\d+)\.", name)
        is_wanted = not _NO_LINEAR.search(leaf) if targets is None else leaf in targets
        if not is_wanted or (layers is not None and (layer is None or int(layer[1]) not in layers)):
            continue
        if target.part is not None and (stacked or name not in matrices):
            continue
        names.add(leaf)
        own = _pattern(fields["rank_pattern"], name, rank)
        kind = "embedding_" if target.kind == "embedding" else ""
        ending = "" if kind else ".weight"
        weight = matrices[name if name in matrices else _embedding(matrices)]
        letters = (f"{name}.lora_{kind}A{ending}", f"{name}.lora_{kind}B{ending}")
        add(name, ((own, target.inputs), (target.outputs, own)), float(np.std(weight)), letters)
    parameters = _parameters(all_targets) if stacked or targets is None else {}
    wanted = {name: p for name, p in parameters.items() if stacked or not any(t in matrices for t in p)}
    for name, experts in wanted.items():
        module, _, parameter = name.rpartition(".")
        if layers is not None and int(re.search(r"\.(\d+)\.", name)[1]) not in layers:  # type: ignore[index]
            continue
        target = all_targets[experts[0]]
        assert target.part is not None
        rows = _pattern(fields["rank_pattern"], name, rank) * target.part.num_experts
        inner = f"{module}.base_layer" if parameter == "gate_up_proj" else module
        size = float(np.std(_expert_weight(model, matrices, experts[0])))
        inputs, outputs = target.inputs, target.part.num_outputs
        if read_config_json(model)["model_type"] == "llama4_text":  # holds [experts, inputs, outputs], and does not say so
            inputs, outputs = outputs, inputs
        shapes = ((rows, inputs), (outputs, rows))
        add(name, shapes, size, (f"{inner}.lora_A.weight", f"{inner}.lora_B.weight"))
    fields.setdefault("target_modules", sorted(names))
    if wanted:
        fields.setdefault("target_parameters", ["experts.gate_up_proj", "experts.down_proj"])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def merged(model: Path, adapter: Path, directory: Path) -> Path:
    """Write the model in float32 with W + scale * B @ A in place of each W; returns its directory."""
    fields = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    weights = _read(model)
    lora = {name.removeprefix("base_model.model."): t for name, t in _read(adapter, "adapter_model.safetensors").items()}
    config = read_config_json(model)
    parameters = _parameters(targets_of(model))
    depths: dict[str, int] = {}
    for a in [name for name in lora if ".lora_A" in name or ".lora_embedding_A" in name]:
        module = re.split(r"\.lora_", a)[0]
        factors = lora[a], lora[a.replace("_A", "_B")]
        owner = module.removesuffix(".base_layer")
        own = [
            name
            for name in parameters
            if _as_in_checkpoint(name, config).rpartition(".")[0] == _as_in_checkpoint(owner, config)
        ]
        if own:
            depths[owner] = depths.get(owner, 0) + 1
            has_both = f"{owner}.base_layer.lora_A.weight" in lora
            named = "gate_up_proj" if module != owner else "down_proj"
            if not has_both:
                named = next(
                    n for n in ("gate_up_proj", "down_proj") if any(t.endswith(n) for t in fields["target_parameters"])
                )
            _add_to_experts(weights, config, f"{owner}.{named}", factors, _scale(fields, f"{owner}.{named}"))
            continue
        parameter = any(f"{module}.weight".endswith(f".{each}") for each in fields.get("target_parameters") or ())
        delta = _scale(fields, f"{module}.weight" if parameter else module) * factors[1] @ factors[0]
        name = f"{_as_in_checkpoint(module, config)}.weight"
        if config.get("tie_word_embeddings") and (module == "lm_head" or "lora_embedding" in a):
            weights.setdefault("lm_head.weight", weights[f"{_embedding(n.removesuffix('.weight') for n in weights)}.weight"])
            config["tie_word_embeddings"] = False
        is_transposed = "lora_embedding" in a or (config["model_type"] == "gpt2" and module != "lm_head")
        weights[name] = weights[name] + (delta.T if is_transposed else delta)
    directory.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix != ".safetensors" and file.name != "golden.json":
            shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float32"}), encoding="utf-8")
    write_safetensors(directory / "model.safetensors", {name: np.ascontiguousarray(t) for name, t in weights.items()})
    return directory


def check_changes(model: Path, adapter: Path, merged: Path) -> None:
    """Assert that what is read of an adapter makes all changes of a merged model, and no others."""
    base, changed = _read(model), _read(merged)
    targets = targets_of(model)
    files = read_adapter(adapter, targets, 16, 16)
    left = {name for name, tensor in changed.items() if name not in base or not np.array_equal(tensor, base[name])}
    is_transposed = read_config_json(model)["model_type"] == "gpt2"
    for module in files.modules:
        delta = files.tensor(f"{module}.lora_B.weight") @ files.tensor(f"{module}.lora_A.weight")
        key = f"{module}.weight"
        if key in changed:
            before = base.get(key, base.get("model.embed_tokens.weight"))
            found = (changed[key] - before).T if is_transposed or "embed" in module else changed[key] - before
        else:
            found = _of_expert(targets[module].part, changed) - _of_expert(targets[module].part, base)
            key = f"{targets[module].part.module}.{targets[module].part.parameter}"  # type: ignore[union-attr]
        left.discard(key)
        np.testing.assert_allclose(found, delta, atol=1e-4)
    assert left <= {"lm_head.weight"} and (
        not left or np.array_equal(changed["lm_head.weight"], base["model.embed_tokens.weight"])
    )


def _of_expert(part: ExpertPart | None, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """[outputs, inputs] of a checkpoint that has [experts, inputs, outputs]."""
    assert part is not None
    return weights[f"{part.module}.{part.parameter}"][part.expert].T[slice(*part.rows)]


def _add_to_experts(
    weights: dict[str, np.ndarray], config: Mapping[str, Any], name: str, factors: tuple[np.ndarray, np.ndarray], scale: float
) -> None:
    """PEFT: A is [experts * rank, inputs], B [outputs, rank * experts]."""
    prefix, _, parameter = name.rpartition(".")
    prefix = _as_in_checkpoint(prefix, config)
    num = next(
        config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") if key in config
    )
    a_ERI = factors[0].reshape(num, -1, factors[0].shape[-1])
    b_ORE = factors[1].reshape(factors[1].shape[0], -1, num)
    delta_EOI = scale * np.einsum("ore,eri->eoi", b_ORE, a_ERI)
    whole = f"{prefix}.{parameter}"
    if whole in weights:
        weight = weights[whole]
        weights[whole] = weight + (delta_EOI if config["model_type"] == "llama4_text" else delta_EOI.transpose(0, 2, 1))
        return
    is_mixtral = "block_sparse_moe" in prefix
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    for i, delta_OI in enumerate(delta_EOI):
        parts = {down: delta_OI} if parameter == "down_proj" else dict(zip((gate, up), np.split(delta_OI, 2), strict=True))
        for part, delta in parts.items():
            key = f"{prefix}.{i}.{part}.weight"
            weights[key] = weights[key] + delta


def _as_in_checkpoint(name: str, config: Mapping[str, Any]) -> str:
    """Transformers calls the mixtures of some families otherwise than their checkpoints."""
    return name.replace(".mlp.", ".block_sparse_moe.") if config["model_type"] in ("mixtral", "phimoe") else name


def _scale(fields: Mapping[str, Any], name: str) -> float:
    rank = _pattern(fields.get("rank_pattern") or {}, name, fields["r"])
    alpha = _pattern(fields.get("alpha_pattern") or {}, name, fields["lora_alpha"])
    return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _parameters(targets: Mapping[str, TargetShape]) -> dict[str, list[str]]:
    """The targets that PEFT takes together as a parameter of all experts."""
    found: dict[str, list[str]] = {}
    for name, target in targets.items():
        if target.part is not None:
            found.setdefault(f"{target.part.module}.{target.part.parameter}", []).append(name)
    return found


def _expert_weight(model: Path, matrices: Mapping[str, np.ndarray], target: str) -> np.ndarray:
    if target in matrices:
        return matrices[target]
    return next(t for name, t in _read(model).items() if name.startswith(target.partition(".experts.")[0]) and t.ndim == 3)


def _embedding(modules: Iterable[str]) -> str:
    return next(name for name in modules if name.endswith(EMBEDDINGS))


def _matrices(model: Path) -> dict[str, np.ndarray]:
    """[outputs, inputs] by module; of embeddings [tokens, width]."""
    is_transposed = read_config_json(model)["model_type"] == "gpt2"
    found = {name.removesuffix(".weight"): t for name, t in _read(model).items() if name.endswith(".weight") and t.ndim == 2}
    return {
        name: t.T if is_transposed and re.search(r"c_(attn|fc|proj)$", name) else t
        for name, t in found.items()
        if not name.endswith("wpe")
    }


def _read(directory: Path, pattern: str = "*.safetensors") -> dict[str, np.ndarray]:
    """All tensors in float32."""
    found = {}
    for file in sorted(directory.glob(pattern)):
        for name, entry in safetensors.read_header(file).items():
            data = np.fromfile(file, np.uint8, entry.num_bytes, offset=entry.start)
            found[name] = data.view(DTYPES[entry.dtype]).reshape(entry.shape).astype(np.float32)
    return found
