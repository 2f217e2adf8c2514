"""The description of a model that the engine works with: plain numbers, no arrays. A family makes it: see `jaxllm/models/`."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.log import warn_once
from jaxllm.model_parts import (
    Attention,
    Encoder,
    GatedDeltaNet,
    Head,
    LatentAttention,
    Layer,
    LightningAttention,
    Mamba2,
    MoE,
    Names,
    NextToken,
    Norm,
    Positions,
    StateMixer,
    TokenMixer,
)
from jaxllm.served_model import ServedModel
from jaxllm.weight_format import WeightFormat

DTYPES = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"
MAX_LAYERS = 4096
MAX_EXPERTS = 2**18
"""Most experts of all layers together: checkpoints have a few tensors for each."""
MAX_POSITION = 2**31 - 1
"""Positions are int32."""


@dataclass(frozen=True)
class ModelConfig(ServedModel):
    """A decoder, or an encoder: token embedding, layers, norm and head."""

    layers: tuple[Layer, ...]
    norm: Norm
    max_position: int
    """Most tokens of a sequence, rope scaling counted in."""
    names: Names = field(default_factory=Names)
    embedding_scale: float = 1.0
    embedding_norm: Norm | None = None
    """Norm of the embeddings, without a weight."""
    """Factor of the embeddings of tokens."""
    positions: Positions | None = None
    head: Head = field(default_factory=Head)
    encoder: Encoder | None = None
    """Set if each token sees all others of its prompt, and no keys and values are kept; None: tokens see those before them."""
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    """Concrete: bfloat16, float16 or float32."""
    bos_token_id: int | None = None
    padded_vocab_size: int = 0
    """Rows of the embedding and columns of the logits; 0 at construction means vocab_size."""
    formats: tuple[WeightFormat, ...] = ()
    """Formats of weights that the checkpoint does not hold, or products do not take, in the model's type."""
    kv_cache_dtype: str = ""
    """Concrete: one of DTYPES or float8_e4m3fn; empty at construction means dtype."""
    num_spare_layers: int = 0
    """Modules of further layers in the checkpoint that are not used here: they predict tokens after the next one."""
    next_token: NextToken = field(default_factory=NextToken)
    """The first of these modules."""
    chosen_max_position: int | None = None
    """`max_position` with layers that choose the tokens they attend to, or attend within chunks, of a config for shorter sequences, of
    which they see all."""
    has_tiles: bool = False
    """Whether weights are in tiles where their formats have them so: `in_tiles`."""
    model_class: str = "jaxllm.layers.decoder:CausalLM"
    """The Flax class that computes it, as module:name."""

    def __post_init__(self) -> None:
        if not self.padded_vocab_size:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
        if not self.kv_cache_dtype:
            object.__setattr__(self, "kv_cache_dtype", self.dtype)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def size_faults(self) -> list[str]:
        """Which sizes exceed what an engine can describe, whatever memory there is."""
        num_experts = sum(layer.mlp.routing.num_experts for layer in self.layers if isinstance(layer.mlp, MoE))
        sizes = {
            "the number of layers": (self.num_layers, MAX_LAYERS),
            "the number of experts of all layers": (num_experts, MAX_EXPERTS),
            "the length of a sequence, rope scaling counted in,": (self.max_position, MAX_POSITION),
        }
        return [f"{name} is {size}, must be at most {most}" for name, (size, most) in sizes.items() if size > most]

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The distinct attentions over keys and values in the cache, in the order of their first layers."""
        return () if self.encoder is not None else self.key_value_attentions

    @property
    def encoder_attentions(self) -> tuple[Attention, ...]:
        """The distinct attentions of an encoder over keys and values of the prompt, the same way."""
        return () if self.encoder is None else self.key_value_attentions

    @property
    def key_value_attentions(self) -> tuple[Attention, ...]:
        """The distinct attentions over keys and values of a decoder or an encoder, the same way."""
        return tuple(part for part in self._attentions if isinstance(part, Attention))

    @property
    def latent_attentions(self) -> tuple[LatentAttention, ...]:
        """The distinct attentions over latents, the same way."""
        return tuple(part for part in self._attentions if isinstance(part, LatentAttention))

    @property
    def delta_nets(self) -> tuple[GatedDeltaNet, ...]:
        """The distinct linear attentions, the same way."""
        return tuple(part for part in self._attentions if isinstance(part, GatedDeltaNet))

    @property
    def mambas(self) -> tuple[Mamba2 | LightningAttention, ...]:
        """The distinct parts with the recurrence of Mamba-2, the same way."""
        return tuple(part for part in self._attentions if isinstance(part, (Mamba2, LightningAttention)))

    @property
    def state_mixers(self) -> tuple[StateMixer, ...]:
        """The distinct parts that keep states by row, the same way."""
        return tuple(part for part in self._attentions if isinstance(part, StateMixer))

    @property
    def _attentions(self) -> tuple[TokenMixer, ...]:
        return tuple(dict.fromkeys(layer.attention for layer in self.layers if layer.attention is not None))

    @property
    def has_rope_sections(self) -> bool:
        """Whether tokens turn by their positions in time, row and column."""
        return any(part.rope is not None and part.rope.sections is not None for part in self.attentions)

    @property
    def attends_within_images(self) -> bool:
        """Whether the tokens of an image see each other. Steps with images then attend in two parts: to earlier keys and to later ones."""
        return self.vision is not None and self.vision.attends_within

    @property
    def attends_to_audio(self) -> bool:
        """Whether every prompt has a clip of audio, which the layers attend to."""
        return self.audio is not None and self.audio.tokens is None

    @property
    def mixtures(self) -> tuple[MoE, ...]:
        """The distinct mixtures of experts of the layers."""
        return tuple(dict.fromkeys(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)))

    @property
    def has_branches(self) -> bool:
        """Whether kernels of a layer do not depend on each other, one after the other: those of shared experts and of chosen ones, or those
        of linear attention."""
        return bool(self.delta_nets) or any(part.shared is not None for part in self.mixtures)

    @property
    def has_concurrent_branches(self) -> bool:
        """Whether such kernels may run concurrently on one GPU: of those for weights in 4 and 8 bits too few were checked."""
        return self.has_branches and not self.formats

    @property
    def kv_format(self) -> WeightFormat | None:
        """The format of the checkpoint's scales for an fp8 cache, which keys and values are divided by; None: it says nothing of one."""
        return next((found for format in self.formats if (found := format.kv_scales) is not None), None)

    @property
    def expert_type(self) -> str:
        """The type that a kernel computes products of experts from."""
        return next((found for format in self.formats if (found := format.expert_type) is not None), self.dtype)

    @property
    def has_packed_experts(self) -> bool:
        """Whether products of experts are computed from another type than the model's."""
        return self.expert_type != self.dtype

    @property
    def quantizes_inputs(self) -> bool:
        """Whether products of linear layers quantise what they multiply."""
        return any(format.quantizes_inputs for format in self.formats)

    @property
    def widens_in_products(self) -> bool:
        """Whether products may make their whole weight in the model's type first."""
        return any(format.widens_in_products for format in self.formats)

    def layer_name(self, layer: int) -> str:
        """The checkpoint's name of a layer."""
        return self.names.layer.format(layer)

    def linears(self) -> Iterator[tuple[str, ...]]:
        """The modules of the checkpoint that each linear layer of the decoder layers consists of."""
        for i, layer in enumerate(self.layers):
            for part in layer.parts.values():
                yield from (tuple(f"{self.layer_name(i)}.{name}" for name in names) for names in part.linears.values())

    def as_stored(self) -> "ModelConfig":
        """This config before `for_tensor_parallel`, and without copies of experts: the shapes of the checkpoint."""
        stored = {layer: layer.as_stored() for layer in set(self.layers)}
        return dataclasses.replace(self._split(1, self.vocab_size), layers=tuple(stored[layer] for layer in self.layers))

    def for_tensor_parallel(self, size: int) -> "ModelConfig":
        """The shapes when each layer is split over `size` devices: KV heads copied where there are too few, vocabulary padded.

        Raises ConfigError with every number that `size` does not divide.
        """
        if size == 1:
            return self._split(1, self.vocab_size)
        if faults := self._indivisible(size):
            most = max(attention.num_heads for attention in self._attentions)
            fits = [str(n) for n in range(1, most + 1) if not self._indivisible(n)]
            raise ConfigError(
                f"tensor_parallel_size is {size}, which does not divide {' and '.join(faults)}; "
                f"this model takes {', '.join(fits)}"
            )
        # Eight columns a device keep each shard of the logits on tensor-core alignment; most vocabularies need no padding then.
        multiple = 8 * size
        return self._split(size, math.ceil(self.vocab_size / multiple) * multiple)

    def in_tiles(self) -> "ModelConfig":
        """This config, split over devices, with weights in the order of kernels where these take their formats."""
        return dataclasses.replace(self, has_tiles=True, formats=tuple(format.in_tiles() for format in self.formats))

    def in_lanes(self) -> "ModelConfig":
        """This config with weights in the order in which a CPU computes with them, where it takes their formats."""
        return dataclasses.replace(self, formats=tuple(format.in_lanes() for format in self.formats))

    def without_kernels(self) -> "ModelConfig":
        """This config as it is by default on a GPU without kernels for its weights: see `WeightFormat.without_kernels`."""
        return dataclasses.replace(self, formats=tuple(format.without_kernels() for format in self.formats))

    def described(self) -> dict[str, Any]:
        """The fields as JSON values, without their digest and origin; runs of equal layers once, with their number."""
        values = dataclasses.asdict(dataclasses.replace(self, layers=(), formats=()))
        del values["digest"], values["gguf_type"], values["formats"]
        values["weight_formats"] = [{"kind": type(each).__name__, **dataclasses.asdict(each)} for each in self.formats]
        runs = [(layer, len(list(run))) for layer, run in itertools.groupby(self.layers)]
        return {**values, "layers": [{"count": count, **dataclasses.asdict(layer)} for layer, count in runs]}

    def _indivisible(self, size: int) -> list[str]:
        return list(dict.fromkeys(fault for layer in set(self.layers) for fault in layer.indivisible(size)))

    def _split(self, size: int, padded_vocab_size: int) -> "ModelConfig":
        split = {layer: layer.split(size) for layer in set(self.layers)}
        layers = tuple(split[layer] for layer in self.layers)
        formats = tuple(format.split(self, size) for format in self.formats)
        return dataclasses.replace(self, layers=layers, padded_vocab_size=padded_vocab_size, formats=formats, has_tiles=False)


def check_max_model_len(model: ModelConfig, max_model_len: int, *, may_be_long: bool) -> None:
    """Raise ConfigError for sequences longer than the model was made for, or warn if they may be and positions can be computed."""
    if max_model_len <= model.max_position:
        return
    message = (
        f"max_model_len is {max_model_len}, the model was made for {model.max_position} tokens (max_position_embeddings); "
        f"use --max-model-len {model.max_position} or less, or override its rope_scaling with --hf-overrides"
    )
    if model.positions is not None:
        raise ConfigError(
            f"{message.partition(';')[0]}, and learned a vector for each; use --max-model-len {model.max_position} or less"
        )
    if not may_be_long:
        raise ConfigError(f"{message}; --allow-long-max-model-len starts nevertheless")
    warn_once(f"{message}: answers may be nonsense from token {model.max_position} on")
