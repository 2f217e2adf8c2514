"""Adapters as PEFT writes them: what is read of them, and how broken ones are refused."""

import contextlib
import io
import json
import math
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxllm.errors import AdapterError
from jaxllm.lora.checkpoint import AdapterFiles, read_adapter
from jaxllm.lora.shapes import TargetShape
from scripts.saving import write_safetensors
from tests.helpers import goldens, peft_files

Q, K = (f"model.layers.0.self_attn.{name}_proj" for name in "qk")
EMBEDDING = "model.embed_tokens"
TARGETS = {
    Q: TargetShape(6, 8),
    K: TargetShape(6, 4),
    EMBEDDING: TargetShape(10, 6, "embedding"),
    "lm_head": TargetShape(6, 10),
}
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj"]}
RNG = np.random.default_rng(0)


def pair(module: str, outputs: int = 8, inputs: int = 6, rank: int = 2, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    a, b = RNG.standard_normal((rank, inputs)), RNG.standard_normal((outputs, rank))
    return {f"{module}.lora_A.weight": a.astype(dtype), f"{module}.lora_B.weight": b.astype(dtype)}


GOOD = pair(f"base_model.model.{Q}")


def write(directory: Path, tensors: dict[str, np.ndarray] = GOOD, **config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}), encoding="utf-8")
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def read(directory: Path, max_rank: int = 4) -> AdapterFiles:
    return read_adapter(directory, TARGETS, max_rank, rank=8)


def delta(files: AdapterFiles, module: str) -> np.ndarray:
    return files.tensor(f"{module}.lora_B.weight") @ files.tensor(f"{module}.lora_A.weight")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        f"base_model.model.{Q}",
        Q,
        "base_model.model.layers.0.self_attn.q_proj",
        "base_model.model.model.language_model.layers.0.self_attn.q_proj",
        "base_model.model.language_model.model.layers.0.self_attn.q_proj",
    ],
)
def test_reads_a_module_of_any_class_of_the_model(tmp_path, name, dtype):
    tensors = pair(name, dtype=dtype)
    files = read(write(tmp_path / "adapter", tensors))
    a, b = (tensors[f"{name}.lora_{side}.weight"].astype(np.float32) for side in "AB")
    assert (files.modules, files.rank) == ((Q,), 2)
    found_a, found_b = (files.tensor(f"{Q}.lora_{side}.weight") for side in "AB")
    np.testing.assert_array_equal(found_a, np.pad(a, ((0, 6), (0, 0))))
    np.testing.assert_array_equal(found_b, np.pad(4 * b, ((0, 0), (0, 6))))
    assert files.tensor(f"{K}.lora_A.weight").shape == (8, 6) and not delta(files, K).any()


def test_reads_embeddings_and_old_names_and_ignores_the_copies_of_base_weights(tmp_path):
    q, e = pair(Q), pair("e", outputs=6, inputs=10)
    tensors = {
        **{f"base_model.model.{name.replace('.weight', '.default.weight')}": t for name, t in q.items()},
        f"base_model.model.{EMBEDDING}.lora_embedding_A": e["e.lora_A.weight"],
        f"base_model.model.{EMBEDDING}.lora_embedding_B": e["e.lora_B.weight"],
        f"base_model.model.{EMBEDDING}.base_layer.weight": np.zeros((10, 6), np.float32),
        **pair("base_model.model.lm_head", outputs=10),
        "base_model.model.lm_head.base_layer.weight": np.zeros((10, 6), np.float32),
    }
    files = read(write(tmp_path / "adapter", tensors, target_modules=["q_proj", "embed_tokens", "lm_head"]))
    assert set(files.modules) == {Q, EMBEDDING, "lm_head"}
    np.testing.assert_allclose(delta(files, Q), 4 * q[f"{Q}.lora_B.weight"] @ q[f"{Q}.lora_A.weight"], rtol=1e-5)
    np.testing.assert_allclose(delta(files, EMBEDDING), 4 * e["e.lora_B.weight"] @ e["e.lora_A.weight"], rtol=1e-5)
    # Where PEFT ties the head's adapter to the embedding's, it lists only the embedding.
    tied = {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
    assert read(write(tmp_path / "adapter", tensors, **tied)).modules == files.modules


def test_reads_files_of_pytorch_without_it(tmp_path):
    directory = write(tmp_path / "adapter")
    (directory / "adapter_model.safetensors").unlink()
    write_bin(directory / "adapter_model.bin", GOOD)
    expected = delta(read(write(tmp_path / "other")), Q)
    np.testing.assert_array_equal(delta(read(directory), Q), expected)


def test_the_digest_is_that_of_factors_and_scales(tmp_path):
    first, again = read(write(tmp_path / "first")), read(write(tmp_path / "again"))
    assert first.digest() == again.digest()
    changed = {name: values + (values == values.max()) for name, values in GOOD.items()}
    others = [write(tmp_path / "weights", changed), write(tmp_path / "scale", lora_alpha=4)]
    assert len({first.digest(), *(read(other).digest() for other in others)}) == 3
    (tmp_path / "again" / WEIGHTS).write_bytes((tmp_path / "weights" / WEIGHTS).read_bytes() + b"0")
    with pytest.raises(AdapterError, match="was changed after it was checked"):
        again.digest()


def test_scale_follows_patterns_and_rslora(tmp_path):
    tensors = {**pair(Q, rank=2), **pair(K, outputs=4, rank=4)}
    fields = {"rank_pattern": {"k_proj": 4}, "alpha_pattern": {r".*layers\.0.*q_proj": 3, "proj": 5}}
    for use_rslora, scales in (False, (3 / 2, 8 / 4)), (True, (3 / math.sqrt(2), 8 / 2)):
        files = read(write(tmp_path / "adapter", tensors, use_rslora=use_rslora, **fields))
        for module, scale in zip((Q, K), scales, strict=True):
            expected = scale * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
            np.testing.assert_allclose(delta(files, module), expected, rtol=1e-5)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "qwen3", "qwen3_moe", "mixtral", "gpt_oss"])
def test_changes_of_weights_are_those_that_merging_makes(tmp_path, name, stacked):
    """All linear layers, experts among them, ranks and alphas of their own."""
    model = goldens.FOLDER / name
    patterns = {"rank_pattern": {"o_proj": 3, "experts.gate_up_proj": 5}, "alpha_pattern": {"down_proj": 7}}
    directory = peft_files.write(tmp_path / "adapter", model, rslora=True, stacked=stacked, **patterns)
    peft_files.check_changes(model, directory, peft_files.merged(model, directory, tmp_path / "merged"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "VERA"}, 'only "LORA" is supported'),
        ({"use_dora": True}, "merge_and_unload"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "biases of LoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"layer_replication": [[0, 1]]}, "layers cannot be repeated"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
        ({"use_qalora": True}, "QALoRA"),
        ({"r": 0}, "Expected `int` >= 1"),
        ({"r": "8"}, "Expected `int`"),
        ({"r": 10**400}, "is broken"),
        ({"lora_alpha": 10**400}, "is broken"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"(": 4}}, "is broken"),
        ({"rank_pattern": [4]}, "Expected `object"),
        ({"rank_pattern": {"(?R)(?R)": 4}}, "has the group '(?R'"),
        ({"rank_pattern": {r"\(?((a?){500}){500}": 4}}, "characters with all repeats, at most 131072"),
        ({"alpha_pattern": {"q{e<=3}": 4}}, "{e<=3, which is no count"),
        ({"alpha_pattern": {"q" * 501: 4}}, "has 501 characters, at most 500"),
        ({"rank_pattern": {f"q{i}": 4 for i in range(2001)}}, "2001 patterns, at most 2000"),
        ({"modules_to_save": ["q"] * 2000}, "whole modules"),
        ({"comment": "x" * 2**19}, "at most 524288 are read"),
        ({"r": 3}, "has rank 2, but adapter_config.json says 3"),
        ({"target_modules": ["k_proj"]}, f"does not list in target_modules {Q}"),
    ],
)
def test_refuses_configs(tmp_path, config, message):
    with pytest.raises(AdapterError) as error:
        read(write(tmp_path / "adapter", **config))
    assert message in str(error.value) and str(tmp_path / "adapter") in str(error.value)


def test_patterns_take_a_limited_time(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxllm.lora.patterns.MAX_SECONDS", -1)
    with pytest.raises(AdapterError, match="a pattern in rank_pattern or alpha_pattern .* takes too long for model.layers.0"):
        read(write(tmp_path / "adapter", rank_pattern={r"(?:q_proj){1,2}": 2}))


def test_many_target_modules_are_looked_up(tmp_path):
    write(tmp_path / "adapter", target_modules=[*(f"layers.{i}.x" for i in range(20_000)), "self_attn.q_proj"])
    assert read(tmp_path / "adapter").modules == (Q,)


ZEROS = np.zeros((8, 6), np.float32)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "no tensor named"),
        (
            pair("model.visual.blocks.0.attn.q_proj"),
            "it changes model.visual.blocks.0.attn.q_proj, which the model does not have",
        ),
        (pair("model.layers.0.self_attn.o_proj"), "it changes model.layers.0.self_attn.o_proj, which the model does not have"),
        (
            pair("model.layers.7.self_attn.q_proj"),
            "adapters cannot change (they can change embed_tokens, k_proj, lm_head, q_proj)",
        ),
        (pair(Q, 16, 12), f"{Q}.lora_A is [2, 12], must be [2, 6], {Q}.lora_B is [16, 2], must be [8, 2]"),
        ({**GOOD, f"{K}.lora_A.weight": ZEROS[:2]}, f"{K} has only lora_A"),
        ({**GOOD, **pair(Q)}, "twice"),
        ({**GOOD, **pair("base_model.model.layers.0.self_attn.q_proj")}, "twice"),
        (pair(Q, dtype=ml_dtypes.float8_e4m3fn), "must be float32, float16 or bfloat16"),
        ({**GOOD, f"{Q}.lora_magnitude_vector": ZEROS[:, 0]}, "part of DoRA"),
        ({**GOOD, f"{Q}.lora_B.bias": ZEROS[:, 0]}, "a bias"),
        ({**GOOD, "base_model.model.lm_head.weight": ZEROS}, "a whole weight"),
        ({**GOOD, f"{EMBEDDING}.base_layer.weight": ZEROS}, "vocabulary was resized"),
        (pair(EMBEDDING, 6, 10), "lora_embedding_A"),
        ({f"{Q}.lora_A.weight": ZEROS[0], f"{Q}.lora_B.weight": ZEROS[:0]}, "must be matrices and not empty"),
        (pair(Q, rank=8), "raise --max-lora-rank to 8"),
    ],
)
def test_refuses_tensors(tmp_path, tensors, message):
    rank = next((t.shape[0] for name, t in tensors.items() if name.endswith("lora_A.weight")), 2)
    with pytest.raises(AdapterError) as error:
        read(write(tmp_path / "adapter", tensors, r=max(rank if rank == 8 else 2, 1)))
    assert message in str(error.value) and str(tmp_path / "adapter") in str(error.value)


def test_names_what_lora_target_modules_leaves_out(tmp_path):
    adapter, known, left_out = write(tmp_path / "adapter"), {K: TARGETS[K]}, {Q: TARGETS[Q]}
    with pytest.raises(AdapterError, match=r"no slots; add q_proj to lora_target_modules \(k_proj\)"):
        read_adapter(adapter, known, 8, 8, target_modules=["k_proj"], left_out=left_out)
    with pytest.raises(AdapterError, match="no slots; name them in lora_target_modules: q_proj, beside all others"):
        read_adapter(adapter, known, 8, 8, left_out=left_out)


CONFIG_FILE, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def weights(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Callable[[Path], Any]:
    """Changes the weights, and perhaps the file's name."""

    def apply(directory: Path) -> None:
        data = (directory / WEIGHTS).read_bytes()
        (directory / WEIGHTS).unlink()
        (directory / name).write_bytes(change(data))

    return apply


def with_entry(**fields: Any) -> Callable[[bytes], bytes]:
    """Changes the header's entry of a tensor."""

    def change(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header[f"base_model.model.{Q}.lora_A.weight"].update(fields)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return change


def config(text: bytes) -> Callable[[Path], Any]:
    return lambda directory: (directory / CONFIG_FILE).write_bytes(text)


def archive(value: Any) -> bytes:
    return archive_of(pickle.dumps(value))


def archive_of(pickled: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
    return file.getvalue()


def many_tensors() -> bytes:
    """More than adapters of this model have."""
    text = json.dumps({f"a{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(4097)}).encode()
    return struct.pack("<Q", len(text)) + text


def a_directory_for(name: str) -> Callable[[Path], Any]:
    return lambda directory: ((directory / name).unlink(), (directory / name).mkdir())


def a_fifo_for(name: str) -> Callable[[Path], Any]:
    return lambda directory: ((directory / name).unlink(), os.mkfifo(directory / name))


def a_device_for(name: str) -> Callable[[Path], Any]:
    return lambda directory: ((directory / name).unlink(), (directory / name).symlink_to("/dev/zero"))


BREAKS: dict[str, Callable[[Path], Any]] = {
    "nothing": shutil.rmtree,
    "no config": lambda directory: (directory / CONFIG_FILE).unlink(),
    "no weights": lambda directory: (directory / WEIGHTS).unlink(),
    "weights of another name": weights(bytes, "model.safetensors"),
    "config is a directory": a_directory_for(CONFIG_FILE),
    "weights are a directory": a_directory_for(WEIGHTS),
    "config is a FIFO": a_fifo_for(CONFIG_FILE),
    "weights are a FIFO": a_fifo_for(WEIGHTS),
    "config never ends": a_device_for(CONFIG_FILE),
    "weights never end": a_device_for(WEIGHTS),
    "config is huge": lambda directory: os.truncate(directory / CONFIG_FILE, 2**40),
    "empty weights": weights(lambda data: b""),
    "truncated": weights(lambda data: data[:-1]),
    "truncated header": weights(lambda data: data[:40]),
    "header is a list": weights(lambda data: struct.pack("<Q", 2) + b"[]"),
    "header without end": weights(lambda data: struct.pack("<Q", 2**63) + data[8:]),
    "deep header": weights(lambda data: struct.pack("<Q", 10**5) + b"[" * 10**5),
    "wrong offsets": weights(with_entry(data_offsets=[0, 10**30])),
    "negative shape": weights(with_entry(shape=[-1, -48])),
    "no shape": weights(with_entry(shape=None)),
    "too many dimensions": weights(with_entry(shape=[1] * 63 + [2, 6])),
    "too large sizes": weights(with_entry(shape=[2**63 - 1, 0, 2**63 - 1])),
    "many tensors": weights(lambda data: many_tensors()),
    "PyTorch: many operations": weights(lambda data: archive_of(b"}" + b"q\x00" * 4096 * 64 + b"."), "adapter_model.bin"),
    "unknown type": weights(with_entry(dtype="Q7")),
    "LFS pointer": weights(lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "PyTorch: no archive": weights(bytes, "adapter_model.bin"),
    "PyTorch: code": weights(lambda data: archive({"x": print}), "adapter_model.bin"),
    "PyTorch: no tensors": weights(lambda data: archive({"x": 1}), "adapter_model.pt"),
    "PyTorch: larger view": weights(lambda data: spread(2**20), "adapter_model.bin"),
    "config is a list": config(b"[1]"),
    "config is not JSON": config(b"{"),
    "config is not text": config(b"\xff\xfe\x00"),
    "deep config": config(b"[" * 10**5),
    "no number": config(json.dumps({**CONFIG, "lora_alpha": math.nan}).encode()),
    "beyond float32": config(json.dumps({**CONFIG, "lora_alpha": 1e300}).encode()),
    "not finite": lambda directory: write(directory, {**GOOD, f"base_model.model.{Q}.lora_B.weight": ZEROS[:, :2] * math.nan}),
}


@pytest.mark.parametrize("how", BREAKS)
def test_broken_adapters_raise_nothing_else(tmp_path, how):
    directory = write(tmp_path / "adapter")
    BREAKS[how](directory)
    with pytest.raises(AdapterError, match=r"adapter .*; "):
        read(directory).tensor(f"{Q}.lora_B.weight")


def test_any_flipped_byte_is_read_or_refused(tmp_path):
    directory = write(tmp_path / "adapter")
    shape = delta(read(directory), Q).shape
    for name in (CONFIG_FILE, WEIGHTS):
        data = (directory / name).read_bytes()
        for i in range(0, len(data), 3):
            changed = bytearray(data)
            changed[i] ^= 1 << RNG.integers(8)
            (directory / name).write_bytes(changed)
            with contextlib.suppress(AdapterError):
                assert delta(read(directory), Q).shape == shape
        (directory / name).write_bytes(data)


@pytest.mark.parametrize("how", ["gone", "replaced", "shorter"])
def test_a_file_that_changes_after_the_check_is_noticed(tmp_path, how):
    directory = write(tmp_path / "adapter")
    files = read(directory)
    weights = directory / "adapter_model.safetensors"
    if how == "gone":
        weights.unlink()
    elif how == "replaced":
        write_safetensors(tmp_path / "new", GOOD)
        (tmp_path / "new").rename(weights)
    else:
        weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(AdapterError, match="load it again"):
        files.tensor(f"{Q}.lora_B.weight")


def test_names_without_a_directory_are_hub_ids(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/no-such-adapter", "/no/such/directory", "../x", ""):
        with pytest.raises(AdapterError, match=rf"adapter {name}: "):
            read(Path(name) if name else name)  # type: ignore[arg-type]


def spread(stride: int) -> bytes:
    """A file of PyTorch whose rows are far from each other in storages of a megabyte."""
    file = io.BytesIO()
    write_bin(file, {name: np.zeros((len(t), stride // 4 // len(t)), np.float32) for name, t in GOOD.items()}, GOOD)
    return file.getvalue()


def write_bin(file: Path | io.BytesIO, tensors: dict[str, np.ndarray], shown: dict[str, np.ndarray] | None = None) -> None:
    """A file of PyTorch, spelled out: its pickle names functions of torch, which is not installed. shown: the shapes of views."""
    out = b"\x80\x02}("
    for key, (name, tensor) in enumerate(tensors.items()):
        text, (rows, columns), stride = name.encode(), (shown or tensors)[name].shape, tensor.shape[1]
        out += b"X" + struct.pack("<I", len(text)) + text
        out += b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00"
        out += str(key).encode() + b"X\x03\x00\x00\x00cpuJ" + struct.pack("<i", tensor.size) + b"tQK\x00"
        out += b"K" + bytes([rows]) + b"K" + bytes([columns]) + b"\x86J" + struct.pack("<i", stride) + b"K\x01\x86"
        out += b"\x89ccollections\nOrderedDict\n)RtR"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("adapter_model/data.pkl", out + b"u.")
        for key, tensor in enumerate(tensors.values()):
            archive.writestr(f"adapter_model/data/{key}", tensor.tobytes())
