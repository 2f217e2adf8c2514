"""The text model of a checkpoint that also holds other models, such as encoders that are not built here."""

from collections.abc import Callable
from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Layer, Names
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader, read_text: Callable[[ConfigReader], ModelConfig]) -> ModelConfig:
    """read_text: reads the config of the text model as one of its own."""
    text, names, norm = c.text_part("model.language_model", "lm_head")
    config = read_text(text)
    if (config.names.embedding, config.norm.name) != (Names().embedding, "model.norm"):
        c.faults.append(f"text_config is of a model whose tensors {c.architecture} has no names for")
    ignored = tuple(map(names.named, config.names.ignored))
    places = replace(config.names, embedding=names.embedding, layer=names.layer, head=names.head)
    names = replace(places, ignored=ignored, is_part=True)
    return replace(config, names=names, norm=replace(config.norm, name=norm))


def without_rope_sections(config: ModelConfig) -> ModelConfig:
    """The model for text alone, whose tokens have the same position in time, row and column."""
    changed = {layer: _without_sections(layer) for layer in set(config.layers)}
    return replace(config, layers=tuple(changed[layer] for layer in config.layers))


def _without_sections(layer: Layer) -> Layer:
    rope = getattr(layer.attention, "rope", None)
    if rope is None or rope.sections is None:
        return layer
    rope = replace(rope, sections=None, sections_interleaved=False)
    return replace(layer, attention=replace(layer.attention, rope=rope))  # type: ignore[type-var, call-arg]
