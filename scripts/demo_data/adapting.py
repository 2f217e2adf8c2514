"""Training of a LoRA of the demo model, whose own weights stay as they are, and its files. Source: arXiv:2106.09685."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxllm.layers.build import build_model
from jaxllm.layers.linear import Linear, precision_of
from jaxllm.lora.targets import adaptable
from jaxllm.model_config import ModelConfig
from jaxllm.parallel.shards import Shards
from scripts.saving import write_safetensors

from .training import Batches, Recipe, Training, make_optimizer, mean_losses

Params = dict[str, Array]
"""Float32 factors by the names of PEFT, such as "model.layers.0.mlp.up_proj.lora_A.weight"."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a LoRA of all linear layers."""

    rank: int
    alpha: float

    def init(self, config: ModelConfig, seed: int) -> Params:
        """As PEFT begins: A is random, B is zero."""
        parts = [part for part in adaptable(build_model(config)) if part.is_wanted(None)]
        modules = [module for part in parts for module in part.modules.items()]
        params: Params = {}
        for (name, shape), key in zip(modules, jax.random.split(jax.random.key(seed), len(modules)), strict=True):
            bound = shape.inputs**-0.5
            params[f"{name}.lora_A.weight"] = jax.random.uniform(key, (self.rank, shape.inputs), minval=-bound, maxval=bound)
            params[f"{name}.lora_B.weight"] = jnp.zeros((shape.outputs, self.rank))
        return params

    def config_json(self, base: str, params: Params) -> dict[str, Any]:
        """The adapter_config.json as PEFT writes it."""
        return {
            "alpha_pattern": {},
            "auto_mapping": None,
            "base_model_name_or_path": base,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "layers_pattern": None,
            "layers_to_transform": None,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "modules_to_save": None,
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": {},
            "revision": None,
            "target_modules": sorted({name.split(".")[-3] for name in params}),
            "task_type": "CAUSAL_LM",
            "use_dora": False,
            "use_rslora": False,
        }


class Lora:
    """An Adapt for a dense model: adds what PEFT adds to the products of layers, by the factors of their modules."""

    def __init__(self, sizes: Sizes, params: Params):
        self._scale, self._params = sizes.alpha / sizes.rank, params

    def __call__(self, linear: Linear, x: Array, y: Array, start: int) -> Array:
        """See Adapt."""
        x_TD, precision = x.reshape(len(x), -1), precision_of(x.dtype)
        added = []
        for module in linear.modules:
            assert module.order is None and module.columns is None, "the demo model has none of these"
            a_RD, b_NR = (self._params[f"{module.name}.lora_{side}.weight"].astype(x.dtype) for side in "AB")
            z_TR = self._scale * jnp.matmul(x_TD, a_RD.T, precision=precision)
            added.append(jnp.matmul(z_TR, b_NR.T, precision=precision).reshape(len(x), *module.outputs))
        return y + jnp.concatenate(added, axis=1 + linear.joined)

    def embedded(self, token_ids_T: Array, x_TD: Array, start: int, shards: Shards) -> Array:
        """See Adapt: it does not change embeddings."""
        return x_TD


def merged(config: ModelConfig, state: nnx.State, adapt: Lora) -> nnx.State:
    """The weights of a model with an adapter in them."""
    model = nnx.merge(nnx.split(build_model(config))[0], state, copy=True)
    for linear in [part for _, part in nnx.iter_modules(model) if isinstance(part, Linear)]:
        weight = linear.weight[...]
        inputs = int(np.prod(weight.shape[: linear.num_contracted]))
        products = weight.reshape(inputs, *weight.shape[linear.num_contracted :])
        linear.weight[...] = adapt(linear, jnp.eye(inputs), products, 0).reshape(weight.shape)
    return nnx.state(model)


def save_adapter(directory: Path, sizes: Sizes, params: Params, base: str, dtype: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(sizes.config_json(base, params), indent=2)
    (directory / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
    tensors = {f"base_model.model.{name}": np.asarray(params[name].astype(dtype)) for name in sorted(params)}
    write_safetensors(directory / "adapter_model.safetensors", tensors)


class Adapting(Training):
    """The training of a LoRA. Its state: {"base": …, "adapter": Params}."""

    measures = ("chat loss", "text loss")

    def __init__(self, config: ModelConfig, base: nnx.State, sizes: Sizes, recipe: Recipe, seed: int):
        graph, _ = nnx.split(build_model(config))
        params = sizes.init(config, seed)
        optimizer = make_optimizer(recipe)

        def loss(params: Params, base: nnx.State, batches: Batches) -> tuple[Array, Array]:
            return mean_losses(nnx.merge(graph, base), batches, Lora(sizes, params))

        def step(state: Any, moments: Any, rate: Array, batches: Batches) -> tuple:
            (_, means), gradients = jax.value_and_grad(loss, has_aux=True)(state["adapter"], state["base"], batches)
            updates, moments = optimizer.update(gradients, moments, state["adapter"])
            params = jax.tree.map(lambda leaf, update: leaf - rate * update, state["adapter"], updates)
            return {"base": state["base"], "adapter": params}, moments, means

        # A copy, because the step takes its state's memory over.
        state = {"base": jax.tree.map(jnp.copy, base), "adapter": params}
        super().__init__(recipe, seed, state, optimizer.init(params), step)
