"""GGUF files against the same weights in safetensors. Names come from the package gguf, which llama.cpp's converter uses too."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.errors import ModelLoadError
from jaxllm.hub import resolve_model
from jaxllm.layers.build import build_model
from jaxllm.loaders import gguf as gguf_loader
from jaxllm.loaders import safetensors
from jaxllm.loaders.gguf import READABLE
from jaxllm.loaders.load import load_checkpoint, load_weights
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.mesh import make_mesh
from jaxllm.text.tokenizer import load_tokenizer
from scripts.saving import save_safetensors, write_safetensors
from tests.helpers import goldens, tiny_tokenizers
from tests.helpers.slow import slow_except

gguf = pytest.importorskip("gguf")

WIDE = {
    "vocab_size": 40,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 20000.0,
}
"""K-quants have blocks of 256 values."""
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
FACTORS = {"long_factor": [1.5] * 12, "short_factor": [1.0] * 12}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, **LINEAR},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "head_dim": 64},
    "gemma": {"architectures": ["GemmaForCausalLM"], "tie_word_embeddings": True},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "tie_word_embeddings": True,
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "sliding_window": 64,
        "query_pre_attn_scalar": 32,
        **LINEAR,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": 0.75,
        "sliding_window": 100,
        "original_max_position_embeddings": 256,
        "rope_scaling": {"rope_type": "longrope", **FACTORS},
    },
}
ASIDE = {"attention_bias", "tie_word_embeddings", "architectures", "vocab_size", "rope_scaling", "partial_rotary_factor"}
CALLED = {
    "max_position_embeddings": "context_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "rope_theta": "rope.freq_base",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "query_pre_attn_scalar": None,
}
TYPES = ("Q4_K", "F16", "Q5_K", "Q8_0", "Q6_K", "BF16", "Q4_0", "F32")


def quantized(values: np.ndarray, kind: str, seed: int) -> np.ndarray:
    """Bytes of about these values; of K-quants, which the package cannot make, of any small ones."""
    if kind not in ("Q4_K", "Q5_K", "Q6_K"):
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (*values.shape[:-1], values.shape[-1] // 256, size), np.uint8)
    scales = np.array([1e-4, 2e-4], np.float16).view(np.uint8)
    if kind == "Q6_K":
        blocks[..., -2:] = scales[:2]
    else:
        blocks[..., :4] = scales
    return blocks.reshape(*values.shape[:-1], -1)


def write(file, architecture, raw, tensors, types=("F32",), tokens=lambda writer: None, **options):
    """Write a file as llama.cpp's converter does. Returns the tensors as they read."""
    writer = gguf.GGUFWriter(file, architecture, **options)
    for name, value in raw.items():
        if name in ASIDE or value is None:
            continue
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        if (called := CALLED.get(name, name)) is not None:
            add(f"{architecture}.{called}", value)
    scaling = raw.get("rope_scaling") or {}
    if "factor" in scaling and "low_freq_factor" not in scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
        writer.add_rope_scaling_factor(scaling["factor"])
    for kind in ("long", "short"):
        if f"{kind}_factor" in scaling:
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(scaling[f"{kind}_factor"], np.float32))
    if "partial_rotary_factor" in raw:
        writer.add_rope_dimension_count(int(raw["head_dim"] * raw["partial_rotary_factor"]))
    tokens(writer)
    [arch] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(arch, raw["num_hidden_layers"])
    heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}
    read, kinds = {}, iter(types * 1000)
    for i, (name, values) in enumerate(tensors.items()):
        stored_as = names.get_name(name, (".weight", ".bias"))
        assert stored_as is not None, name
        values = values.astype(np.float32)
        offset = 1 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0
        count = heads.get(name.split(".")[-2]) if architecture == "llama" else None
        if values.ndim == 1:
            stored, kind, wide = values + offset, "F32", values + offset - offset
            if count:
                stored = stored.reshape(count, 2, -1).swapaxes(1, 2).ravel()
        else:
            kind = next(kinds)
            stored = quantized(values, kind, i)
            wide = gguf.quants.dequantize(stored.view(np.uint8), gguf.GGMLQuantizationType[kind]).reshape(values.shape)
            if count:
                stored = stored.reshape(count, 2, -1, stored.shape[-1]).swapaxes(1, 2).reshape(stored.shape)
        writer.add_tensor(stored_as, np.ascontiguousarray(stored), raw_dtype=gguf.GGMLQuantizationType[kind])
        read[name] = wide
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def tensors_of(directory):
    checkpoint = safetensors.Checkpoint(directory)
    return {name: np.asarray(checkpoint.tensor(name)) for name in checkpoint.entries}


def load(directory, size=1, **options):
    """Widened while loading."""
    config = load_model_config(directory, dequantize=True, **options).for_tensor_parallel(size)
    return config, load_checkpoint(config, build_model(config), directory, mesh=make_mesh(size))


def described(config):
    known = config.described()
    return {name: value for name, value in known.items() if name not in ("bos_token_id", "eos_token_ids")}


@pytest.mark.parametrize("architecture", slow_except(["llama", "gemma3"], MODELS))
@pytest.mark.slow
def test_families_and_number_formats(tmp_path, monkeypatch, architecture):
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    raw = {**WIDE, **MODELS[architecture]}
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(raw))
    config = load_model_config(plain)
    state = load_weights(config, build_model(config), plain, load_format="dummy", mesh=make_mesh())
    save_safetensors(config, state, plain, raw)
    read = write(
        tmp_path / "model.gguf",
        architecture,
        raw,
        tensors_of(plain),
        TYPES,
        **({"split_max_tensors": 8} if architecture == "qwen2" else {}),
    )
    write_safetensors(plain / "model.safetensors", read)
    parts = sorted(tmp_path.glob("model*.gguf"))
    assert len(parts) == (5 if architecture == "qwen2" else 1)
    directory = resolve_model(str(parts[0]))
    for size in (1, 2):
        (expected_config, expected), (config, state) = load(plain, size), load(directory, size)
        assert described(config) == described(expected_config)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    _, narrow = load(directory, dtype="bfloat16")
    for x, y in zip(jax.tree.leaves(narrow), jax.tree.leaves(load(plain, dtype="bfloat16")[1]), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of scales that are no numbers
@pytest.mark.parametrize("kind", READABLE)
def test_every_number_format_is_widened_as_by_the_package(tmp_path, monkeypatch, kind):
    """Parts of several threads, and heads whose values are put back in order."""
    monkeypatch.setattr("jaxllm.loaders.gguf._VALUES_AT_ONCE", 2048)
    number_format = gguf.GGMLQuantizationType[kind]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[number_format]
    rows, heads = 24, 2
    stored = np.random.default_rng(0).integers(0, 256, (rows, 256 // block_values * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_head_count(heads)
    for name in ("token_embd", "blk.0.attn_q"):
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=number_format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = gguf_loader.Checkpoint(tmp_path)
    expected = gguf.quants.dequantize(stored, number_format).reshape(rows, 256)
    found = checkpoint.tensor("model.embed_tokens.weight")
    of_heads = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(of_heads, expected.reshape(heads, -1, 2, 256).swapaxes(1, 2).reshape(rows, 256))


def byte_level(writer):
    """The tokenizer of the tiny checkpoints."""
    known = json.loads(tiny_tokenizers.ascii_json())
    ids = {**known["model"]["vocab"], **{token["content"]: token["id"] for token in known["added_tokens"]}}
    tokens = sorted(ids, key=ids.__getitem__)
    added = {token["content"]: 3 if token["special"] else 4 for token in known["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([added.get(token, 1) for token in tokens])
    merges = known["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(ids[tiny_tokenizers.BOS])
    writer.add_eos_token_id(ids[tiny_tokenizers.EOS])
    writer.add_chat_template(tiny_tokenizers.CHAT_TEMPLATE)


def test_a_file_is_a_model(tmp_path, monkeypatch):
    """With the frequencies of Llama 3.1 as factors, and with a tokenizer."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    golden = goldens.golden("llama_rope_llama3")
    raw = json.loads((golden.directory / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw |= {"rope_theta": scaling["rope_theta"]}
    raw = {name: value for name, value in raw.items() if name in CALLED or name in ASIDE}
    frequencies = 1 / scaling["rope_theta"] ** (np.arange(0, raw["head_dim"], 2) / raw["head_dim"])
    low, high = (scaling["original_max_position_embeddings"] / scaling[f"{kind}_freq_factor"] for kind in ("low", "high"))
    smooth = np.clip((low * frequencies / (2 * np.pi) - 1) / (low / high - 1), 0, 1)
    factors = 1 / ((1 - smooth) / scaling["factor"] + smooth)

    def extras(writer):
        byte_level(writer)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))

    file = tmp_path / "model.gguf"
    write(file, "llama", raw, tensors_of(golden.directory), tokens=extras)
    result = golden.results[0]
    llm = LLM(str(file), num_gpu_blocks_override=64, max_num_seqs=2, compilation_cache=False)
    params = SamplingParams(temperature=0, max_tokens=len(result.tokens), ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": result.prompt}], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == result.tokens
    assert llm.llm_engine.model_config.as_served().gguf_type == "Q4_K_M"
    tokenizer = llm.get_tokenizer()
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizers.ascii_json())
    expected = load_tokenizer(tmp_path)
    for text in ("null, true", '{"a": [1, 2]}\n', tiny_tokenizers.EOS + "x  y"):
        assert tokenizer.encode(text, add_special_tokens=False) == expected.encode(text, add_special_tokens=False)
    assert tokenizer.eos_token == tiny_tokenizers.EOS and tokenizer.chat_templates
    llm.llm_engine.shutdown()


def test_tokenizers_of_sentencepiece(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    known = json.loads(tiny_tokenizers.byte_fallback_json())
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    expected = load_tokenizer(tmp_path)
    vocabulary = known["model"]["vocab"]
    added = {token["content"]: 3 if token["special"] else 4 for token in known["added_tokens"]}
    ids = {**vocabulary, **{token["content"]: token["id"] for token in known["added_tokens"]}}
    tokens = sorted(ids, key=ids.__getitem__)

    def sentencepiece(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types([added.get(token, 1) for token in tokens])
        writer.add_bos_token_id(ids[tiny_tokenizers.BOS])
        writer.add_unk_token_id(ids["<unk>"])
        writer.add_add_bos_token(True)

    raw = {name: value for name, value in WIDE.items() if name in CALLED}
    write(tmp_path / "model.gguf", "llama", raw, {}, tokens=sentencepiece)
    tokenizer = load_tokenizer(resolve_model(str(tmp_path / "model.gguf")))
    for text in ("The quick brown fox", "sea shells, doesn't she?", "一 中 😀 é", "two  spaces", "<|user|>one<plain> two"):
        found = tokenizer.encode(text)
        assert found == expected.encode(text) and found[0] == ids[tiny_tokenizers.BOS]
        assert tokenizer.decode(found) == expected.decode(found)


def test_files_that_cannot_be_loaded_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    raw = {name: value for name, value in WIDE.items() if name in CALLED}

    def told(message):
        with pytest.raises(ModelLoadError, match=message) as caught:
            resolve_model(str(file))
        assert str(file) in str(caught.value)

    file.write_bytes(b"GGUF no")
    told("is not a GGUF file, truncated or corrupt")
    write(file, "llama", raw, {"model.norm.weight": np.ones(256, np.float32)})
    with pytest.raises(ModelLoadError, match="of the kind None, supported: gpt2, .*; pass --tokenizer"):
        load_tokenizer(resolve_model(str(file)))
    with monkeypatch.context() as patch:
        patch.setenv("JAXLLM_CACHE_DIR", str(file))
        told("cannot be unpacked: .*set .JAXLLM_CACHE_DIR")
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    told("truncated or corrupt")
    write(file, "mamba", raw, {})
    told("has the architecture 'mamba'; from GGUF files llama, qwen2")
    write(file, "llama", {**raw, "expert_count": 8}, {})
    told("llama.expert_count is 8, supported: 0")
    part = tmp_path / "model-00001-of-00003.gguf"
    shutil.copy(file, part)
    with pytest.raises(
        ModelLoadError, match="one of 3 parts, of which model-00002-of-00003.gguf, model-00003-of-00003.gguf is"
    ):
        resolve_model(str(part))
    with pytest.raises(ModelLoadError, match="has no config.json but GGUF files; give the path of one"):
        load_model_config(tmp_path)
