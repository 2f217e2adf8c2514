"""Ling 2.5 for tests, which transformers does not have: its DeepSeek-V3 with lightning attention in some layers, as a checkpoint of the hub
names its tensors."""

from transformers import DeepseekV3Config


class LingConfig(DeepseekV3Config):
    model_type = "bailing_moe_v2_5"

    layer_group_size: int = 3
    group_norm_size: int = 4
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10000.0
    head_dim: int = 16

    def is_full(self, layer: int) -> bool:
        """Whether a layer has attention over latents."""
        size = self.layer_group_size
        return (layer + 1) % size == 0 or layer >= self.num_hidden_layers // size * size


def name_on_hub(name: str) -> str:
    """What a checkpoint calls a tensor of `ling_model.Ling`."""
    for ours, theirs in (
        ("self_attn.o_proj", "attention.dense"),
        ("self_attn.", "attention."),
        ("gate.e_score_correction_bias", "gate.expert_bias"),
        ("model.embed_tokens", "model.word_embeddings"),
    ):
        name = name.replace(ours, theirs)
    return name
