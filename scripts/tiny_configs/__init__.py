"""Configs of the tiny models with random weights that stand for each family in tests, and what transformers calls their classes."""

from collections.abc import Callable
from typing import Any

import transformers
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    BailingHybridConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HyperCLOVAXConfig,
    HYV3Config,
    Jais2Config,
    KimiLinearConfig,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    MuseGlimmerConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SarvamMoEConfig,
    SeedOssConfig,
    SmolLM3Config,
    SolarOpenConfig,
    StableLmConfig,
    Step3p7Config,
    YoutuConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from scripts.tiny_configs import mistral_form, unlike

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(**changes: Any) -> PreTrainedConfig:
    return LlamaConfig(**{**SIZES, **changes})


def rope(**parameters: Any) -> PreTrainedConfig:
    """Prompts fit into the 64 tokens of the pretraining, the generated text goes beyond."""
    longest = 256 if "original_max_position_embeddings" in parameters else 64
    return llama(max_position_embeddings=longest, rope_parameters={"rope_theta": 10000.0, **parameters})


WIDE = {**SIZES, "head_dim": 16}
"""Heads that are wider together than the model."""
NARROW = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 3}
WINDOWED = {"sliding_window": 16, "num_hidden_layers": 4}
LATENT = {
    **SIZES,
    "num_key_value_heads": 8,
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
GRANITE_HYBRID = {
    **SIZES,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "tie_word_embeddings": True,
}
NEMOTRON_H = {
    **{key: value for key, value in SIZES.items() if key != "num_hidden_layers"},
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 40,
    "head_dim": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "time_step_min": 1e-9,  # transformers takes it for the least time step of prompts, and for none of later tokens
}
GEMMA4: dict[str, Any] = {
    **SIZES,
    "hidden_size": 48,
    "intermediate_size": 40,
    "head_dim": 8,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 128,
    "sliding_window": 16,
    "final_logit_softcapping": 8.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
FLAT: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
"""Linear attention with flat projections, and a rope with sections."""
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}
DEEP_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

VARIANTS: dict[str, PreTrainedConfig] = {
    "llama_mha": llama(num_key_value_heads=8),
    "llama_gqa": llama(),
    "llama_mqa": llama(num_key_value_heads=1),
    "llama_tied": llama(tie_word_embeddings=True),
    "llama_bias": llama(attention_bias=True, mlp_bias=True),
    "llama_head_dim": llama(head_dim=16),
    "llama_rope_linear": rope(rope_type="linear", factor=4.0),
    "llama_rope_dynamic": rope(rope_type="dynamic", factor=2.0),
    "llama_rope_yarn": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "llama_rope_llama3": rope(
        rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "mistral_window": MistralConfig(**SIZES, sliding_window=16),
    "ministral3": Ministral3Config(
        **SIZES,
        head_dim=16,
        rope_parameters={
            "type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "qwen2": Qwen2Config(**{**SIZES, "vocab_size": 131}),
    "qwen2_window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gemma": GemmaConfig(**WIDE),
    "gemma2": Gemma2Config(
        **{**WIDE, **WINDOWED}, query_pre_attn_scalar=24, attn_logit_softcapping=5.0, final_logit_softcapping=8.0
    ),
    "gemma3": Gemma3TextConfig(**{**WIDE, **WINDOWED}, query_pre_attn_scalar=24, sliding_window_pattern=3),
    "gemma4": Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 7},
        layer_types=[*["sliding_attention"] * 2, "full_attention"] + ["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=12,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        tie_word_embeddings=False,
    ),
    "gemma4_dense": Gemma4UnifiedTextConfig(
        **{**GEMMA4, "num_hidden_layers": 6, "num_key_value_heads": 4}, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma4_moe": Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 3, "num_key_value_heads": 4},
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=24,
        tie_word_embeddings=False,
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=16),
    "phi3_longrope": Phi3Config(
        **{**SIZES, "num_attention_heads": 4},
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    ),
    "olmo2": Olmo2Config(**SIZES),
    "olmo3": Olmo3Config(**{**SIZES, **WINDOWED}),
    "granite": GraniteConfig(
        **SIZES, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.5, attention_multiplier=0.2
    ),
    "glm": GlmConfig(**WIDE),
    "glm4": Glm4Config(**WIDE),
    "cohere": CohereConfig(**SIZES, logit_scale=0.5),
    "cohere_norms": CohereConfig(**SIZES, logit_scale=4.0, use_qk_norm=True),
    "cohere2": Cohere2Config(**{**SIZES, **WINDOWED}, logit_scale=0.5),
    "stablelm": StableLmConfig(**{**SIZES, "hidden_size": 128}, use_qkv_bias=True),
    "stablelm_parallel": StableLmConfig(**{**SIZES, "hidden_size": 128}, use_parallel_residual=True),
    "smollm3": SmolLM3Config(**{**SIZES, "num_hidden_layers": 4}),
    "exaone4": Exaone4Config(**{**SIZES, **WINDOWED}),
    "exaone4_full": Exaone4Config(**SIZES, sliding_window=None, layer_types=["full_attention"] * 2),
    "seed_oss": SeedOssConfig(**WIDE),
    "ernie4_5": Ernie4_5Config(**WIDE, use_bias=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5, sliding_window=None),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[0],
    ),
    "qwen3_moe": Qwen3MoeConfig(**WIDE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True),
    "qwen3_next": Qwen3NextConfig(
        **{**WIDE, "num_hidden_layers": 4},
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[1, 2],
        partial_rotary_factor=0.25,
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **{**FLAT, "vocab_size": 88, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4},
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(
        **FLAT, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, shared_expert_intermediate_size=48
    ),
    "olmoe": OlmoeConfig(**{**SIZES, "intermediate_size": 32}, num_experts=8, num_experts_per_tok=3),
    "glm4_moe": Glm4MoeConfig(
        **WIDE,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        use_qk_norm=True,
        attention_bias=True,
        routed_scaling_factor=1.5,
        partial_rotary_factor=0.5,
    ),
    "deepseek_v2_lite": DeepseekV2Config(
        **LATENT,
        q_lora_rank=None,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_shared_experts=2,
        rope_parameters={**DEEP_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek_v2": DeepseekV2Config(
        **LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.0,
        attention_bias=True,
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        rope_parameters={**DEEP_YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    ),
    "deepseek_v32": DeepseekV32Config(
        **LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=8,
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=2,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "glm_moe_dsa": GlmMoeDsaConfig(
        **LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        index_n_heads=16,
        index_head_dim=16,
        index_topk=8,
        index_topk_freq=2,
    ),
    "mistral4": Mistral4Config(
        **LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        rope_parameters={
            "type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "mistral_large_3": unlike.MistralLarge3Config(
        **LATENT,
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        rms_norm_eps=1e-6,
        rope_parameters={
            "type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "attention_factor": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "dots1": Dots1Config(
        **{**SIZES, "num_hidden_layers": 3},
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=2,
        moe_intermediate_size=32,
        n_group=2,
        first_k_dense_replace=1,
        sliding_window=16,
        max_window_layers=2,
        routed_scaling_factor=2.5,
    ),
    "minimax_m2": MiniMaxM2Config(
        **{**WIDE, "intermediate_size": 32},
        num_local_experts=8,
        num_experts_per_tok=3,
        rotary_dim=8,
    ),
    "hy_v3": HYV3Config(
        **{**WIDE, "num_hidden_layers": 3},
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        moe_intermediate_size=32,
    ),
    "laguna": LagunaConfig(
        **NARROW,
        num_attention_heads_per_layer=[4, 8, 4],
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        moe_routed_scaling_factor=2.5,
        rope_parameters={
            "full_attention": {**DEEP_YARN, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "mimo_v2_flash": MiMoV2FlashConfig(
        **{**NARROW, "head_dim": 12},
        v_head_dim=8,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        routed_scaling_factor=2.5,
    ),
    "step3p7": Step3p7Config(
        text_config={
            **NARROW,
            "num_hidden_layers": 4,
            "pad_token_id": 0,
            "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
            "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
            "rope_theta": [10000.0, 1000.0, 1000.0, 10000.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            "rope_scaling": {**LLAMA3, "high_freq_factor": 4.0},
            "sliding_window": 16,
            "mlp_layer_types": ["dense", *["sparse"] * 3],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "share_expert_dim": 24,
            "moe_router_scaling_factor": 1.5,
            "swiglu_limits": [0.0, 0.0, 0.4, 0.8],
            "swiglu_limits_shared": [0.5, 0.0, 0.4, 0.0],
        },
        vision_config={"width": 8, "layers": 1, "heads": 1, "image_size": 8, "patch_size": 4},
    ),
    "afmoe": AfmoeConfig(
        **{**WIDE, "num_hidden_layers": 4},
        sliding_window=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        route_scale=2.5,
        mup_enabled=True,
    ),
    "sarvam_moe": SarvamMoEConfig(
        **{**WIDE, "num_hidden_layers": 3},
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        partial_rotary_factor=0.5,
    ),
    "youtu": YoutuConfig(
        **{
            **{key: value for key, value in LATENT.items() if key not in ("moe_intermediate_size", "first_k_dense_replace")},
            "num_hidden_layers": 2,
        },
        q_lora_rank=24,
        tie_word_embeddings=False,
    ),
    "hyperclovax": HyperCLOVAXConfig(
        **SIZES, embedding_multiplier=3.0, logits_scaling=0.5, residual_multiplier=0.5, attention_multiplier=0.2
    ),
    "plamo3": unlike.PlamoConfig(
        **{**WIDE, **WINDOWED},
        hidden_activation="silu",
        query_pre_attn_scalar=16,
        sliding_window_pattern=3,
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "muse_glimmer": MuseGlimmerConfig(
        text_config={
            **WIDE,
            "num_hidden_layers": 5,
            "sliding_window": 16,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 8.0,
        },
        vision_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
    ),
    "ling_2_5": unlike.LingConfig(
        **{**LATENT, "num_hidden_layers": 4},
        q_lora_rank=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        use_cache=False,
    ),
    "kimi_linear": KimiLinearConfig(
        **LATENT,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        linear_head_dim=16,
        linear_num_heads=4,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "ling_3": BailingHybridConfig(
        **LATENT,
        q_lora_rank=24,
        layer_group_size=2,
        head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        num_mtp_layers=0,
    ),
    "hunyuan_v1_dense": HunYuanDenseV1Config(
        **WIDE,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0},
        tie_word_embeddings=True,
    ),
    "hunyuan_v1_moe": HunYuanMoEV1Config(**{**WIDE, "intermediate_size": 32}, num_experts=8, moe_topk=3),
    "arcee": ArceeConfig(**SIZES, mlp_bias=True),
    "granite_swa": GraniteSWAConfig(
        **{**SIZES, "num_hidden_layers": 4},
        sliding_window=16,
        layer_rope_theta=[10000.0, 0.0, 1000.0, 10000.0],
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    "granite_moe_swa": GraniteMoeSWAConfig(
        **{**SIZES, "intermediate_size": 32},
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=6,
        num_experts_per_tok=2,
        shared_intermediate_size=48,
        residual_multiplier=0.5,
    ),
    "mellum": MellumConfig(
        **NARROW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        sliding_window=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        rope_parameters={
            "full_attention": DEEP_YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "helium": HeliumConfig(**SIZES, head_dim=8),
    "jais2": Jais2Config(**SIZES),
    "solar_open": SolarOpenConfig(
        **{key: value for key, value in WIDE.items() if key != "intermediate_size"},
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "ministral": MinistralConfig(**WIDE, sliding_window=16, layer_types=["full_attention", "sliding_attention"]),
    "apertus": ApertusConfig(**SIZES),
    "granite_moe": GraniteMoeConfig(
        **{**SIZES, "intermediate_size": 32},
        num_local_experts=6,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.2,
    ),
    "granite_hybrid": GraniteMoeHybridConfig(
        **{**GRANITE_HYBRID, "num_local_experts": 0},
        layer_types=["linear_attention", "full_attention"],
        mamba_n_groups=1,
        mamba_proj_bias=True,
    ),
    "granite_hybrid_moe": GraniteMoeHybridConfig(
        **{**GRANITE_HYBRID, "num_hidden_layers": 3},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_n_groups=2,
        mamba_conv_bias=False,
        time_step_limit=(0.3, 0.8),
    ),
    "granite_hybrid_dense": GraniteMoeHybridConfig(
        **{**GRANITE_HYBRID, "num_local_experts": 0}, layer_types=["full_attention"] * 2, position_embedding_type="rope"
    ),
    "nemotron_h": NemotronHConfig(
        **NEMOTRON_H, layers_block_type=["linear_attention", "mlp", "full_attention", "moe"], moe_latent_size=16
    ),
    "nemotron_h_moe": NemotronHConfig(
        **NEMOTRON_H,
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention"],
        use_bias=True,
        use_conv_bias=False,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
    ),
    "lfm2": Lfm2Config(
        **{**SIZES, "hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 72},
        layer_types=["conv", "full_attention"],
        conv_bias=True,
        conv_L_cache=4,
        block_multiple_of=16,
    ),
    "lfm2_moe": Lfm2MoeConfig(
        **{**SIZES, "num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        routed_scaling_factor=1.5,
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=8, moe_k=3, moe_num_shared_experts=2, moe_intermediate_size=32, moe_layer_start_index=1
    ),
    "llama4": Llama4TextConfig(
        **{**WIDE, "num_hidden_layers": 4},
        num_local_experts=4,
        attention_chunk_size=32,
        floor_scale=16,
        attn_scale=0.5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama4_interleaved": Llama4TextConfig(
        **SIZES,
        head_dim=8,
        no_rope_layer_interval=2,
        intermediate_size_mlp=80,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
    ),
    "gpt_oss": GptOssConfig(
        **{**WIDE, "intermediate_size": 32},
        sliding_window=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    ),
    "phimoe": PhimoeConfig(
        **SIZES, num_local_experts=5, attention_bias=True, lm_head_bias=True, sliding_window=None, router_jitter_noise=0.2
    ),
    "gpt2": GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None),
    "opt": OPTConfig(
        vocab_size=128,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        pad_token_id=None,
        eos_token_id=None,
    ),
}


ARCHITECTURES = {
    "sarvam_moe": "SarvamMoEForCausalLM",
    "bailing_hybrid": "BailingMoeV3ForCausalLM",
    "bailing_moe_v2_5": "BailingMoeV2_5ForCausalLM",
    "mistral_large_3": "MistralLarge3ForCausalLM",
    "plamo3": "Plamo3ForCausalLM",
}
"""Names on the hub of models that transformers calls otherwise, or does not have, by their model_type."""


def architecture(config: PreTrainedConfig) -> str:
    """The name of the architecture with a head, as checkpoints on the hub have it."""
    return ARCHITECTURES.get(config.model_type) or class_name(config)


def class_name(config: PreTrainedConfig) -> str:
    """The class that computes it. transformers lists Mistral 4's with those of models that see images."""
    texts, images = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return texts.get(config.model_type) or images[config.model_type]


def model_class_of(config: PreTrainedConfig) -> Any:
    """The class itself; needs torch."""
    if isinstance(config, unlike.LingConfig):
        from scripts.tiny_configs.ling_model import Ling

        return Ling
    if isinstance(config, unlike.MistralLarge3Config):
        return transformers.Mistral4ForCausalLM
    return transformers.Gemma3ForCausalLM if config.model_type == "plamo3" else getattr(transformers, class_name(config))


def published(config: PreTrainedConfig) -> Callable[[unlike.Tensors], unlike.Tensors] | None:
    """Function from a model's saved tensors to those of a checkpoint on the hub; None: they are the same."""
    return {
        "bailing_hybrid": unlike.published_ling_3,
        "bailing_moe_v2_5": unlike.published_ling,
        "kimi_linear": unlike.published_kimi,
        "mistral_large_3": mistral_form.tensors,
        "plamo3": unlike.published_plamo,
    }.get(config.model_type)
