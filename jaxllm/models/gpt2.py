"""GPT-2: LayerNorm, learned positions, no gate. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"."""

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Layer, Names, Positions
from jaxllm.models.config_reader import ConfigReader


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(activation_function="gelu_new", tie_word_embeddings=True)
    c.refuse_unless("scale_attn_weights", True)
    c.refuse_unless("scale_attn_by_inverse_layer_idx", False)
    c.refuse_unless("add_cross_attention", False)
    width, heads, count = c.integer("n_embd"), c.integer("n_head"), c.integer("n_positions", 1024)
    if width % heads:
        c.faults.append(f"n_head is {heads}, must divide n_embd, which is {width}")
    attention = Attention(
        heads,
        heads,
        max(1, width // heads),
        rope=None,
        bias=True,
        out_bias=True,
        name="attn",
        qkv=("c_attn",),
        out="c_proj",
        transposed=True,
    )
    mlp = MLP(
        c.integer("n_inner", 4 * width),
        c.activation("activation_function"),
        gated=False,
        bias=True,
        gate_up=("c_fc",),
        down="c_proj",
        transposed=True,
    )
    layer = Layer(attention, mlp, c.layer_norm("ln_1", "layer_norm_epsilon"), c.layer_norm("ln_2", "layer_norm_epsilon"))
    return c.decoder(
        [layer] * c.integer("n_layer"),
        count,
        hidden_size=width,
        names=Names("transformer.wte", "transformer.h.{}"),
        positions=Positions("transformer.wpe", count),
        norm=c.layer_norm("transformer.ln_f", "layer_norm_epsilon"),
    )
