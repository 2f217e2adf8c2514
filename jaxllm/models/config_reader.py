"""Takes checked values, and parts of a decoder, out of a Hugging Face config.json."""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from jaxllm.model_config import MAX_LAYERS, MAX_POSITION, ModelConfig
from jaxllm.model_parts import (
    MLP,
    Activation,
    Attention,
    Layer,
    Mamba2,
    MoE,
    Names,
    Norm,
    Rope,
    RopeKind,
    Routing,
    TokenMixer,
)

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""By transformers' names."""
WINDOWED = {"sliding_attention": True, "full_attention": False}
"""Whether a layer has a window, by its entry in layer_types."""
SPARSE = {"sparse": True, "dense": False}
"""Whether a layer has experts, by its entry in mlp_layer_types."""
MAX_INTEGER, MAX_VOCABULARY, MAX_EXPERTS = 2**20, 2**24, 4096
"""Limits of what a config.json may ask for: of any integer, of tokens of a vocabulary, of experts of a layer."""
_LIMITS = (
    (re.compile(r"layers|n_layer|dense_replace"), MAX_LAYERS),
    (re.compile(r"experts|top_?k|moe_k"), MAX_EXPERTS),
    (re.compile(r"position|window|chunk|floor_scale|layer_end"), MAX_POSITION),
    (re.compile(r"vocab"), MAX_VOCABULARY),
)
"""By what is in a key, the first that fits."""
_LEAST_NUMBER, _MOST_NUMBER = 1e-38, 1e38
"""About what float32 holds."""
_INFINITY = {"__float__": "Infinity"}
"""As transformers 5 writes it."""
_NEUTRAL = {
    "alibi": False,
    "attn_logit_softcapping": None,
    "clip_qkv": None,
    "final_logit_softcapping": None,
}
"""Keys that change what a model computes wherever they are, with the value that changes nothing."""


class ConfigReader:
    """Reads a config.json and collects in `faults` what is wrong with it. After a fault, values are placeholders."""

    def __init__(
        self,
        architecture: str,
        raw: Mapping[str, Any],
        faults: list[str] | None = None,
        *,
        max_model_len: int | None = None,
        expert_parallel: bool = False,
    ):
        """max_model_len, expert_parallel: the options of the engine."""
        self.architecture = architecture
        self.raw = raw
        self.faults = faults if faults is not None else []
        self.max_model_len = max_model_len
        self.expert_parallel = expert_parallel
        self._asked: set[str] = set()
        """The keys that were read, in readers of objects inside this one too."""

    # --- values ---

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer up to its limit; without a default it is required."""
        return self._integer(name, default, 1, "a positive integer")

    def count(self, name: str, default: int | None = None) -> int:
        """An integer that is not negative; without a default it is required."""
        return self._integer(name, default, 0, "an integer, not negative")

    def integer_or_none(self, name: str) -> int | None:
        """A positive integer; None if it is null or absent."""
        return None if self._value(name) is None else self.integer(name)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; without a default it is required."""
        value = self._value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            self.faults.append(f"{name} is {'missing' if value is None else repr(value)}, must be a positive number")
            return 1.0
        if not _LEAST_NUMBER <= value <= _MOST_NUMBER:
            self.faults.append(f"{name} is {value!r}, must be from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}")
            return 1.0
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        """A positive number; None if it is null or absent."""
        return None if self._value(name) is None else self.number(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.faults.append(f"{name} is {value!r}, must be true or false")
        return bool(value)

    def activation(self, name: str = "hidden_act", default: str = "silu") -> Activation:
        """An activation function."""
        value = self.raw.get(name) or default
        if not isinstance(value, str) or value not in ACTIVATIONS:
            self.faults.append(f"{name} is {value!r}, supported: {', '.join(ACTIVATIONS)}")
            return "silu"
        return ACTIVATIONS[value]

    def within(self, name: str) -> "ConfigReader":
        """A reader of an object inside this one."""
        value = self._value(name) or {}
        if not isinstance(value, dict):
            self.faults.append(f"{name} is {value!r}, must be an object")
            value = {}
        return self._reader(value)

    def with_defaults(self, **values: Any) -> "ConfigReader":
        """A reader with values for absent keys, the defaults of transformers."""
        return self._reader({**values, **self.raw})

    def with_values(self, **values: Any) -> "ConfigReader":
        """A reader with values in place of those of the config."""
        return self._reader({**self.raw, **values})

    def _reader(self, raw: Mapping[str, Any]) -> "ConfigReader":
        options = {"max_model_len": self.max_model_len, "expert_parallel": self.expert_parallel}
        reader = ConfigReader(self.architecture, raw, self.faults, **options)  # type: ignore[arg-type]
        reader._asked = self._asked
        return reader

    def _value(self, name: str) -> Any:
        self._asked.add(name)
        return self.raw.get(name)

    def _integer(self, name: str, default: int | None, least: int, what: str) -> int:
        value = self._value(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.faults.append(f"{name} is {'missing' if value is None else repr(value)}, must be {what}")
            return 1
        most = next((limit for pattern, limit in _LIMITS if pattern.search(name)), MAX_INTEGER)
        if value > most:
            self.faults.append(f"{name} is {value}, must be at most {most}")
            return 1
        return value

    def refuse_unless(self, name: str, *supported: Any) -> None:
        """A fault if a value is given that is none of these."""
        value = self._value(name)
        if value is not None and value not in supported:
            self.faults.append(f"{name} is {value!r}, supported: {' or '.join(map(repr, supported))}")

    @property
    def num_layers(self) -> int:
        return self.integer("num_hidden_layers")

    def layer_kinds(
        self, kinds: Mapping[str, bool], otherwise: Callable[[int], bool], name: str = "layer_types"
    ) -> tuple[bool, ...]:
        """The value in `kinds` of each layer's entry in the list of this name; that of `otherwise` where it is absent."""
        given = self._value(name)
        if given is None:
            return tuple(otherwise(layer) for layer in range(self.num_layers))
        if (
            not isinstance(given, list)
            or len(given) != self.num_layers
            or not all(isinstance(kind, str) and kind in kinds for kind in given)
        ):
            self.faults.append(f"{name} is {given!r}, must be {self.num_layers} of {' or '.join(kinds)}")
            return (False,) * self.num_layers
        return tuple(kinds[kind] for kind in given)

    def per_layer(self, name: str, otherwise: int) -> list[int]:
        """A positive integer for each layer, from the list of this name; `otherwise` for all where it is absent."""
        given = self._value(name)
        if given is None:
            return [otherwise] * self.num_layers
        if not isinstance(given, list) or len(given) != self.num_layers or not all(type(n) is int and n > 0 for n in given):
            self.faults.append(f"{name} is {given!r}, must be a list of {self.num_layers} positive integers")
            return [otherwise] * self.num_layers
        return given

    def limits(self, name: str) -> list[float | None]:
        """The number of each layer in the list of this name, which further layers may follow; 0 and null are none."""
        given, num_layers = self._value(name), self.num_layers
        if not given:
            return [None] * num_layers
        is_right = isinstance(given, list) and len(given) >= num_layers
        if not is_right or not all(value is None or (type(value) in (int, float) and 0 <= value < 1e30) for value in given):
            self.faults.append(f"{name} is {given!r}, must be a list of {num_layers} numbers, none negative")
            return [None] * num_layers
        return [float(value) if value else None for value in given[:num_layers]]

    def with_experts(self, layers: list[Layer], moe: MoE) -> list[Layer]:
        """Layers with experts where mlp_layer_types says so, or else in all behind the first first_k_dense_replace."""
        num_dense = self.count("first_k_dense_replace")
        kinds = self.layer_kinds(SPARSE, lambda layer: layer >= num_dense, "mlp_layer_types")
        return [dataclasses.replace(layer, mlp=moe) if on else layer for layer, on in zip(layers, kinds, strict=True)]

    def layers_with_rope(self) -> list[bool]:
        """Whether each layer has positions, where no_rope_layers or else no_rope_layer_interval says so."""
        every = self.integer("no_rope_layer_interval")
        given = self._value("no_rope_layers") or [(layer + 1) % every != 0 for layer in range(self.num_layers)]
        if not isinstance(given, list) or len(given) != self.num_layers:
            self.faults.append(
                f"no_rope_layers is {given!r}, must be a list of {self.num_layers} numbers, 1 for layers with rope"
            )
            return [True] * self.num_layers
        return [bool(turns) for turns in given]

    def text_part(
        self, prefix: str = "language_model.model", head: str = "language_model.lm_head"
    ) -> tuple["ConfigReader", Names, str]:
        """The reader of the text model, what its tensors are called, and its last norm.

        prefix, head: of the names in a checkpoint that has other models too. What config.json says outside of the text model's part
        of the head and the first token goes before what the part says.
        """
        if "text_config" not in self.raw:
            return self, Names(), "model.norm"
        names = Names(f"{prefix}.embed_tokens", f"{prefix}.layers.{{}}", head, is_part=True)
        outside = {name: self.raw.get(name) for name in ("tie_word_embeddings", "bos_token_id")}
        text = self.within("text_config").with_values(**{name: value for name, value in outside.items() if value is not None})
        return text, names, f"{prefix}.norm"

    # --- parts ---

    @property
    def head_dim(self) -> int:
        return self.integer("head_dim", max(1, self.integer("hidden_size") // self.integer("num_attention_heads")))

    def attention(self, rope: Rope | None) -> Attention:
        """Attention with the heads of the config."""
        num_heads = self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", num_heads)
        if num_heads % kv_heads:
            self.faults.append(f"num_key_value_heads is {kv_heads}, must divide num_attention_heads, which is {num_heads}")
        if self.head_dim % 2:
            self.faults.append(f"head_dim is {self.head_dim}, must be even")
        return Attention(num_heads, kv_heads, self.head_dim, rope)

    def mlp(self, **fields: Any) -> MLP:
        """The gated MLP of the config."""
        return MLP(self.integer("intermediate_size"), self.activation(), **fields)

    def moe(self, routing: Routing, width: int, **fields: Any) -> MoE:
        """A mixture of experts of this width."""
        if routing.top_k > routing.num_experts:
            self.faults.append(f"num_experts_per_tok is {routing.top_k}, more than the {routing.num_experts} experts")
        activation = self.activation()
        if activation not in ("silu", "gelu_tanh"):
            self.faults.append(f"hidden_act of experts is {self.raw.get('hidden_act')!r}, supported: silu, gelu_pytorch_tanh")
        return MoE(routing, width, activation, by_expert=self.expert_parallel, **fields)  # type: ignore[arg-type]

    def mamba2(
        self, num_heads: int, num_groups: int, head_dim: int, state_size: int, kernel_size: int, norm: Norm, **fields: Any
    ) -> Mamba2:
        """Mamba-2 with the time_step_limit of the config."""
        if num_heads % num_groups:
            self.faults.append(f"{num_groups} groups of Mamba-2 must divide its {num_heads} heads")
            num_groups = 1
        if kernel_size == 1:
            self.faults.append("the convolution of Mamba-2 sees 1 token, must be at least 2")
        limit = self._value("time_step_limit")
        if isinstance(limit, list):
            limit = [math.inf if value == _INFINITY else value for value in limit]
        if limit is not None:
            if not isinstance(limit, list) or len(limit) != 2 or not all(type(x) in (int, float) and x >= 0 for x in limit):
                self.faults.append(f"time_step_limit is {limit!r}, must be two numbers, none negative")
            elif tuple(limit) != (0.0, math.inf):
                fields["time_step_limit"] = (float(limit[0]), float(limit[1]))
        return Mamba2(num_heads, num_groups, head_dim, state_size, kernel_size, norm, **fields)

    def rms_norm(self, name: str, **fields: Any) -> Norm:
        """A norm with the config's epsilon."""
        return Norm(name, self.number("rms_norm_eps", 1e-6), **fields)

    def layer_norm(self, name: str, eps_name: str = "layer_norm_eps", *, bias: bool = True) -> Norm:
        """A LayerNorm with the config's epsilon."""
        return Norm(name, self.number(eps_name, 1e-5), centred=True, bias=bias)

    def pre_norm_layer(self, attention: TokenMixer, mlp: MLP | MoE, **fields: Any) -> Layer:
        """A layer as Llama has it."""
        return Layer(attention, mlp, self.rms_norm("input_layernorm"), self.rms_norm("post_attention_layernorm"), **fields)

    def post_norm_layer(self, attention: Attention, mlp: MLP | MoE) -> Layer:
        """A layer with norms of what attention and MLP add, and no others."""
        norms = (self.rms_norm("post_attention_layernorm"), self.rms_norm("post_feedforward_layernorm"))
        return Layer(attention, mlp, None, None, *norms)

    def decoder(self, layers: list[Layer], max_position: int, **fields: Any) -> ModelConfig:
        """The model of these layers, with what all families spell alike. Keywords replace fields of ModelConfig."""
        self._refuse_what_was_not_asked()
        bos = self.raw.get("bos_token_id")
        values: dict[str, Any] = {
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": fields.get("hidden_size") or self.integer("hidden_size"),
            "norm": fields.get("norm") or self.rms_norm("model.norm"),
            "tie_word_embeddings": self.boolean("tie_word_embeddings"),
            "bos_token_id": bos if type(bos) is int and 0 <= bos < MAX_VOCABULARY else None,
            "num_spare_layers": self.count("num_nextn_predict_layers", 0),
        }
        return ModelConfig(self.architecture, layers=tuple(layers), max_position=max_position, **{**values, **fields})

    def _refuse_what_was_not_asked(self) -> None:
        """Faults for keys that change what a model computes and that its family does not have here."""
        for name, neutral in _NEUTRAL.items():
            value = self.raw.get(name)
            if name not in self._asked and value is not None and value != neutral:
                self.faults.append(
                    f"{name} is {value!r}, which {self.architecture} is not computed with; supported: {neutral!r}"
                )
        kinds = self.raw.get("layer_types")
        if "layer_types" not in self._asked and isinstance(kinds, list):
            # A family without layers of several kinds: they may all be called full, or, as it has one window, all sliding.
            if unknown := sorted({str(kind) for kind in kinds if not isinstance(kind, str) or kind not in WINDOWED}):
                self.faults.append(f"layer_types has {', '.join(unknown)}, supported: {' and '.join(WINDOWED)}")
            elif len(set(kinds)) > 1:
                self.faults.append(f"layer_types is {kinds!r}, supported by {self.architecture}: layers of one kind")

    # --- positions ---

    def positions(self, **rope: Any) -> tuple[Rope, int]:
        """Rope and the longest sequence. Keywords are those of `rope`.

        transformers 5 writes rope_parameters, before it were rope_theta and rope_scaling.
        """
        given = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        max_position = self.integer("max_position_embeddings")
        if not isinstance(given, dict):
            self.faults.append(f"rope_scaling is {given!r}, must be an object")
            return Rope(), max_position
        return self.rope(given, max_position, **rope)

    def rope_of(self, kind: str, otherwise: Mapping[str, Any] | None = None, **rope: Any) -> tuple[Rope, int]:
        """`positions` of the layers of a kind, of which transformers 5 writes rope_parameters apart.

        otherwise: the parameters where they are not; None: those of all layers.
        """
        given = self.raw.get("rope_parameters") or {}
        if isinstance(given, dict) and isinstance(given.get(kind), dict):
            return self.rope(given[kind], self.integer("max_position_embeddings"), **rope)
        if otherwise is not None:
            return self.rope(otherwise, self.integer("max_position_embeddings"), **rope)
        return self.positions(**rope)

    def rope(self, given: Mapping[str, Any], max_position: int, *, interleaved: bool = False) -> tuple[Rope, int]:
        """Rope of these parameters, and the longest sequence."""
        rope, max_position = self._scaled_rope(given, max_position)
        partial = self._reader(given).number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        if rope.kind == "proportional":
            if partial > 1:
                self.faults.append(f"partial_rotary_factor is {partial}, must be at most 1")
            rope = dataclasses.replace(rope, num_turning=int(partial * self.head_dim // 2))
        elif partial != 1.0:
            head_dim = self.head_dim
            rotary_dim = int(head_dim * partial)
            if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
                self.faults.append(
                    f"partial_rotary_factor is {partial}, must rotate an even number of the {head_dim} values of a head"
                )
            rope = dataclasses.replace(rope, rotary_dim=rotary_dim)
        return self._with_sections(given, dataclasses.replace(rope, interleaved=interleaved)), max_position

    def _with_sections(self, given: Mapping[str, Any], rope: Rope) -> Rope:
        """The rope with the sections of these parameters, if they have some."""
        sections = given.get("mrope_section")
        if sections is None:
            return rope
        half = (rope.rotary_dim or self.head_dim) // 2
        if not isinstance(sections, list) or len(sections) != 3 or not all(type(n) is int and n >= 0 for n in sections):
            self.faults.append(f"mrope_section is {sections!r}, must be 3 integers, none negative")
        elif sum(sections) != half:
            self.faults.append(f"mrope_section is {sections!r}, must sum to {half}, the frequencies of a head")
        elif rope.kind == "dynamic":
            self.faults.append("rope_type is 'dynamic' with mrope_section, supported with it: all others")
        else:
            is_interleaved = self._reader(given).boolean("mrope_interleaved")
            rope = dataclasses.replace(rope, sections=tuple(sections), sections_interleaved=is_interleaved)
        return rope

    def _scaled_rope(self, given: Mapping[str, Any], max_position: int) -> tuple[Rope, int]:
        kind: Any = given.get("rope_type", given.get("type", "default"))
        kind = "default" if kind == "mrope" else kind  # an older name of a plain rope with mrope_section
        if kind not in get_args(RopeKind):
            self.faults.append(f"rope_type is {kind!r}, supported: {', '.join(get_args(RopeKind))}")
            return Rope(), max_position
        if nested := [key for key, value in given.items() if isinstance(value, dict)]:
            self.faults.append(f"rope_parameters differ by layer ({', '.join(nested)}), supported: one set for all layers")
        scaling = self._reader(given)
        theta = scaling.number("rope_theta", self.number("rope_theta", 10000.0))
        if kind == "default":
            return Rope(theta=theta), max_position
        if kind == "proportional":
            return Rope(theta=theta, kind=kind, factor=scaling.number("factor", 1.0)), max_position
        if kind == "longrope":
            return self._longrope(scaling, theta, max_position)
        original = max_position
        if kind in ("yarn", "llama3"):
            original = scaling.integer(
                "original_max_position_embeddings", self.raw.get("original_max_position_embeddings") or max_position
            )
        factor = scaling.number("factor", max_position / original if kind == "yarn" else None)
        rope = Rope(theta=theta, kind=kind, factor=factor, original_max_position=original)
        if kind == "llama3":
            low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
            if high < low:
                self.faults.append(f"low_freq_factor is {low}, must not be above high_freq_factor, which is {high}")
            return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high), max_position
        if kind == "yarn":
            rope = dataclasses.replace(
                rope,
                beta_fast=scaling.number("beta_fast", 32.0),
                beta_slow=scaling.number("beta_slow", 1.0),
                truncate=scaling.boolean("truncate", True),
                attention_factor=scaling.number("attention_factor", _yarn_attention_factor(given, factor)),
            )
        # max_position_embeddings is the context before scaling, except that some yarn models give the one after it.
        return rope, max(max_position, int(original * factor))

    def _longrope(self, scaling: "ConfigReader", theta: float, max_position: int) -> tuple[Rope, int]:
        """Source: arXiv:2402.13753. Which of the two sets of divisors applies is decided once, by the longest sequence served."""
        original = self.integer(
            "original_max_position_embeddings", scaling.integer("original_max_position_embeddings", max_position)
        )
        factor = max_position / original
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        is_long = min(self.max_model_len or max_position, max_position) > original
        divisors = scaling.raw.get("long_factor" if is_long else "short_factor")
        if not isinstance(divisors, list) or not all(isinstance(x, (int, float)) and x > 0 for x in divisors):
            self.faults.append("rope_scaling of type longrope needs lists of positive numbers long_factor and short_factor")
            divisors = []
        rope = Rope(theta, "longrope", original_max_position=original, divisors=tuple(map(float, divisors)))
        return dataclasses.replace(rope, attention_factor=scaling.number("attention_factor", default)), max_position


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """Yarn's factor of queries and keys. Sources: arXiv:2309.00071, section 3.4; the scale is DeepSeek's."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Factor of cosine and sine."""
    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if isinstance(mscale, (int, float)) and isinstance(mscale_all_dim, (int, float)) and mscale and mscale_all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all_dim)
    return yarn_magnitude(factor)
