"""Reading config.json files as the publishers of hybrid models write them."""

import json

import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.model_parts import MLP, Attention, Mamba2, MoE, ShortConv
from jaxllm.models.load_config import load_model_config
from jaxllm.quantization.formats.fp8 import Fp8
from jaxllm.quantization.formats.fp8_experts import Fp8Experts

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_ff_dim": 12288,
    "full_attn_idxs": [2, 5],
    "hidden_size": 2048,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_heads": 48,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "vocab_size": 100352,
}
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"],
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEM*E-",
    "mamba_num_heads": 64,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "time_step_limit": [0.0, float("inf")],
    "vocab_size": 131072,
}


@pytest.fixture
def read(tmp_path):
    def load(config, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        return load_model_config(tmp_path)

    return load


def test_lfm2(read):
    config = read(LFM2)
    assert [type(layer.attention) for layer in config.layers] == [ShortConv, ShortConv, Attention] * 2
    assert {layer.mlp.width for layer in config.layers} == {8192} and config.tie_word_embeddings
    assert config.layers[2].attention.rope.theta == 1e6
    with pytest.raises(ModelLoadError, match="conv_L_cache is 1, must be at least 2"):
        read(LFM2, conv_L_cache=1)
    with pytest.raises(ModelLoadError, match="layer_types is .*must be 6 of conv or full_attention"):
        read(LFM2, layer_types=["mamba"] * 6)


def test_granite_4(read):
    config = read(GRANITE)
    mamba, attention, _ = (layer.attention for layer in config.layers)
    assert isinstance(mamba, Mamba2) and mamba.num_groups == 1 and mamba.time_step_limit is None
    assert attention.rope is None and read(GRANITE, position_embedding_type="rope").layers[1].attention.rope is not None
    assert all(isinstance(layer.mlp, MoE) and layer.mlp.shared.width == 1024 for layer in config.layers)
    assert config.for_tensor_parallel(4).layers[0].attention.state_shapes == ((3, 12 * 64 + 256), (12, 64, 128))
    with pytest.raises(ConfigError, match="does not divide .*48 heads of Mamba-2"):
        config.for_tensor_parallel(5)
    with pytest.raises(ModelLoadError, match="time_step_limit is .*must be two numbers"):
        read(GRANITE, time_step_limit=[0.1])


def test_nemotron(read):
    config = read(NEMOTRON)
    parts = [next(iter(layer.parts.values())) for layer in config.layers]
    assert [type(part) for part in parts] == [Mamba2, MoE, Mamba2, Attention, MoE, MLP]
    assert parts[0].time_step_limit is None and parts[3].rope is None and not parts[5].gated
    module = read(NEMOTRON, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*-").next_token
    assert [type(layer.attention or layer.mlp) for layer in module.layers] == [Attention, MLP]
    assert module.norm == "mtp.layers.1.final_layernorm"
    with pytest.raises(ConfigError, match="does not divide .*8 groups of Mamba-2"):
        config.for_tensor_parallel(16)
    with pytest.raises(ModelLoadError, match="hybrid_override_pattern or layers_block_type is 'MX', must consist of M, mamba"):
        read(NEMOTRON, hybrid_override_pattern="MX")
    stored = read(NEMOTRON, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    assert [type(format) for format in stored.formats] == [Fp8, Fp8Experts]
