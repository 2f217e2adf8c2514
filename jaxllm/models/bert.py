"""BERT, RoBERTa and XLM-RoBERTa: encoders with learned positions and norms of sums, alone or with a head that scores classes.

Sources: arXiv:1810.04805, arXiv:1907.11692, arXiv:1911.02116.
"""

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, Attention, Classifier, ClassifierHidden, Encoder, Layer, Names, Positions
from jaxllm.models.classifier import is_classifier, read_classifier
from jaxllm.models.config_reader import ConfigReader
from jaxllm.pooling_config import PoolingConfig


def read(c: ConfigReader) -> ModelConfig:
    """BERT."""
    hidden = ClassifierHidden("bert.pooler.dense", "tanh")
    classifier = read_classifier(c, "classifier", hidden=hidden, takes_pairs=True) if is_classifier(c) else None
    return _encoder(c, "bert", offset=0, classifier=classifier)


def read_roberta(c: ConfigReader) -> ModelConfig:
    """RoBERTa: positions begin behind the row of padding."""
    hidden = ClassifierHidden("classifier.dense", "tanh")
    classifier = read_classifier(c, "classifier.out_proj", hidden=hidden, takes_pairs=True) if is_classifier(c) else None
    c = c.with_defaults(pad_token_id=1)
    return _encoder(c, "roberta", offset=c.count("pad_token_id") + 1, classifier=classifier)


def _encoder(c: ConfigReader, prefix: str, *, offset: int, classifier: Classifier | None) -> ModelConfig:
    """An encoder whose tensors have this prefix. offset: of positions in their table."""
    c = c.with_defaults(hidden_act="gelu", layer_norm_eps=1e-12, max_position_embeddings=512, type_vocab_size=2)
    c.refuse_unless("is_decoder", False)
    c.refuse_unless("add_cross_attention", False)
    c.refuse_unless("position_embedding_type", "absolute")
    width, heads, count = c.integer("hidden_size"), c.integer("num_attention_heads"), c.integer("max_position_embeddings")
    if width % heads:
        c.faults.append(f"num_attention_heads is {heads}, must divide hidden_size, which is {width}")
    attention = Attention(
        heads,
        heads,
        max(1, width // heads),
        rope=None,
        bias=True,
        out_bias=True,
        name="attention",
        qkv=("self.query", "self.key", "self.value"),
        out="output.dense",
    )
    mlp = MLP(
        c.integer("intermediate_size"),
        c.activation(),
        gated=False,
        bias=True,
        name="",
        gate_up=("intermediate.dense",),
        down="output.dense",
    )
    layer = Layer(attention, mlp, c.layer_norm("output.LayerNorm"), c.layer_norm("attention.output.LayerNorm"))
    embeddings, num_types = f"{prefix}.embeddings", c.count("type_vocab_size")
    of_types = f"{embeddings}.token_type_embeddings" if num_types else None
    ignored: tuple[str, ...] = (f"{embeddings}.position_ids", f"{embeddings}.token_type_ids", "cls.", "lm_head.")
    if prefix != "bert" or classifier is None:
        ignored += (f"{prefix}.pooler.",)  # trained to tell which texts follow each other
    return c.decoder(
        [layer] * c.num_layers,
        max(1, count - offset),
        names=Names(f"{embeddings}.word_embeddings", f"{prefix}.encoder.layer.{{}}", ignored=ignored),
        positions=Positions(f"{embeddings}.position_embeddings", count, offset=offset),
        norm=c.layer_norm(f"{prefix}.encoder.layer.{c.num_layers - 1}.output.LayerNorm"),
        encoder=Encoder(c.layer_norm(f"{embeddings}.LayerNorm"), of_types, num_types),
        has_token_types=num_types > 1,
        classifier=classifier,
        pooling=PoolingConfig("cls"),
        tie_word_embeddings=False,
        model_class="jaxllm.layers.encoder:PostNormEncoder",
    )
