import json
import math
import time
from dataclasses import replace

import pytest

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.model_config import check_max_model_len
from jaxllm.model_parts import MoE, Positions, QueryScale, Rope
from jaxllm.models.load_config import load_model_config
from tests.helpers import goldens

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def read(tmp_path):
    """Write a config.json (and generation_config.json) and read it."""

    def read(changes=None, generation=None, without=(), **options):
        raw = {key: value for key, value in {**LLAMA, **(changes or {})}.items() if key not in without}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(tmp_path, **options)

    return read


def attention(config):
    """Attention of the first layer."""
    return config.layers[0].attention


def windows(config):
    return [layer.attention.window for layer in config.layers]


def test_dtype_auto_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(read):
    assert read(on_gpu=True).dtype == "bfloat16"
    assert read({"dtype": "float16"}, on_gpu=True).dtype == "float16"
    assert read().dtype == "float32"
    assert read(dtype="float16").dtype == "float16"
    with pytest.raises(ConfigError, match="dtype is 'int8', must be one of auto, bfloat16"):
        read(dtype="int8")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (7, {"eos_token_id": [9, 7]}, (7, 9)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {}, ()),
    ],
)
def test_eos_ids_of_both_files(read, config, generation, expected):
    assert read({"eos_token_id": config}, generation).eos_token_ids == expected


def test_head_dim_and_kv_heads_are_derived_when_absent(read):
    config = read(without=("num_key_value_heads",))
    assert (attention(config).num_kv_heads, attention(config).head_dim) == (8, 8)
    assert attention(read({"head_dim": 16, "num_key_value_heads": None})).head_dim == 16


def test_older_and_newer_rope_keys_mean_the_same(read):
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
    old = read({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}})
    new = read({"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **llama3}})
    assert old == new
    assert attention(old).rope == Rope(5e5, "llama3", 8.0, 1024, low_freq_factor=1.0, high_freq_factor=4.0)
    assert old.max_position == 4096
    assert read({"rope_scaling": {"type": "linear", "factor": 2.0}}).layers[0].attention.rope.kind == "linear"


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "linear", "factor": 2.0}, 8192),
        ({"type": "dynamic", "factor": 4.0}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "yarn", "original_max_position_embeddings": 1024}, 4096),
        ({"type": "default"}, 4096),
    ],
)
def test_scaled_rope_reaches_further(read, scaling, longest):
    assert read({"rope_scaling": scaling}).max_position == longest


def test_yarn_attention_factor(read):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert attention(read({"rope_scaling": yarn})).rope.attention_factor == pytest.approx(1.138629, abs=1e-6)
    assert read({"rope_scaling": {**yarn, "attention_factor": 0.5}}).layers[0].attention.rope.attention_factor == 0.5
    equal = {**yarn, "mscale": 0.7, "mscale_all_dim": 0.7}
    assert attention(read({"rope_scaling": equal})).rope.attention_factor == 1.0


def test_deepseeks_yarn_is_in_the_scale_of_the_scores(read):
    """Numbers of DeepSeek-V2-Lite: all of it is there, and cosine and sine are as they were."""
    sizes = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "q_lora_rank": None}
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.707}
    given = {"architectures": ["DeepseekV2ForCausalLM"], "max_position_embeddings": 163840, **sizes}
    part = attention(read({**given, "rope_scaling": yarn}))
    assert part.score_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert part.rope.attention_factor == 1.0
    assert attention(read(given)).score_scale == pytest.approx(192**-0.5)
    with pytest.raises(ModelLoadError, match="scoring_func is 'sigmoid', supported: 'softmax'"):
        read({**given, "scoring_func": "sigmoid"})


def test_sliding_windows(read):
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert windows(read(mistral)) == [4096] * 4
    assert windows(read({**mistral, "sliding_window": None})) == [None] * 4
    assert windows(read({**mistral, "sliding_window": 16})) == [16] * 4
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 3}
    assert windows(read(qwen)) == [None] * 4
    assert windows(read({**qwen, "use_sliding_window": True})) == [None, None, None, 16]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(read({**qwen, "use_sliding_window": True, "layer_types": kinds})) == [16, None, 16, None]
    with pytest.raises(ModelLoadError, match="layer_types is .*must be 4 of"):
        read({**qwen, "use_sliding_window": True, "layer_types": kinds[:3]})


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention alone, supported: with at least one"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*must be 4 of linear_attention or full_attention"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads is 3, must divide linear_num_value_heads, which is 8"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', supported: 'silu'"),
    ],
)
def test_what_of_qwen3_next_cannot_be_computed_is_told(overrides, told):
    with pytest.raises(ModelLoadError, match=told):
        load_model_config(goldens.FOLDER / "qwen3_next", overrides=overrides)


def test_linear_attention_is_split_by_key_heads():
    config = load_model_config(goldens.FOLDER / "qwen3_next")
    with pytest.raises(
        ConfigError, match="size is 8, which does not divide 4 key heads of linear attention; .* takes 1, 2, 4$"
    ):
        config.for_tensor_parallel(8)


def test_biases_and_norms_of_the_families(read):
    llama = read({"attention_bias": True})
    assert attention(llama).bias and attention(llama).out_bias and not llama.layers[0].mlp.bias
    qwen2 = attention(read({"architectures": ["Qwen2ForCausalLM"]}))
    assert qwen2.bias and not qwen2.out_bias and qwen2.head_norms is None
    qwen3 = attention(read({"architectures": ["Qwen3ForCausalLM"]}))
    assert qwen3.head_norms is not None and not qwen3.bias and qwen3.head_dim == 128


def test_gemma_3_that_sees_images_names_few_numbers_of_its_text_model(read):
    """As google/gemma-3-4b-it does: the others are the defaults."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = read({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]})
    full = config.layers[5].attention
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.window) == (8, 4, 256, None)
    assert (full.rope.theta, full.rope.factor, attention(config).rope) == (1e6, 8.0, Rope(1e4))
    assert (config.vocab_size, config.eos_token_ids, config.tie_word_embeddings) == (262208, (1, 106), True)
    assert windows(config)[:7] == [1024] * 5 + [None, 1024]
    assert config.max_position == 131072


def test_llama_4_attends_within_chunks_where_sequences_are_longer(read):
    """As Llama-4-Scout names its numbers; those that it leaves out are the defaults."""
    scaling = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    scaling["original_max_position_embeddings"] = 8192
    text = {"rope_scaling": scaling, "max_position_embeddings": 10485760, "num_hidden_layers": 8, "no_rope_layers": []}
    scout = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": text}
    config = read(scout)
    assert config.max_position == 8192
    assert [layer.attention.rope is None for layer in config.layers] == ([False] * 3 + [True]) * 2
    assert [layer.attention.query_scale for layer in config.layers[2:4]] == [None, QueryScale(0.1, 8192)]
    assert [isinstance(layer.mlp, MoE) for layer in config.layers] == [True] * 8
    interleaved = read({**scout, "text_config": {**text, "interleave_moe_layer_step": 2}})
    assert [layer.mlp.width for layer in interleaved.layers] == [16384, 8192] * 4
    assert [isinstance(layer.mlp, MoE) for layer in interleaved.layers] == [False, True] * 4
    assert config.chosen_max_position == 10485760 and {layer.attention.chunk for layer in config.layers} == {None}
    longer = read(scout, max_model_len=9000)
    assert (longer.max_position, longer.chosen_max_position) == (10485760, None)
    assert [layer.attention.chunk for layer in longer.layers] == ([8192] * 3 + [None]) * 2
    assert read({**scout, "text_config": {**text, "no_rope_layers": [0] * 8}}, max_model_len=9000).max_position == 10485760


def test_step_3_5_as_its_checkpoint_says_it(read):
    """Lists go on with the modules for multi-token prediction."""
    llama3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
    given = {
        "architectures": ["Step3p5ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 5,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 96,
            "num_attention_groups": 8,
        },
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention", "sliding_attention"],
        "rope_theta": [5000000.0, *[10000.0] * 3, 5000000.0, 10000.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0],
        "rope_scaling": {**llama3, "original_max_position_embeddings": 131072},
        "yarn_only_types": ["full_attention"],
        "max_position_embeddings": 262144,
        "moe_layers_enum": "3,4",
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "moe_router_scaling_factor": 3.0,
        "swiglu_limits": [0.0, 0.0, 0.0, 0.0, 7, 0.0],
        "swiglu_limits_shared": [0.0, 0.0, 0.0, 0.0, 16, 0.0],
        "use_head_wise_attn_gate": True,
        "zero_centered": True,
    }
    config = read(given)
    assert (config.num_spare_layers, config.max_position) == (1, 262144)
    attentions = [layer.attention for layer in config.layers]
    assert [(part.num_heads, part.num_kv_heads, part.window) for part in attentions] == [
        (64, 8, None),
        *[(96, 8, 512)] * 3,
        (64, 8, None),
    ]
    assert [(part.rope.kind, part.rope.theta, part.rope.rotary_dim) for part in attentions[:2]] == [
        ("llama3", 5e6, 64),
        ("default", 1e4, None),
    ]
    assert [isinstance(layer.mlp, MoE) for layer in config.layers] == [False] * 3 + [True] * 2
    assert [(layer.mlp.clamp, layer.mlp.shared.clamp, layer.mlp.routing.scale) for layer in config.layers[3:]] == [
        (None, None, 3.0),
        (7.0, 16.0, 3.0),
    ]
    with pytest.raises(ModelLoadError, match="swiglu_limits is .*, must be a list of 5 numbers"):
        read({**given, "swiglu_limits": [1.0, -1.0, 0.0, 0.0, 0.0]})


def test_plamo_3_has_a_window_for_each_layer(read):
    config = read({"architectures": ["Plamo3ForCausalLM"], "num_hidden_layers": 3, "sliding_window": [2048, None, 64]})
    assert [layer.attention.window for layer in config.layers] == [2048, None, 64]
    assert [layer.attention.rope.theta for layer in config.layers] == [1e4, 1e6, 1e4]
    config = read({"architectures": ["Plamo3ForCausalLM"], "num_hidden_layers": 8, "sliding_window": 2048})
    assert [layer.attention.window for layer in config.layers] == [2048] * 7 + [None]


@pytest.mark.parametrize("architecture", ["DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"])
def test_tokens_are_chosen_only_where_sequences_are_longer_than_all_chosen(read, architecture):
    given = {"architectures": [architecture], "max_position_embeddings": 163840, "num_nextn_predict_layers": 1}
    for length in (None, 2048):
        config = read(given, max_model_len=length)
        assert (config.max_position, config.chosen_max_position) == (2048, 163840) and {
            layer.attention.top_k for layer in config.layers
        } == {None}
        assert "model.layers.4.self_attn.indexer." in config.names.ignored
    config = read(given, max_model_len=2049)
    assert (config.max_position, config.chosen_max_position) == (163840, None) and {
        layer.attention.top_k for layer in config.layers
    } == {2048}
    assert not config.names.ignored
    is_glm = architecture == "GlmMoeDsaForCausalLM"
    index = config.layers[0].attention.index
    assert (index.num_heads, index.head_dim, index.interleaved) == (32 if is_glm else 64, 128, is_glm)
    assert (
        read({**given, "indexer_rope_interleave": not is_glm}, max_model_len=2049).layers[0].attention.index.interleaved
        != is_glm
    )


def test_layers_share_the_choice_of_tokens(read):
    given = {"architectures": ["GlmMoeDsaForCausalLM"], "max_position_embeddings": 4096, "num_hidden_layers": 6}

    def kinds(**changes):
        config = read({**given, **changes}, max_model_len=4096)
        shared = [layer for layer in range(6) if f"model.layers.{layer}.self_attn.indexer." in config.names.ignored]
        assert shared == [number for number, layer in enumerate(config.layers) if layer.attention.index is None]
        return shared

    assert kinds(index_topk_freq=3) == [2, 3, 5]
    assert kinds(index_topk_freq=2, index_skip_topk_offset=4) == [4]
    assert kinds(index_topk_pattern="FSSFSSF") == kinds(index_topk_pattern=[*"FSSFSS"]) == [1, 2, 4, 5]
    assert kinds(index_topk_pattern="FSSFSS", indexer_types=["full"] * 5 + ["shared"]) == [5]
    with pytest.raises(ModelLoadError, match="the first layer takes the choice of tokens of an earlier one"):
        kinds(index_topk_pattern="SFFFFF")
    with pytest.raises(ModelLoadError, match="index_head_dim is 32, less than qk_rope_head_dim, which is 64"):
        kinds(index_head_dim=32)


def test_overrides_are_laid_over_the_file(read):
    config = read(overrides={"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert config.max_position == 128


def test_model_type_stands_in_for_a_missing_architecture(read):
    assert read({"model_type": "qwen3"}, without=("architectures",)).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"architectures": ["MextralForCausalLM"]},
            "MextralForCausalLM; known and similar: MixtralForCausalLM, MistralForCausalLM; ",
        ),
        ({"architectures": ["QwenForCausalLM"]}, "known and similar: Qwen2ForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": ["Strange"], "model_type": "phi"}, "the unknown architecture Strange; known and similar: Phi3ForC"),
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM; `jaxllm models` lists the .* known, docs/HOW_TO_ADD.md says",
        ),
        ({"architectures": []}, "has no architecture; `jaxllm models` lists"),
        ({"hidden_act": "selu"}, "hidden_act is 'selu', supported: silu"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type is 'spiral', supported: default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing, must be a positive number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2,
                    "low_freq_factor": 4,
                    "high_freq_factor": 1,
                    "original_max_position_embeddings": 64,
                }
            },
            "low_freq_factor is 4.0, must not be above high_freq_factor, which is 1.0",
        ),
        ({"architectures": ["Llama4ForCausalLM"], "num_experts_per_tok": 2}, "num_experts_per_tok is 2, supported: 1"),
        ({"architectures": ["Llama4ForCausalLM"], "moe_layers": "all"}, "moe_layers is 'all', must be a list of layers"),
        (
            {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "no_rope_layers is .1., must be a list of 4 numbers",
        ),
        ({"rope_scaling": 3}, "rope_scaling is 3, must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters differ by layer"),
        ({"rope_theta": "many"}, "rope_theta is 'many'"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor is 0.4, must rotate an even number of the 8"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, must divide num_attention_heads, which is 8"),
        ({"head_dim": 7}, "head_dim is 7, must be even"),
        ({"hidden_size": "64", "vocab_size": 0}, "hidden_size is '64', must be a positive integer; .*vocab_size is 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', must be true or false"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0, which LlamaForCausalLM is not computed with; supported: None"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which LlamaForCausalLM is not"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types has linear_attention, supported: sliding"),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            "layer_types is .*supported by LlamaForCausalLM: layers of",
        ),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0, supported: None"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"use_bidirectional_attention": True}},
            "use_bidi",
        ),
        (
            {"architectures": ["Cohere2ForCausalLM"], "use_parallel_block": False},
            "use_parallel_block is False, supported: True",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": -1},
            "-1, must be an integer, not",
        ),
        (
            {"architectures": ["Glm4MoeForCausalLM"], "first_k_dense_replace": "1"},
            "first_k_dense_replace is '1', must be an int",
        ),
        (
            {"architectures": ["Ernie4_5_MoeForCausalLM"], "moe_layer_end_index": 2.5},
            "moe_layer_end_index is 2.5, must be an int",
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": ["0"]}, "mlp_only_layers is .'0'., must be a list"),
        (
            {"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 0], "use_routing_bias": False},
            "use_routing_bias is False, supported: True; attn_type_list is .1, 0., supported: only 1",
        ),
        (
            {"architectures": ["LagunaForCausalLM"], "gating": "none", "num_attention_heads_per_layer": [8]},
            "num_attention_heads_per_layer is .8., must be a list of 4 .*gating is 'none', supported: True or 'per-head'",
        ),
        (
            {"architectures": ["LagunaForCausalLM"], "moe_router_logit_softcapping": 5.0},
            "moe_router_logit_softcapping is 5.0, supported: 0",
        ),
        (
            {"architectures": ["MiMoV2FlashForCausalLM"], "hybrid_layer_pattern": [0, 1, 1, 2], "swa_head_dim": 4},
            "layer_types is .*'2'.*, must be 4 of sliding_attention or full_attention; swa_head_dim is 4, supported: 192",
        ),
        ({"architectures": ["AfmoeForCausalLM"], "score_func": "softmax"}, "score_func is 'softmax', supported: 'sigmoid'"),
        ({"architectures": ["HYV3ForCausalLM"], "qk_norm": False}, "qk_norm is False, supported: True"),
        (
            {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["dense", "moe"] * 2},
            "mlp_layer_types is .*, must be 4 of sparse or dense",
        ),
        (
            {"architectures": ["Mistral4ForCausalLM"], "partial_rotary_factor": 0.25},
            "partial_rotary_factor rotates 32 values, supported: all 64 of qk_rope_head_dim",
        ),
        ({"quantization_config": {"quant_method": "quark"}}, "quant_method 'quark'; supported: "),
    ],
)
def test_what_cannot_be_served_is_told(read, changes, told):
    with pytest.raises(ModelLoadError, match=told):
        read(changes)


@pytest.mark.parametrize(
    ("model_class", "told"),
    [
        ("no_such_package.x:read", "'no_such_package.x:read', which cannot be imported: ModuleNotFoundError: No module"),
        ("jaxllm.models.llama:wrong", "cannot be imported: AttributeError: .*give module:name"),
        ("jaxllm.errors", "is 'jaxllm.errors', which has no function read, from a ConfigReader to a ModelConfig"),
        ("jaxllm.errors:ConfigError", "has no function read"),
    ],
)
def test_a_model_class_that_cannot_be_used(read, model_class, told):
    with pytest.raises(ConfigError, match=told):
        read(model_class=model_class)


def test_model_class_comes_before_the_architecture(read):
    assert attention(read(model_class="jaxllm.models.qwen3:read")).head_norms is not None
    assert not read({"architectures": ["AnyModel"]}, model_class="jaxllm.models.qwen3").generates


def test_required_numbers(read):
    with pytest.raises(ModelLoadError, match="hidden_size is missing.*num_hidden_layers is missing"):
        read(without=("hidden_size", "num_hidden_layers"))


def test_directories_that_are_no_models(tmp_path):
    with pytest.raises(ModelLoadError, match="is not a directory"):
        load_model_config(tmp_path / "none")
    with pytest.raises(ModelLoadError, match="has no config.json"):
        load_model_config(tmp_path)
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(
        ModelLoadError, match="params.json is of a model without experts .* give a checkpoint that has config.json"
    ):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="holds a JSON list"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(("size", "kv_heads", "replicas"), [(1, 2, 1), (2, 2, 1), (4, 4, 2), (8, 8, 4)])
def test_kv_heads_are_copied_for_tensor_parallelism(read, size, kv_heads, replicas):
    config = read().for_tensor_parallel(size)
    part = attention(config)
    assert (part.num_kv_heads, part.kv_head_replicas, part.group_size) == (kv_heads, replicas, 8 // kv_heads)
    assert config.padded_vocab_size % size == 0 and config.padded_vocab_size >= 1000
    assert config.as_stored() == read()
    assert config.for_tensor_parallel(1) == read()


def test_tensor_parallel_size_that_does_not_divide(read):
    with pytest.raises(ConfigError, match="size is 3, .*8 query heads and 2 KV heads.*takes 1, 2, 4, 8"):
        read().for_tensor_parallel(3)
    with pytest.raises(ConfigError, match="size is 8, .*intermediate size of 132"):
        read({"intermediate_size": 132}).for_tensor_parallel(8)


def test_configs_can_be_keys(read):
    assert len({read(), read(), read().for_tensor_parallel(8)}) == 2


def test_a_longer_request_than_the_model_was_made_for_needs_an_option(read, caplog):
    config = read()
    check_max_model_len(config, config.max_position, may_be_long=False)
    with pytest.raises(ConfigError, match="was made for 4096 tokens .*--allow-long-max-model-len"):
        check_max_model_len(config, 4097, may_be_long=False)
    check_max_model_len(config, 4097, may_be_long=True)
    assert "answers may be nonsense from token 4096 on" in caplog.text
    with pytest.raises(ConfigError, match="learned a vector for each; use --max-model-len 4096 or less"):
        check_max_model_len(replace(config, positions=Positions("p", 4098, offset=2)), 4097, may_be_long=True)


REGEX_BOMB = {"quant_method": "fp8", "ignored_layers": ["re:((.|.)+.)+[A-Z]$"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000, must be at most 4096"),
        ({"hidden_size": 2**60}, "hidden_size is 1152921504606846976, must be at most 1048576"),
        ({"vocab_size": 2**62}, "vocab_size is 4611686018427387904, must be at most 16777216"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**8}, "num_experts is 100000000, must be at most 4096"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*, must be from 1e-38 to 1e.38"),
        ({"rope_theta": 1e300}, "rope_theta is 1e.300, must be from 1e-38 to 1e.38"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e30}}, "the length of a sequence.* must be at most 2147483647"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": -1e3, "mscale_all_dim": "x" * 10**6}}, ""),
        ({"hidden_act": {"a": 1}}, "hidden_act is {'a': 1}, supported"),
        ({"layer_types": [{}] * 10**4}, "layer_types"),
        ({"eos_token_id": ["x"]}, "eos_token_id is .'x'., must be a token id or a list of them"),
        ({"eos_token_id": [1] * 2000}, "eos_token_id has 2000 tokens, must have at most 1024"),
        ({"quantization_config": REGEX_BOMB}, "the patterns of modules that are not quantised take too long"),
        ({"quantization_config": {**REGEX_BOMB, "ignored_layers": ["re:("]}}, "no regular expression"),
        ({"architectures": ["x" * 10**6]}, "the unknown architecture"),
    ],
)
def test_hostile_values_are_refused_at_once(tmp_path, values, message):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **values}))
    begin = time.process_time()
    if message:
        with pytest.raises(ModelLoadError, match=message) as raised:
            load_model_config(tmp_path)
        assert str(tmp_path) in str(raised.value) and len(str(raised.value)) < 1000
    else:
        assert load_model_config(tmp_path).num_layers == LLAMA["num_hidden_layers"]
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("text", ["[" * 10**7, '{"a":' * 10**5 + "1" + "}" * 10**5, '{"a": ' + "9" * 10**5 + "}"])
def test_a_deep_or_broken_config_is_one_line(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json") as raised:
        load_model_config(tmp_path)
    assert "\n" not in str(raised.value)
