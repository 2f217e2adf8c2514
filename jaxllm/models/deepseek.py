"""DeepSeek-V2, V3 and V3.2, and Kimi-K2: attention over latents, experts behind a few dense layers. V3.2 chooses the `index_topk` (2048)
tokens that are attended to if `--max-model-len` is greater than that; by default it is as great, and all tokens are.

Sources: arXiv:2405.04434, arXiv:2412.19437, arXiv:2512.02556.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import MLP, LatentAttention, MoE, Norm, QueryScale, Rope, Routing, TokenIndex
from jaxllm.models.config_reader import ConfigReader, yarn_magnitude
from jaxllm.models.deepseek_routing import sigmoid_moe

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "routed_scaling_factor": 1.0,
}
DEFAULTS_V2 = {
    **DEFAULTS,
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "topk_method": "greedy",
}
DEFAULTS_V3 = {
    **DEFAULTS,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
DEFAULTS_V32 = {
    "max_position_embeddings": 163840,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
    "indexer_rope_interleave": False,
}
LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps is."""


def read_v2(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**DEFAULTS_V2)
    c.refuse_unless("topk_method", "greedy", "group_limited_greedy")
    c.refuse_unless("scoring_func", "softmax")
    by_group = c.raw["topk_method"] == "group_limited_greedy"
    num_experts, num_groups = c.integer("n_routed_experts"), c.integer("n_group") if by_group else 1
    if num_experts % num_groups:
        c.faults.append(f"n_group is {num_groups}, must divide the {num_experts} experts")
    routing = Routing(
        num_experts,
        c.integer("num_experts_per_tok"),
        renormalize=c.boolean("norm_topk_prob"),
        scale=c.number("routed_scaling_factor"),
        num_groups=num_groups,
        top_groups=c.integer("topk_group") if by_group else 1,
    )
    width, bias = c.integer("moe_intermediate_size"), c.boolean("mlp_bias")
    shared = MLP(width * c.integer("n_shared_experts"), c.activation(), bias=bias, name="mlp.shared_experts")
    return decoder(c, c.mlp(bias=bias), c.moe(routing, width, shared=shared), interleaved=True)


def read_v3(c: ConfigReader, **fields: Any) -> ModelConfig:
    """fields: of the ModelConfig, in place of those of the config."""
    c = c.with_defaults(**DEFAULTS_V3)
    c.refuse_unless("topk_method", "noaux_tc")
    c.refuse_unless("scoring_func", "sigmoid")
    return decoder(c, c.mlp(), sigmoid_moe(c), interleaved=c.boolean("rope_interleave", True), **fields)


def read_v32(c: ConfigReader) -> ModelConfig:
    c = c.with_defaults(**{**DEFAULTS_V3, **DEFAULTS_V32})
    c.layer_kinds({"indexed_attention": True}, lambda layer: True)
    config, top_k = read_v3(c), c.integer("index_topk")
    if c.max_model_len is None or c.max_model_len <= top_k:
        every = range(config.num_layers + config.num_spare_layers)
        longest = config.max_position if config.max_position > top_k else None
        return replace(
            _without_indexers(config, every), max_position=min(top_k, config.max_position), chosen_max_position=longest
        )
    have_index = _layers_with_index(c)
    with_index, without = _index(c), [layer for layer, has_index in enumerate(have_index) if not has_index]
    layers = []
    for layer, has_index in zip(config.layers, have_index, strict=True):
        assert isinstance(layer.attention, LatentAttention)
        attention = replace(layer.attention, top_k=top_k, index=with_index if has_index else None)
        layers.append(replace(layer, attention=attention))
    return replace(_without_indexers(config, without), layers=tuple(layers))


def _without_indexers(config: ModelConfig, layers: Iterable[int]) -> ModelConfig:
    """A config that leaves out what chooses tokens in these layers of the checkpoint, if it is there."""
    indexers = tuple(f"{config.layer_name(layer)}.self_attn.indexer." for layer in layers)
    return replace(config, names=replace(config.names, ignored=(*config.names.ignored, *indexers)))


def _layers_with_index(c: ConfigReader) -> tuple[bool, ...]:
    """Whether each layer chooses tokens by its own index; the others take the choice of the latest that does. Source:
    arXiv:2603.12201."""
    every, offset, pattern = c.integer("index_topk_freq"), c.count("index_skip_topk_offset"), c.raw.get("index_topk_pattern")
    kinds = {"full": True, "shared": False, "F": True, "S": False}
    # Further entries are those of layers that predict later tokens, which have their own.
    given = c.with_values(indexer_types=list(pattern)[: c.num_layers]) if isinstance(pattern, (str, list)) else c
    given = c if c.raw.get("indexer_types") is not None else given
    found = given.layer_kinds(kinds, lambda layer: max(layer - offset + 1, 0) % every == 0, "indexer_types")
    if not found[0]:
        c.faults.append("the first layer takes the choice of tokens of an earlier one, must have its own index")
    return found


def _index(c: ConfigReader) -> TokenIndex:
    head_dim, rotated = c.integer("index_head_dim"), c.integer("qk_rope_head_dim")
    if head_dim < rotated:
        c.faults.append(f"index_head_dim is {head_dim}, less than qk_rope_head_dim, which is {rotated}")
    if c.integer_or_none("q_lora_rank") is None:
        c.faults.append("q_lora_rank is missing, and queries of the index are products of these latents")
    key_norm = Norm("self_attn.indexer.k_norm", LATENT_EPS, centred=True, bias=True)
    return TokenIndex(c.integer("index_n_heads"), head_dim, c.boolean("indexer_rope_interleave"), key_norm)


def decoder(
    c: ConfigReader, mlp: MLP, moe: MoE, *, interleaved: bool, query_scale: QueryScale | None = None, **fields: Any
) -> ModelConfig:
    """The model with these parts. fields: of the ModelConfig, in place of those of the config."""
    c.refuse_unless("moe_layer_freq", 1)
    rope, max_position = c.positions(interleaved=interleaved)
    layer = c.pre_norm_layer(attention(c, rope, query_scale=query_scale), mlp)
    return c.decoder(c.with_experts([layer] * c.num_layers, moe), max_position, **fields)


def attention(
    c: ConfigReader, rope: Rope | None, *, name: str = "self_attn", eps: float = LATENT_EPS, **fields: Any
) -> LatentAttention:
    """Attention over latents. rope: None for one without positions. eps: of the norms of latents. fields: of the part."""
    plain, rotated = c.integer("qk_nope_head_dim"), c.integer("qk_rope_head_dim")
    if rotated % 2:
        c.faults.append(f"qk_rope_head_dim is {rotated}, must be even")
    if rope is not None and rope.rotary_dim not in (None, rotated):
        c.faults.append(f"partial_rotary_factor rotates {rope.rotary_dim} values, supported: all {rotated} of qk_rope_head_dim")
    query_dim = c.integer_or_none("q_lora_rank")
    return LatentAttention(
        num_heads=c.integer("num_attention_heads"),
        latent_dim=c.integer("kv_lora_rank"),
        plain_dim=plain,
        rotated_dim=rotated,
        value_dim=c.integer("v_head_dim"),
        rope=rope,
        score_scale=(plain + rotated) ** -0.5 * _magnitude(c, rope) ** 2,
        latent_norm=Norm(f"{name}.kv_a_layernorm", eps),
        query_norm=None if query_dim is None else Norm(f"{name}.q_a_layernorm", eps),
        query_dim=query_dim,
        bias=c.boolean("attention_bias"),
        name=name,
        **fields,
    )


def _magnitude(c: ConfigReader, rope: Rope | None) -> float:
    """Yarn's factor of all values of queries and keys, of which cosine and sine have what mscale adds to it."""
    given = c.within("rope_scaling" if c.raw.get("rope_scaling") else "rope_parameters")
    if rope is None or rope.kind == "default" or not given.raw.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(rope.factor, given.number("mscale_all_dim"))
