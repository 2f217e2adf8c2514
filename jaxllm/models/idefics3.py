"""Idefics 3 and SmolVLM: Llama with the encoder of images of SigLIP, which takes tiles. Sources: arXiv:2408.12637, arXiv:2504.05299."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Merger, MergerLinear, Norm, Vision, VisionEncoder, VisionLayer
from jaxllm.models import llama
from jaxllm.models.config_reader import ConfigReader

TOWER, CONNECTOR = "model.vision_model.", "model.connector."
VISION_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def read(c: ConfigReader) -> ModelConfig:
    text, names, norm = c.text_part(TOWER, CONNECTOR, prefix="model.text_model", head="lm_head")
    text.refuse_unless("model_type", "llama")
    text.refuse_unless("qk_layer_norms", False)
    text = text.with_defaults(rms_norm_eps=1e-5)
    # Whether the head is tied stands outside of the text model's part.
    config = llama.read(text, names=names, norm=text.rms_norm(norm), tie_word_embeddings=c.boolean("tie_word_embeddings"))
    return replace(config, vision=_vision(c, config.hidden_size))


def _vision(c: ConfigReader, output_size: int) -> Vision:
    v = c.within("vision_config").with_defaults(**VISION_DEFAULTS)
    v.refuse_unless("num_channels", 3)
    hidden_size, num_heads = v.integer("hidden_size"), v.integer("num_attention_heads")
    if hidden_size % num_heads:
        c.faults.append(f"hidden_size of vision_config is {hidden_size}, must be a multiple of its {num_heads} heads")
    patch_size, merge_size = v.integer("patch_size"), c.integer("scale_factor", 2)
    grid = v.integer("image_size") // patch_size
    if not grid or grid % merge_size:
        c.faults.append(f"scale_factor is {merge_size}, must divide the {grid} patches along each side of a tile")
    width, eps = v.integer("intermediate_size"), v.number("layer_norm_eps")
    mlp = MLP(width, v.activation(), gated=False, bias=True, gate_up=("fc1",), down="fc2")
    qkv = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
    encoder = VisionEncoder(
        prefixes=(TOWER, CONNECTOR),
        patch=f"{TOWER}embeddings.patch_embedding",
        # transformers finds rows of this table by products in float32, for some sizes with an error; for those of models without.
        positions=f"{TOWER}embeddings.position_embedding.weight",
        layer_name=f"{TOWER}encoder.layers.{{}}",
        layer=VisionLayer(_norm("layer_norm1", eps), _norm("layer_norm2", eps), mlp, qkv, "self_attn.out_proj"),
        last_norm=_norm(f"{TOWER}post_layernorm", eps),
        merger=Merger((MergerLinear(f"{CONNECTOR}modality_projection.proj", output_size, bias=False),)),
    )
    return Vision(
        "idefics3",
        image_token_id=c.count("image_token_id", 128257),
        patch_size=patch_size,
        merge_size=merge_size,
        hidden_size=hidden_size,
        num_layers=v.integer("num_hidden_layers"),
        num_heads=num_heads,
        intermediate_size=width,
        output_size=output_size,
        position_grid=grid,
        has_tiles=True,
        encoder=encoder,
    )


def _norm(name: str, eps: float) -> Norm:
    return Norm(name, eps, centred=True, bias=True)
