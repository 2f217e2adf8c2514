"""Configs that families read from config.json, against transformers' own configurations."""

import dataclasses
import json
import math

import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.model_parts import KimiDeltaAttention, Mamba2, MoE
from jaxllm.models.load_config import load_model_config
from jaxllm.models.registry import FAMILIES
from scripts.make_encoder_goldens import VARIANTS as ENCODERS
from scripts.make_goldens import FOLDER
from scripts.make_picture_goldens import VARIANTS as PICTURES
from scripts.tiny_configs import VARIANTS, architecture, published


def read(directory, config, raw):
    (directory / "config.json").write_text(json.dumps({**raw, "architectures": [architecture(config)]}))
    return load_model_config(directory, max_model_len=112)


@pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if not hasattr(config, "text_config")])
def test_numbers_of_a_variant(tmp_path, name):
    config = VARIANTS[name]
    found = read(tmp_path, config, config.to_dict())
    assert (found.num_layers, found.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (found.vocab_size, found.max_position) == (config.vocab_size, longest(config))
    assert found.tie_word_embeddings == config.tie_word_embeddings
    heads = config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or [None] * found.num_layers
    counts = getattr(config, "num_attention_heads_per_layer", None) or [heads] * found.num_layers
    by_layer = [config.per_layer_config[i] if name.startswith("gemma4") else config for i in range(found.num_layers)]
    for layer, kind, count, own in zip(found.layers, kinds, counts, by_layer, strict=True):
        part = layer.attention
        if part is None:
            continue
        if isinstance(part, Mamba2):
            assert part.num_heads == (getattr(config, "mamba_n_heads", None) or config.mamba_num_heads)
            continue
        if isinstance(part, KimiDeltaAttention):
            assert (part.num_heads, part.head_dim) == (config.linear_num_heads, config.linear_head_dim)
            continue
        if kind == "linear_attention":
            assert (part.num_key_heads, part.num_value_heads) == (config.linear_num_key_heads, config.linear_num_value_heads)
            assert (part.key_dim, part.value_dim) == (config.linear_key_head_dim, config.linear_value_head_dim)
            continue
        assert layer.attention.num_heads == count
        if hasattr(layer.attention, "num_kv_heads"):
            kv_heads = getattr(own, "num_key_value_heads", None) or heads
            is_doubled = config.model_type == "mimo_v2_flash" and kind == "sliding_attention"
            assert layer.attention.num_kv_heads == (2 * kv_heads if is_doubled else kv_heads)
            assert layer.attention.head_dim == (getattr(own, "head_dim", None) or config.hidden_size // heads)
        if kind is not None:
            assert (layer.attention.window is not None) == (kind in ("sliding_attention", "indexed_attention"))
    mixtures = [layer.mlp for layer in found.layers if isinstance(layer.mlp, MoE)]
    names = ("num_experts_per_tok", "moe_k", "top_k_experts")
    chosen = next((count for each in names if (count := getattr(config, each, None))), None)
    has_experts = chosen and getattr(config, "num_local_experts", None) != 0
    assert {mixture.routing.top_k for mixture in mixtures} == ({chosen} if has_experts else set())


def longest(config):
    rope = getattr(config, "rope_parameters", None) or {}
    kind, most = rope.get("rope_type"), config.max_position_embeddings
    if kind == "yarn":
        return max(most, int(rope["original_max_position_embeddings"] * rope["factor"]))
    return int(most * rope["factor"]) if kind in ("linear", "dynamic") else most


@pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if published(config) is None])
def test_absent_keys_mean_transformers_defaults(tmp_path, name):
    """Older files lack keys whose values are the defaults. Families that transformers does not have are left out."""
    config = VARIANTS[name]
    # Rope and kinds of layers are completed from other keys when a configuration is made; who reads whose keys follows from the kinds.
    left_out = ("layer_types", "rope_parameters", "num_kv_shared_layers")
    whole = {key: value for key, value in config.to_dict().items() if key not in left_out}
    kept = {"model_type", "rope_theta", *type(config).attribute_map.values()}
    default = type(config)().to_dict()
    short = {key: value for key, value in whole.items() if key in kept or key not in default or value != default[key]}
    assert len(short) < len(whole)
    without = {"digest": "", "eos_token_ids": (), "bos_token_id": None}
    found, expected = (dataclasses.replace(read(tmp_path, config, raw), **without) for raw in (short, whole))
    assert found == expected


def test_every_family_has_a_variant():
    tested = {config.model_type.removesuffix("_text") for config in VARIANTS.values()}
    tested |= {arguments["family"] for arguments in PICTURES.values()}
    tested |= {path.parent.name for path in FOLDER.glob("*/audio.json")}
    tested |= {config.model_type for config, _ in ENCODERS.values()}
    tested |= {
        config.text_config.model_type.removesuffix("_text") for config in VARIANTS.values() if hasattr(config, "text_config")
    }
    tested |= {"mimo_v2", "nemotron_h_omni"}  # goldens of others as these name their tensors: tests/loaders
    tested.add("bailing_moe")  # Sarvam's mixture has the same parts and names; transformers has no other
    assert {model_type.removesuffix("_text") for model_type, _ in FAMILIES.values()} == tested


@pytest.mark.parametrize("base", [-1.0, math.nan, math.inf, True])
def test_ropes_of_layers_have_finite_bases(tmp_path, base):
    config = VARIANTS["granite_swa"]
    raw = {**config.to_dict(), "layer_rope_theta": [10000.0, base, 1000.0, 10000.0]}
    with pytest.raises(
        (ConfigError, ModelLoadError), match="layer_rope_theta is .* must be a list of 4 finite numbers, none negative"
    ):
        read(tmp_path, config, raw)
