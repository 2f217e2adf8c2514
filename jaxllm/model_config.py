"""The architecture of a model, read from a Hugging Face config.json: plain numbers, no arrays."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from jaxllm.errors import ConfigError, ModelLoadError
from jaxllm.pooling_config import PoolingConfig, bidirectional_faults, is_embedding_checkpoint, load_pooling_config
from jaxllm.quantization_config import StoredFp8, read_quantization

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
DTYPES = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding. Which fields count depends on `kind`; the names are Hugging Face's."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    """Context of the pretraining; set for every kind but default and linear."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """What yarn multiplies cosine and sine with."""


@dataclass(frozen=True)
class ModelConfig:
    """What a model file needs to build itself. Letters: V D N K H F L, see docs/ARCHITECTURE.md."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Counts copies: see kv_head_replicas."""
    head_dim: int
    intermediate_size: int
    max_position: int
    """Most tokens of a sequence, rope scaling counted in."""
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias of q, k and v."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_window_layers: tuple[bool, ...] | None = None
    """Per layer whether the window applies; None: in every layer if sliding_window is set."""
    dtype: str = "bfloat16"
    """Concrete: bfloat16, float16 or float32."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    kv_head_replicas: int = 1
    """How many devices hold a copy of the same KV head; the copies count as heads."""
    padded_vocab_size: int = 0
    """Rows of the embedding and columns of the logits; 0 at construction means vocab_size."""
    quantization: str | None = None
    """fp8: the products with the weights of the decoder blocks are computed in fp8."""
    stored_fp8: StoredFp8 | None = None
    """How the checkpoint holds fp8 weights, if it does."""
    kv_cache_dtype: str = ""
    """Concrete: one of DTYPES or float8_e4m3fn; empty at construction means dtype."""
    generates: bool = True
    """Whether it has a head, and text is generated; else it makes vectors only."""
    pooling: PoolingConfig = field(default_factory=PoolingConfig)

    def __post_init__(self) -> None:
        if not self.padded_vocab_size:
            object.__setattr__(self, "padded_vocab_size", self.vocab_size)
        if not self.kv_cache_dtype:
            object.__setattr__(self, "kv_cache_dtype", self.dtype)

    def is_quantized(self, layer: int, part: str) -> bool:
        """Whether a linear layer of a decoder block (a key of LINEAR_MODULES) is computed in fp8."""
        if self.quantization is None:
            return False
        return self.stored_fp8 is None or all(self.stored_fp8.modules(layer, part).values())

    @property
    def has_kv_scales(self) -> bool:
        """Whether the checkpoint has scales for an fp8 cache, which keys and values are divided by."""
        return self.stored_fp8 is not None and self.stored_fp8.kv_cache

    @property
    def group_size(self) -> int:
        """Query heads per KV head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What attention scores are multiplied with."""
        return self.head_dim**-0.5

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, in tokens counting the token itself; None for full attention."""
        if self.sliding_window is None:
            return None
        if self.sliding_window_layers is not None and not self.sliding_window_layers[layer]:
            return None
        return self.sliding_window

    def as_stored(self) -> "ModelConfig":
        """This config before `for_tensor_parallel`: the shapes of the checkpoint."""
        return dataclasses.replace(
            self, num_kv_heads=self.num_kv_heads // self.kv_head_replicas, kv_head_replicas=1, padded_vocab_size=self.vocab_size
        )

    def for_tensor_parallel(self, size: int) -> "ModelConfig":
        """The shapes when each layer is split over `size` devices: KV heads copied where there are too few, vocabulary padded.

        Raises ConfigError with every number that `size` does not divide.
        """
        stored = self.as_stored()
        if size == 1:
            return stored
        faults = []
        if stored.num_heads % size:
            faults.append(f"{stored.num_heads} query heads")
        if stored.num_kv_heads % size and size % stored.num_kv_heads:
            faults.append(f"{stored.num_kv_heads} KV heads")
        if stored.intermediate_size % size:
            faults.append(f"an intermediate size of {stored.intermediate_size}")
        if faults:
            fits = [str(n) for n in range(1, stored.num_heads + 1) if stored._splits_over(n)]
            raise ConfigError(
                f"tensor_parallel_size is {size}, which does not divide {' and '.join(faults)}; "
                f"this model takes {', '.join(fits)}"
            )
        replicas = max(1, size // stored.num_kv_heads)
        # Eight columns a device keep each shard of the logits on tensor-core alignment; most vocabularies need no padding then.
        multiple = 8 * size
        return dataclasses.replace(
            stored,
            num_kv_heads=stored.num_kv_heads * replicas,
            kv_head_replicas=replicas,
            padded_vocab_size=math.ceil(stored.vocab_size / multiple) * multiple,
        )

    def _splits_over(self, size: int) -> bool:
        kv_heads_fit = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        return self.num_heads % size == 0 and kv_heads_fit and self.intermediate_size % size == 0


def num_parameters(config: ModelConfig) -> int:
    """Values in the checkpoint: copies of KV heads and padding not counted, a tied head counted once."""
    c = config.as_stored()
    q_and_kv = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    heads = c.num_heads * c.head_dim
    attention = c.hidden_size * (q_and_kv + heads) + c.attention_bias * q_and_kv + c.attention_out_bias * c.hidden_size
    attention += 2 * c.head_dim * c.qk_norm
    mlp = 3 * c.hidden_size * c.intermediate_size + c.mlp_bias * (2 * c.intermediate_size + c.hidden_size)
    layers = c.num_layers * (attention + mlp + 2 * c.hidden_size)
    has_head = c.generates and not c.tie_word_embeddings
    return layers + c.vocab_size * c.hidden_size * (2 if has_head else 1) + c.hidden_size


# --- reading config.json ---


def load_model_config(
    directory: Path | str,
    *,
    overrides: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    on_gpu: bool = False,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    runner: str = "auto",
    pooler_config: Mapping[str, Any] | None = None,
) -> ModelConfig:
    """Read config.json (and the EOS ids of generation_config.json) of a model directory.

    `overrides` is laid over the top level of config.json. dtype "auto" is the checkpoint's on a GPU and float32 on a CPU, where
    narrower types are emulated. quantization "fp8" computes in fp8 whatever the checkpoint holds; None: as the checkpoint says.
    kv_cache_dtype "auto" is fp8 if the checkpoint says so, else dtype.
    runner: what the model is for; "auto" is pooling for a checkpoint without a head or with sentence-transformers' files, else
    generate. pooler_config is laid over how the checkpoint wants to be pooled.
    Raises ModelLoadError naming the file and everything in it that cannot be served.
    """
    directory = Path(directory)
    raw = read_config_json(directory)
    raw = {**raw, **(overrides or {})}
    architecture, has_head = _architecture(raw, directory)
    generates = runner == "generate" or (runner == "auto" and has_head and not is_embedding_checkpoint(directory))
    if generates and not has_head:
        raise ConfigError(f"runner is generate, but {directory} is a model without a head, which makes embeddings only")
    reader = _Reader(raw, bidirectional_faults(raw))
    config = _read(reader, architecture, _dtype(reader, dtype, on_gpu), _eos_token_ids(raw, directory))
    if reader.faults or config is None:
        raise ModelLoadError(f"{directory / 'config.json'}: {'; '.join(reader.faults)}")
    stored = config.stored_fp8
    if quantization is None and stored is not None and stored.block_shape is None:
        quantization = "fp8"
    if kv_cache_dtype == "auto":
        kv_cache_dtype = FP8 if stored is not None and stored.kv_cache else config.dtype
    elif kv_cache_dtype in ("fp8", "fp8_e4m3"):
        kv_cache_dtype = FP8
    pooling = load_pooling_config(directory, raw, pooler_config)
    return dataclasses.replace(
        config,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        generates=generates,
        pooling=pooling,
        max_position=config.max_position if generates else min(config.max_position, pooling.max_length or config.max_position),
    )


def read_config_json(directory: Path) -> dict[str, Any]:
    """The JSON object in config.json. Raises ModelLoadError if the directory or file is missing or not JSON."""
    if not directory.is_dir():
        raise ModelLoadError(f"{directory} is not a directory; give a model directory, a hub id, or 'demo'")
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{directory} is not a model directory: it has no config.json; give the directory that holds config.json and the weights"
        )
    return _json_object(path)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, must hold an object")
    return value


def _architecture(raw: dict[str, Any], directory: Path) -> tuple[str, bool]:
    """The name of the family, and whether the model has a head: `Qwen3Model` is `Qwen3ForCausalLM` without one."""
    by_model_type = {family.model_type: name for name, family in FAMILIES.items()}
    model_type = str(raw.get("model_type", ""))
    names = raw.get("architectures") or [by_model_type.get(model_type, model_type)]
    name = names[0] if isinstance(names, list) and isinstance(names[0], str) else ""
    if name in FAMILIES:
        return name, True
    if name.endswith("Model") and (family := f"{name.removesuffix('Model')}ForCausalLM") in FAMILIES:
        return family, False
    known = ", ".join(sorted(FAMILIES))
    if not name:
        raise ModelLoadError(f"{directory / 'config.json'} names no architecture; known: {known}")
    # No "did you mean": Mixtral is a letter away from Mistral, and another model.
    raise ModelLoadError(f"{directory} has the unknown architecture {name}; known: {known}")


class _Reader:
    """Takes checked values out of a config.json and collects what is wrong with it."""

    def __init__(self, raw: Mapping[str, Any], faults: list[str] | None = None):
        self.raw = raw
        self.faults = faults if faults is not None else []

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; without a default it is required."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.faults.append(f"{name} is {'missing' if value is None else repr(value)}, must be a positive integer")
            return 1
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number; without a default it is required."""
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            self.faults.append(f"{name} is {'missing' if value is None else repr(value)}, must be a positive number")
            return 1.0
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.faults.append(f"{name} is {value!r}, must be true or false")
        return bool(value)


def _read(reader: _Reader, architecture: str, dtype: str, eos_token_ids: tuple[int, ...]) -> ModelConfig | None:
    raw, family = reader.raw, FAMILIES[architecture]
    hidden_size, num_layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = num_heads
    if raw.get("num_key_value_heads") is not None or "num_key_value_heads" not in raw:
        num_kv_heads = reader.integer("num_key_value_heads", family.num_kv_heads or num_heads)
    head_dim = reader.integer("head_dim", family.head_dim or max(1, hidden_size // num_heads))
    max_position = reader.integer("max_position_embeddings", family.max_position)
    rope, max_position = _rope(raw, reader.faults, max_position)
    bos = raw.get("bos_token_id")
    if num_heads % num_kv_heads:
        reader.faults.append(f"num_key_value_heads is {num_kv_heads}, must divide num_attention_heads, which is {num_heads}")
    if head_dim % 2:
        reader.faults.append(f"head_dim is {head_dim}, must be even")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        reader.faults.append(f"hidden_act is {raw['hidden_act']!r}, supported: silu")
    stored_fp8 = read_quantization(raw.get("quantization_config"), reader.faults)
    if stored_fp8 is not None:
        reader.faults.extend(stored_fp8.faults(num_layers))
    particulars = family.read(reader, num_layers)
    values = dict(
        architecture=architecture,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size"),
        max_position=max_position,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos if isinstance(bos, int) else None,
        stored_fp8=stored_fp8,
        **particulars,
    )
    return None if reader.faults else ModelConfig(**values)


def _rope(raw: Mapping[str, Any], faults: list[str], max_position: int) -> tuple[RopeConfig, int]:
    """Rope config and longest sequence. transformers 5 writes rope_parameters, before it were rope_theta and rope_scaling."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        faults.append(f"rope_scaling is {given!r}, must be an object")
        return RopeConfig(), max_position
    kind: Any = given.get("rope_type", given.get("type", "default"))
    if kind not in get_args(RopeKind):
        faults.append(f"rope_type is {kind!r}, supported: {', '.join(get_args(RopeKind))}")
        return RopeConfig(), max_position
    if nested := [key for key, value in given.items() if isinstance(value, dict)]:
        faults.append(f"rope_parameters differ by layer ({', '.join(nested)}), supported: one set for all layers")
    partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        faults.append(f"partial_rotary_factor is {partial!r}, supported: 1")
    reader = _Reader(given, faults)
    theta = reader.number("rope_theta", _Reader(raw, faults).number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta), max_position
    original = max_position
    if kind in ("yarn", "llama3"):
        original = reader.integer(
            "original_max_position_embeddings", raw.get("original_max_position_embeddings") or max_position
        )
    factor = reader.number("factor", max_position / original if kind == "yarn" else None)
    rope = RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=original)
    if kind == "llama3":
        low, high = reader.number("low_freq_factor"), reader.number("high_freq_factor")
        if high <= low:
            faults.append(f"low_freq_factor is {low}, must be below high_freq_factor, which is {high}")
        return dataclasses.replace(rope, low_freq_factor=low, high_freq_factor=high), max_position
    if kind == "yarn":
        rope = dataclasses.replace(
            rope,
            beta_fast=reader.number("beta_fast", 32.0),
            beta_slow=reader.number("beta_slow", 1.0),
            truncate=reader.boolean("truncate", True),
            attention_factor=reader.number("attention_factor", _yarn_attention_factor(given, factor)),
        )
    # max_position_embeddings is the context before scaling, except that some yarn models give the one after it.
    return rope, max(max_position, int(original * factor))


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Source: Peng et al. 2023, arXiv:2309.00071, section 3.4; the ratio of two is DeepSeek's variant."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = given.get("mscale"), given.get("mscale_all_dim")
    if isinstance(mscale, (int, float)) and isinstance(mscale_all_dim, (int, float)) and mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _dtype(reader: _Reader, asked: str, on_gpu: bool) -> str:
    if asked != "auto":
        if asked not in DTYPES:
            raise ConfigError(f"dtype is {asked!r}, must be one of auto, {', '.join(DTYPES)}")
        return asked
    if not on_gpu:
        return "float32"
    stored = str(reader.raw.get("dtype") or reader.raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if stored not in DTYPES:
        reader.faults.append(f"dtype is {stored!r}, supported: {', '.join(DTYPES)} (choose one with --dtype)")
    return stored


def _eos_token_ids(raw: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """EOS ids of config.json and generation_config.json together, each an integer, a list or absent."""
    path = directory / "generation_config.json"
    generation = _json_object(path) if path.is_file() else {}
    found: list[int] = []
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        found += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    return tuple(dict.fromkeys(found))


# --- what is particular to a family's config.json ---


@dataclass(frozen=True)
class Family:
    """How an architecture's config.json differs. The numbers are what transformers takes for an absent key; None: derived."""

    model_type: str
    read: Callable[[_Reader, int], dict[str, Any]]
    """(reader, number of layers) -> further fields of ModelConfig."""
    max_position: int
    num_kv_heads: int | None = None
    head_dim: int | None = None


def _llama(reader: _Reader, num_layers: int) -> dict[str, Any]:
    bias = reader.boolean("attention_bias")
    return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": reader.boolean("mlp_bias")}


def _mistral(reader: _Reader, num_layers: int) -> dict[str, Any]:
    window = reader.raw.get("sliding_window", 4096)
    return {"sliding_window": None if window is None else reader.integer("sliding_window", 4096)}


def _qwen2(reader: _Reader, num_layers: int) -> dict[str, Any]:
    return {"attention_bias": True, **_qwen_window(reader, num_layers)}


def _qwen3(reader: _Reader, num_layers: int) -> dict[str, Any]:
    bias = reader.boolean("attention_bias")
    return {"qk_norm": True, "attention_bias": bias, "attention_out_bias": bias, **_qwen_window(reader, num_layers)}


def _qwen_window(reader: _Reader, num_layers: int) -> dict[str, Any]:
    """A window applies only with use_sliding_window, in the layers that layer_types names or from max_window_layers on."""
    if not reader.boolean("use_sliding_window") or ("sliding_window" in reader.raw and reader.raw["sliding_window"] is None):
        return {}
    first, kinds = reader.raw.get("max_window_layers", 28), reader.raw.get("layer_types")
    if not isinstance(first, int):
        reader.faults.append(f"max_window_layers is {first!r}, must be an integer")
        return {}
    if kinds is None:
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(kind in known for kind in kinds):
        reader.faults.append(f"layer_types is {kinds!r}, must be {num_layers} of {' or '.join(known)}")
        return {}
    return {
        "sliding_window": reader.integer("sliding_window", 4096),
        "sliding_window_layers": tuple(kind == "sliding_attention" for kind in kinds),
    }


FAMILIES = {
    "LlamaForCausalLM": Family("llama", _llama, max_position=2048),
    "MistralForCausalLM": Family("mistral", _mistral, max_position=131072, num_kv_heads=8),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, max_position=32768, num_kv_heads=32),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, max_position=32768, num_kv_heads=32, head_dim=128),
}
