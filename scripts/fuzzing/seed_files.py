"""Small valid files of each format, in parts that mutations can change one by one."""

import base64
import functools
import io
import json
import struct
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 2,
    "ffn_dim": 32,
    "no_rope_layer_interval": 4,
    "shared_expert_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "attention_multiplier": 1.0,
    "scale_factor": 1,
    "d_model": 16,
    **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")},
}
"""Keys of all families."""
SEEING: dict[str, Any] = {
    "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "fullatt_block_indexes": [1],
    },
}
"""Config values of Qwen models that see images."""

OTHER: dict[str, dict[str, Any]] = {
    "Gemma4ForCausalLM": {"vocab_size_per_layer_input": 64},
    "Gemma4ForConditionalGeneration": {"vocab_size_per_layer_input": 64},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": 32},
    "KimiLinearForCausalLM": {"linear_attn_config": {"kda_layers": [1, 2, 3], "num_heads": 2, "head_dim": 8}},
    "MiMoV2FlashForCausalLM": {"v_head_dim": 8},
    "MiMoV2ForCausalLM": {"v_head_dim": 8},
    "MistralLarge3ForCausalLM": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "routed_scaling_factor": 1.0,
        "n_shared_experts": 1,
        "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1},
    },
    "NemotronHForCausalLM": {"hybrid_override_pattern": "ME*-"},
    "NemotronH_Nano_Omni_Reasoning_V3": {"llm_config": {**CONFIG, "hybrid_override_pattern": "ME*-"}},
}
"""Values of single families."""


def config(architecture: str) -> dict[str, Any]:
    """The config.json of a tiny model."""
    return {
        **CONFIG,
        "architectures": [architecture],
        **OTHER.get(architecture, {}),
        **({"num_experts_per_tok": 1} if architecture.startswith("Llama4") else {}),
        **(SEEING if "VL" in architecture else {}),
        **({"vision_config": {"image_size": 64, "patch_size": 16}} if architecture.startswith(("Idefics3", "SmolVLM")) else {}),
    }


MISTRAL: dict[str, Any] = {
    "dim": 16,
    "n_layers": 2,
    "hidden_dim": 32,
    "n_heads": 2,
    "vocab_size": 64,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    **{
        name: OTHER["MistralLarge3ForCausalLM"][name]
        for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
    },
    "qk_rope_head_dim": 4,
    "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1},
    "yarn": {"original_max_position_embeddings": 16, "factor": 4, "apply_scale": False, "beta": 32, "alpha": 1},
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "expert_hidden_dim": 16, "num_shared_experts": 1, "route_every_n": 1},
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
}
"""params.json of a tiny model."""
TEKKEN: dict[str, Any] = {
    "config": {"pattern": r"\p{L}+|\s+|[^\p{L}\s]+", "default_vocab_size": 262, "default_num_special_tokens": 4},
    "vocab": [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), b"ab", b"abc"])
    ],
    "special_tokens": [{"rank": 1, "token_str": "<s>"}, {"rank": 2, "token_str": "</s>"}],
}
"""tekken.json."""

ADDITIONS: tuple[dict[str, Any], ...] = (
    {},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    },
    {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4, "attention_factor": 1.1}},
    {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
    {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16},
    {"text_config": CONFIG},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}},
    {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["lm_head", "re:.*gate"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                }
            },
        }
    },
    {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["re:.*mlp.*"],
                    "format": "nvfp4-pack-quantized",
                    "weights": {
                        "num_bits": 4,
                        "type": "float",
                        "strategy": "tensor_group",
                        "group_size": 16,
                        "symmetric": True,
                    },
                },
                "group_1": {
                    "targets": ["Linear"],
                    "format": "float-quantized",
                    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 8]},
                },
            },
        }
    },
    {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": 16,
            "ignore": ["lm_head", "*.mlp.gate"],
        }
    },
    {
        "quantization_config": {
            "quant_method": "modelopt",
            "quantization": {
                "quant_algo": "MIXED_PRECISION",
                "kv_cache_quant_algo": "FP8",
                "quantized_layers": {
                    "model.layers.0.self_attn": {"quant_algo": "FP8"},
                    "model.layers.0.mlp.up_proj": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                },
            },
        }
    },
    {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}},
    {"matryoshka_dimensions": [4, 8], "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
)
"""Further keys that a config.json may have."""
GENERATION_CONFIG = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "max_new_tokens": 100,
    "eos_token_id": [2, 3],
    "do_sample": True,
}
POOLING: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 16, "pooling_mode_lasttoken": True, "include_prompt": True},
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "Represent this: "}},
}
"""The files of a checkpoint of sentence-transformers other than its config.json."""
TENSORS = {
    "model.norm.weight": ("F32", (8,)),
    "model.layers.0.self_attn.q_proj.weight": ("F16", (8, 4)),
    "model.layers.0.mlp.experts.gate_up_proj": ("BF16", (2, 4, 8)),
    "inverse": ("I64", (3,)),
    "scalar": ("F32", ()),
}
ADAPTER_SHAPES = {"A": (2, 8), "B": (8, 2)}
_ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
ADAPTER_TENSORS = {_ADAPTER.format(side): ("F32", shape) for side, shape in ADAPTER_SHAPES.items()}
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "demo",
    "r": 2,
    "lora_alpha": 4,
    "use_rslora": False,
    "rank_pattern": {"k_proj": 4},
    "alpha_pattern": {"k_proj": 8.0},
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "init_lora_weights": True,
    "bias": "none",
}
INDEX = {"metadata": {"total_size": 400}, "weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m['content'] | trim }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
TOKENIZER_CONFIG = {
    "added_tokens_decoder": {
        "0": {"content": "<unk>", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False},
        "40": {
            "content": "<extra>",
            "special": False,
            "lstrip": False,
            "rstrip": True,
            "normalized": True,
            "single_word": False,
        },
    },
    "bos_token": {"content": "<s>", "special": True},
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "chat_template": TEMPLATE,
    "model_max_length": 1000000000000000019884624838656,
}
SPECIAL_TOKENS = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "additional_special_tokens": ["<extra>"]}
_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}
_STORAGES = {"F32": b"Float", "F16": b"Half", "BF16": b"BFloat16", "I64": b"Long"}


def num_bytes(dtype: str, shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * _SIZES[dtype]


def safetensors_header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, Any], bytes]:
    """The header, and the data that follow it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return header, bytes(at)


def safetensors_file(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """length: what the file says of its header; None: the truth."""
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + data


def pickle_opcodes(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> list[bytes]:
    """The opcodes of a pickle as torch.save writes it, of views of one storage each."""

    def text(value: bytes) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value

    def number(value: int) -> bytes:
        return b"K" + bytes([value])

    def numbers(values: Sequence[int]) -> list[bytes]:
        return [b"(", *map(number, values), b"t"]

    opcodes = [b"\x80\x02", b"}", b"q\x00", b"("]
    for key, (name, (dtype, shape)) in enumerate(tensors.items()):
        strides = [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]
        storage = b"ctorch\n" + _STORAGES[dtype] + b"Storage\n"
        count = number(num_bytes(dtype, shape) // _SIZES[dtype])
        opcodes += [text(name.encode()), b"ctorch._utils\n_rebuild_tensor_v2\n", b"("]
        opcodes += [b"(", text(b"storage"), storage, text(b"%d" % key), text(b"cpu"), count, b"t", b"Q"]
        opcodes += [number(0), *numbers(shape), *numbers(strides), b"\x89"]
        opcodes += [b"ccollections\nOrderedDict\n", b")", b"R", b"t", b"q" + bytes([key + 1]), b"R"]
    return [*opcodes, b"u", b"."]


def storages(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, bytes]:
    """The members of the archive other than the pickle, by name."""
    found = {f"model/data/{key}": bytes(num_bytes(*tensor)) for key, tensor in enumerate(tensors.values())}
    return {"model/byteorder": b"little", **found}


def archive(members: Sequence[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive, in which names may repeat."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as file:
        for name, data in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            file.writestr(info, data)
    return written.getvalue()


@dataclass(frozen=True)
class Value:
    """A value of a GGUF file's metadata, with what the file says of it."""

    name: bytes
    code: int
    content: Any
    """A number, bytes, or a list of one of these."""
    element: int | None = None
    """The code of an array's elements."""
    count: int | None = None
    """The array's length in the file; None: the true one."""
    length: int | None = None
    """Length of its name in the file."""

    def encoded(self) -> bytes:
        return _text(self.name, self.length) + struct.pack("<I", self.code % 2**32) + self._content()

    def _content(self) -> bytes:
        if not isinstance(self.content, list):
            return _plain(self.code, self.content)
        element = 4 if self.element is None else self.element
        count = len(self.content) if self.count is None else self.count
        return struct.pack("<IQ", element % 2**32, count % 2**64) + b"".join(_plain(element, each) for each in self.content)


@dataclass(frozen=True)
class Tensor:
    """Header of a tensor in a GGUF file."""

    name: bytes
    shape: tuple[int, ...]
    code: int
    offset: int
    num_dimensions: int | None = None

    def encoded(self) -> bytes:
        count = len(self.shape) if self.num_dimensions is None else self.num_dimensions
        shape = b"".join(struct.pack("<Q", size % 2**64) for size in self.shape)
        return (
            _text(self.name)
            + struct.pack("<I", count % 2**32)
            + shape
            + struct.pack("<IQ", self.code % 2**32, self.offset % 2**64)
        )


def _text(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", (len(text) if length is None else length) % 2**64) + text


_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


def _plain(code: int, content: Any) -> bytes:
    if code not in _FORMATS:
        return content if isinstance(content, bytes) and code == 9 else _text(content if isinstance(content, bytes) else b"a")
    try:
        return struct.pack(_FORMATS[code], content)
    except (struct.error, OverflowError):
        return bytes(struct.calcsize(_FORMATS[code]))


@dataclass(frozen=True)
class Gguf:
    """A GGUF file in its parts."""

    values: tuple[Value, ...]
    tensors: tuple[Tensor, ...]
    version: int = 3
    num_tensors: int | None = None
    num_values: int | None = None
    num_data_bytes: int = 1024

    def encoded(self) -> bytes:
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.values) if self.num_values is None else self.num_values,
        )
        head = b"GGUF" + struct.pack("<IQQ", self.version % 2**32, *(count % 2**64 for count in counts))
        head += b"".join(part.encoded() for part in (*self.values, *self.tensors))
        return head + bytes(-len(head) % 32) + b"\0\0\x80\x3f" * (self.num_data_bytes // 4)


_LETTERS = "abcdefghijklmnopqrstuvwxyzHello0123456789Ġ"
"""Each a token of the vocabularies here."""


@functools.cache
def gguf_files() -> tuple[Gguf, ...]:
    """A model for each kind of tokenizer."""
    words = [f"t{i}".encode() for i in range(8)]
    plain = [letter.encode() for letter in dict.fromkeys(_LETTERS)]
    pairs = [b"ab", b"abc", b"t0"]
    sentences = [b"<unk>", b"<s>", b"</s>", b"\xe2\x96\x81", *plain, *pairs, *words, b"<|im_end|>"]
    scores = [float(-i) for i in range(len(sentences))]
    bert = [b"[PAD]", b"[UNK]", b"[CLS]", b"[SEP]", b"\xe2\x96\x81hello", b"wor", b"ld"]

    def of(kind: str, tokens: list[bytes], *more: Value, family: str = "llama", types: int = 1) -> Gguf:
        key, keys = family.encode(), b"tokenizer.ggml."
        kinds = [3 if token.startswith((b"<", b"[")) else types for token in tokens]
        values = (
            Value(b"general.architecture", 8, key),
            Value(b"general.alignment", 4, 32),
            Value(b"general.file_type", 4, 0),
            Value(key + b".context_length", 4, 64),
            Value(key + b".block_count", 4, 1),
            Value(key + b".feed_forward_length", 4, 32),
            Value(key + b".embedding_length", 4, 16),
            Value(key + b".attention.head_count", 4, 2),
            Value(key + b".attention.head_count_kv", 4, 2),
            Value(key + b".attention.layer_norm_rms_epsilon", 6, 1e-5),
            Value(key + b".rope.freq_base", 6, 10000.0),
            Value(keys + b"model", 8, kind.encode()),
            Value(keys + b"tokens", 9, tokens, element=8),
            Value(keys + b"token_type", 9, kinds, element=5),
            Value(keys + b"bos_token_id", 4, 1),
            Value(keys + b"eos_token_id", 4, 2),
            Value(b"tokenizer.chat_template", 8, TEMPLATE.encode()),
            Value(b"general.sampling.temp", 6, 0.5),
            *more,
        )
        tensors = (
            Tensor(b"token_embd.weight", (8, len(tokens)), 1, 0),
            Tensor(b"output_norm.weight", (16,), 0, 0),
            Tensor(b"blk.0.attn_q.weight", (16, 4), 0, 64),
            Tensor(b"blk.0.ffn_up.weight", (32, 2), 8, 128),
            Tensor(b"blk.0.attn_k.bias", (16,), 0, 64),
            Tensor(b"rope_freqs.weight", (4,), 0, 512),
        )
        return Gguf(values, tensors)

    merges = Value(b"tokenizer.ggml.merges", 9, [b"a b", b"ab c"], element=8)
    given = Value(b"tokenizer.ggml.scores", 9, scores, element=6)
    return (
        of("llama", sentences, given),
        of("llama", sentences, given, family="gemma2", types=4),
        of("gpt2", sentences, merges, Value(b"tokenizer.ggml.pre", 8, b"qwen2"), family="qwen2"),
        of("gpt2", sentences, merges, Value(b"tokenizer.ggml.pre", 8, b"llama-bpe")),
        of("gemma4", sentences, merges, Value(b"tokenizer.ggml.add_bos_token", 7, 1), family="gemma3"),
        of("bert", bert, family="qwen3"),
        of(
            "t5",
            sentences,
            given,
            Value(b"tokenizer.ggml.unknown_token_id", 4, 0),
            Value(b"tokenizer.ggml.add_space_prefix", 7, 1),
        ),
        of("other", sentences, Value(b"tokenizer.huggingface.json", 8, json.dumps(tokenizers()[0]).encode())),
    )


@functools.cache
def tokenizers() -> tuple[dict[str, Any], ...]:
    """tokenizer.json of each kind of model, with the steps around it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    letters = {letter: id for id, letter in enumerate(dict.fromkeys(_LETTERS))}
    vocabulary = {"<unk>": 100, "<s>": 101, "</s>": 102, "▁": 103, **letters, "ab": 104, "abc": 105}
    merges = [("a", "b"), ("ab", "c")]
    byte_pairs = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    byte_pairs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{L}+|\s+(?!\S)|\s+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    byte_pairs.decoder = decoders.ByteLevel()
    sentences = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    sentences.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFC()])
    sentences.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    sentences.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B:1", [("<s>", 101)])
    unigram = Tokenizer(models.Unigram([(token, -float(id)) for token, id in sorted(vocabulary.items())], 0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "##wor": 2, "ld": 3}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.decoder = decoders.WordPiece()
    for each in (byte_pairs, sentences, unigram, words):
        each.add_special_tokens([AddedToken("<s>", special=True, normalized=False), "</s>"])
        each.add_tokens(["<extra>"])
    return tuple(json.loads(each.to_str()) for each in (byte_pairs, sentences, unigram, words))


def with_value(file: Gguf, at: int, **fields: Any) -> Gguf:
    """The file with fields of one of its values changed."""
    values = list(file.values)
    values[at] = replace(values[at], **fields)
    return replace(file, values=tuple(values))


def with_tensor(file: Gguf, at: int, **fields: Any) -> Gguf:
    """The file with fields of one of its tensors changed."""
    tensors = list(file.tensors)
    tensors[at] = replace(tensors[at], **fields)
    return replace(file, tensors=tuple(tensors))


@functools.cache
def images() -> dict[str, bytes]:
    """A small image in each format, some with an orientation, transparency or further frames."""
    from PIL import Image

    picture = Image.linear_gradient("L").resize((40, 30)).convert("RGB")
    clear = picture.copy()
    clear.putalpha(Image.radial_gradient("L").resize((40, 30)))
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = {"save_all": True, "append_images": [picture.rotate(90)]}
    found = {}
    for name, image, options in (
        ("image.png", clear, {"exif": exif}),
        ("palette.png", picture.quantize(16), {"transparency": 3}),
        ("image.jpg", picture, {"exif": exif}),
        ("progressive.jpg", picture.convert("CMYK"), {"progressive": True}),
        ("image.webp", clear, {}),
        ("lossless.webp", picture, {"lossless": True, **frames}),
        ("image.gif", picture, frames),
        ("image.bmp", picture, {}),
        ("image.tif", clear, {"exif": exif}),
        ("deflate.tif", picture, {"compression": "tiff_adobe_deflate"}),
        ("lzw.tif", picture.convert("1"), {"compression": "tiff_lzw"}),
    ):
        stream = io.BytesIO()
        image.save(stream, {"jpg": "JPEG", "tif": "TIFF"}.get(name[-3:], name.rpartition(".")[2].upper()), **options)
        found[name] = stream.getvalue()
    return found
