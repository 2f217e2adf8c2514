"""Gemma 4's config.json in both forms, and its text model in checkpoints that hold more."""

import numpy as np
import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.models.gemma4 import ROPE
from jaxllm.models.load_config import load_model_config
from scripts import tiny_configs
from tests.helpers import goldens

WRONG = [
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, but none of the layers before these 6 is of full_attention"),
    ({"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input is 64, supported: 128"),
    ({"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3, "moe_intermediate_size": 8}, "more than the 2 experts"),
    (
        {"per_layer_config": {"2": {"head_dim": 16, "sliding_window": 4}}},
        "gives layer 2 its own sliding_window, supported: head_dim",
    ),
    (
        {"rope_parameters": {"full_attention": {**ROPE["full_attention"], "partial_rotary_factor": 1.5}}},
        "partial_rotary_factor is 1.5, must be at most 1",
    ),
]


@pytest.mark.parametrize("name", ["gemma4", "gemma4_moe"])
def test_keys_of_published_checkpoints_give_the_heads_that_transformers_saves(name):
    directory = goldens.FOLDER / name
    saved = load_model_config(directory)
    changes = {"global_head_dim": 16, "num_global_key_value_heads": 1, "per_layer_config": None}
    published = load_model_config(directory, overrides=changes)
    assert published.layers == saved.layers
    full, local = saved.layers[-1].attention, saved.layers[0].attention
    assert (full.head_dim, local.head_dim, full.scale, local.window, full.window) == (16, 8, 1.0, 16, None)
    assert (full.num_kv_heads, local.num_kv_heads) == ((2, 2) if name == "gemma4" else (1, 4))


def test_the_last_layers_read_the_keys_of_the_last_before_them_of_their_kind():
    config = load_model_config(goldens.FOLDER / "gemma4")
    assert [layer.attention.reads_layer for layer in config.layers] == [None] * 4 + [2, 3, 2]
    assert [layer.mlp.width for layer in config.layers] == [40] * 4 + [80] * 3


@pytest.mark.parametrize(("changes", "told"), WRONG)
def test_what_is_not_computed_is_refused(changes, told):
    with pytest.raises((ConfigError, ModelLoadError), match=told):
        load_model_config(goldens.FOLDER / "gemma4", overrides=changes)


@pytest.mark.torch
@pytest.mark.parametrize(("name", "kind"), [("gemma4", "Gemma4"), ("gemma4_dense", "Gemma4Unified")])
def test_the_text_model_beside_others_equals_transformers(name, kind, tmp_path):
    """As published: layers that read the keys of others have unused weights of their own."""
    torch = pytest.importorskip("torch")
    import transformers
    from safetensors.numpy import load_file, save_file

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2, "position_embedding_size": 16}
    text = tiny_configs.VARIANTS[name]
    others = {"vision_config": sizes, "audio_config": None} if kind == "Gemma4" else {}
    others |= {"text_config": {**text.to_dict(), "pad_token_id": 0}, "tie_word_embeddings": text.tie_word_embeddings}
    config = getattr(transformers, f"{kind}Config")(**others)
    reference = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.uniform_(0.5, 1.5) if weight.ndim == 1 else weight.normal_(0, 0.15)
        for layer in reference.model.language_model.layers:
            layer.layer_scalar.uniform_(0.5, 1.5)
    reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if name == "gemma4":
        assert any(name.startswith("model.vision_tower.") for name in tensors)
        tensors["model.language_model.layers.5.self_attn.k_proj.weight"] = np.zeros((4, 4), np.float32)
        save_file(tensors, file)
    token_ids = np.random.default_rng(0).integers(128, size=40).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0].numpy()
    found = goldens.logits(*goldens.load(tmp_path), token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-4)
