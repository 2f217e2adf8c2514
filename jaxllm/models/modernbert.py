"""ModernBERT: an encoder with rope, gates, and windows in most layers. Source: arXiv:2412.13663."""

from dataclasses import replace

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Classifier, ClassifierHidden, Encoder, Layer, Names, Norm
from jaxllm.models.classifier import is_classifier, read_classifier
from jaxllm.models.config_reader import WINDOWED, ConfigReader
from jaxllm.pooling_config import PoolingConfig, PoolingType


def read(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(max_position_embeddings=8192, global_attn_every_n_layers=3, local_attention=128)
    every, reach = c.integer("global_attn_every_n_layers"), c.integer("local_attention") // 2
    bias, width, heads = c.boolean("attention_bias"), c.integer("hidden_size"), c.integer("num_attention_heads")
    if width % heads:
        c.faults.append(f"num_attention_heads is {heads}, must divide hidden_size, which is {width}")
    head_dim = max(1, width // heads)
    everywhere, _ = c.rope_of("full_attention", {"rope_theta": c.number("global_rope_theta", 160_000.0)})
    nearby, _ = c.rope_of("sliding_attention", {"rope_theta": c.number("local_rope_theta", 10_000.0)})
    attention = Attention(heads, heads, head_dim, everywhere, bias=bias, out_bias=bias, name="attn", qkv=("Wqkv",), out="Wo")
    activation = c.activation("hidden_activation", "gelu")
    mlp = MLP(c.integer("intermediate_size"), activation, bias=c.boolean("mlp_bias"), gate_up=("Wi",), down="Wo")
    layer = Layer(attention, mlp, _norm(c, "attn_norm"), _norm(c, "mlp_norm"))
    in_window = replace(layer, attention=replace(attention, rope=nearby, window=reach + 1))
    layers = [in_window if is_near else layer for is_near in c.layer_kinds(WINDOWED, lambda layer: layer % every != 0)]
    layers[0] = replace(layers[0], attention_norm=None)  # the norm of the embeddings is before it
    pooling: PoolingType = "mean" if is_classifier(c) and c.raw.get("classifier_pooling") == "mean" else "cls"
    c.refuse_unless("classifier_pooling", "cls", "mean")
    return c.decoder(
        layers,
        c.integer("max_position_embeddings"),
        names=Names(
            "model.embeddings.tok_embeddings", "model.layers.{}", ignored=("decoder.", "head.") if not is_classifier(c) else ()
        ),
        norm=_norm(c, "model.final_norm"),
        encoder=Encoder(_norm(c, "model.embeddings.norm")),
        classifier=_classifier(c) if is_classifier(c) else None,
        pooling=PoolingConfig(pooling),
        tie_word_embeddings=False,
        model_class="jaxllm.layers.encoder:Encoder",
    )


def _classifier(c: ConfigReader) -> Classifier:
    activation = c.activation("classifier_activation", "gelu")
    hidden = ClassifierHidden("head.dense", activation, bias=c.boolean("classifier_bias"), norm=_norm(c, "head.norm"))
    return read_classifier(c, "classifier", hidden=hidden, takes_pairs=True)


def _norm(c: ConfigReader, name: str) -> Norm:
    return c.layer_norm(name, "norm_eps", bias=c.boolean("norm_bias"))
