"""Write tests/goldens: tiny random checkpoints of every family and variant, and what transformers computes with them.

    python scripts/make_goldens.py [--only NAME ...] [--output DIR]

Variants that are not kept there are compared with transformers live (tests/models/test_transformers_live.py), and in whole engines by

    python scripts/make_goldens.py --output DIR --only NAME ...
    JAXLLM_GOLDENS=DIR python -m pytest tests/models tests/end_to_end/test_parity.py

Needs torch and transformers. Each folder holds config.json, model.safetensors (bfloat16) and golden.json; golden.json has
prompts of mixed lengths and, for each, the prompt's log probabilities, 64 greedy tokens with theirs, and (for the first prompt)
all logits. Everything is computed in float32. A seed is taken only if no step was close to a tie, so that greedy tokens are
comparable, and if float64 gives nearly the same: random models may amplify the rounding of float32 to more than the tests' 1e-4.
"""

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from transformers import (
    AfmoeConfig,
    ApertusConfig,
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
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HYV3Config,
    LagunaConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
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
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

if TYPE_CHECKING:
    import torch  # imported where it is needed, because VARIANTS are read without it too

FOLDER = Path(__file__).parent.parent / "tests" / "goldens"
NEW_TOKENS = 64
PROMPT_LENGTHS = (12, 1, 3, 17, 33, 40)
SMALLEST_MARGIN = 1e-3
FEWEST_DISTINCT = 10
LARGEST_ROUNDING = 2e-5
"""Rounding of logprobs."""

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
        index_n_heads=2,
        index_head_dim=16,
        index_topk=256,
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
        index_n_heads=2,
        index_head_dim=16,
        index_topk=256,
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
    "hunyuan_v1_dense": HunYuanDenseV1Config(
        **WIDE,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0},
        tie_word_embeddings=True,
    ),
    "hunyuan_v1_moe": HunYuanMoEV1Config(**{**WIDE, "intermediate_size": 32}, num_experts=8, moe_topk=3),
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


def architecture(config: PreTrainedConfig) -> str:
    """The name of the architecture with a head, as checkpoints on the hub have it."""
    return "SarvamMoEForCausalLM" if config.model_type == "sarvam_moe" else class_name(config)


def class_name(config: PreTrainedConfig) -> str:
    """The class that computes it. transformers lists Mistral 4's with those of models that see images."""
    texts, images = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return texts.get(config.model_type) or images[config.model_type]


OFFSET_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
"""Classes of norms whose weights are stored from zero, and would make logits too large for float32 to tell them to 1e-4."""


def kept() -> list[str]:
    """The variants that have a golden in tests/goldens."""
    return sorted(path.parent.name for path in FOLDER.glob("*/golden.json"))


def random_model(config: PreTrainedConfig, seed: int, scale: float) -> "torch.nn.Module":
    """Weights far larger than a training starts with: text that wanders, and clear differences between tokens."""
    import torch

    torch.manual_seed(seed)
    model_class = getattr(transformers, class_name(config))
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # which float64 needs
    model = model_class._from_config(config, dtype=torch.float32, **plain)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".sinks"):
                weight.normal_(0, 2)
            elif name.endswith(".A_log"):  # from states that forget within tokens to those that do not
                weight.uniform_(-6, -1)
            elif name.endswith("norm.weight") or (weight.ndim == 1 and not name.endswith(".bias")):
                weight.uniform_(0.5, 1.5)
                if type(model.get_submodule(name.rpartition(".")[0])).__name__ in OFFSET_NORMS:
                    weight.sub_(1)
            elif name.endswith(".bias"):
                weight.normal_(0, 0.2)
            else:
                # A tied head makes the last token the likeliest next one where its embedding is large.
                is_tied = config.tie_word_embeddings and "embed" in name
                weight.normal_(0, scale / 8 if is_tied else scale)
            weight.copy_(weight.to(torch.bfloat16))  # what the file will hold
        for name, buffer in model.named_buffers():  # of routers, for the choice of experts
            if name.endswith("correction_bias"):
                buffer.copy_(buffer.normal_(0, 0.2).to(torch.bfloat16))
            elif name.endswith("bias"):
                buffer.copy_(buffer.uniform_(-0.2, 0.2).to(torch.bfloat16))
    return model.eval()


def save(model: "torch.nn.Module", directory: Path) -> None:
    """Write the model's files, with the name of its architecture on the hub."""
    model.save_pretrained(directory)
    file = directory / "config.json"
    raw = {**json.loads(file.read_text(encoding="utf-8")), "architectures": [architecture(model.config)]}
    file.write_text(json.dumps(raw, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def compute(model: "torch.nn.Module", prompt: list[int]) -> tuple[dict[str, Any], float, "torch.Tensor"]:
    """Output of the model for a prompt, the smallest difference between the two likeliest tokens, and the prompt's logits."""
    import torch

    ids = torch.tensor([prompt])
    logits = model(ids).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    generated = model.generate(
        ids, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True
    )
    tokens = generated.sequences[0, len(prompt) :]
    steps = torch.stack(generated.logits)[:, 0]
    best = steps.topk(2).values
    golden = {
        "prompt": prompt,
        "prompt_logprobs": [round(float(logprobs[i, token]), 6) for i, token in enumerate(prompt[1:])],
        "tokens": tokens.tolist(),
        "logprobs": [round(float(row[token]), 6) for row, token in zip(steps.log_softmax(-1), tokens, strict=True)],
    }
    return golden, float((best[:, 0] - best[:, 1]).min()), logits


def rounding(exact: "torch.nn.Module", golden: dict[str, Any]) -> float:
    """The largest difference between logprobs in float32 and those of the model in float64."""
    import torch

    tokens = golden["prompt"] + golden["tokens"]
    logprobs = torch.log_softmax(exact(torch.tensor([tokens[:-1]])).logits[0], -1)
    found = golden["prompt_logprobs"] + golden["logprobs"]
    return max(abs(float(logprobs[i, tokens[i + 1]]) - value) for i, value in enumerate(found))


def write(name: str, config: PreTrainedConfig, output: Path) -> None:
    """Try seeds until the text is worth comparing."""
    import torch

    torch.set_grad_enabled(False)
    for attempt in range(60):
        seed, scale = attempt, 0.3 + 0.1 * (attempt % 8)
        model = random_model(config, seed, scale)
        exact = copy.deepcopy(model).double()
        generator = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
        goldens, logits = [], None
        for prompt in prompts:
            golden, margin, prompt_logits = compute(model, prompt)
            if margin < SMALLEST_MARGIN or len(set(golden["tokens"])) < FEWEST_DISTINCT:
                break
            if rounding(exact, golden) > LARGEST_ROUNDING:
                break
            logits = prompt_logits if logits is None else logits
            goldens.append(golden)
        else:
            break
    else:
        raise SystemExit(f"{name}: no seed gave text without ties, loops and large rounding")
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    save(model.to(torch.bfloat16), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    result = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "first_prompt_logits": [[round(float(value), 5) for value in row] for row in logits],
        "results": goldens,
    }
    (folder / "golden.json").write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: seed {seed}, scale {scale:.1f}, {size / 1024:.0f} KB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write tests/goldens.")
    parser.add_argument("--only", nargs="*", choices=sorted(VARIANTS), default=kept(), help="default: those of tests/goldens")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the checkpoints (default: tests/goldens)")
    arguments = parser.parse_args()
    for name in arguments.only:
        write(name, VARIANTS[name], arguments.output)


if __name__ == "__main__":
    main()
