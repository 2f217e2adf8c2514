"""Facts that engines must have in common to use each other's contents."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cache_policy import FULL, WindowPolicy
from jaxllm.cache_spec import CacheArray, CacheGroup, CacheLayout, StateArray
from jaxllm.config import EngineConfig
from jaxllm.kv_tiers import fingerprint
from jaxllm.model_config import ModelConfig
from jaxllm.models.load_config import load_model_config
from jaxllm.runner.block_format import BlockFormat
from tests.helpers import goldens


class Scales:
    """A format of scales."""


FIELDS = {
    "format version",
    "jaxllm version",
    "model",
    "model class",
    "weights",
    "drafter",
    "dtype",
    "kv cache dtype",
    "kv cache scales",
    "block size",
    "groups",
    "arrays",
    "arrangement",
    "hash algorithm",
}


def layout(
    heads: tuple[int, ...] = (4, 4), *, block_size: int = 16, dtype: str = "bfloat16", policy: Any = FULL
) -> CacheLayout:
    groups = (CacheGroup(policy, tuple(range(len(heads)))),)
    arrays = tuple(CacheArray(count, 32, dtype) for count in heads)
    return CacheLayout(groups, arrays, (), (), block_size, 64)


def described(**changed: Any) -> dict[str, Any]:
    """The fields of an engine for the golden model qwen3."""
    options = changed.pop("options", {})
    model_dir = changed.pop("model_dir", goldens.golden("qwen3").directory)
    config = EngineConfig.from_options(model=str(model_dir), **options)
    model_config = dataclasses.replace(load_model_config(model_dir), **changed.pop("model", {}))
    found = changed.pop("layout", layout())
    return fingerprint.describe(config, model_config, found, BlockFormat.of(found, 1).arrangement, model_dir)


CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({"model": {"digest": "other"}}, {"model"}),
    ({"model": {"dtype": "float16"}}, {"dtype"}),
    ({"model": {"kv_cache_dtype": "float8_e4m3fn"}}, {"kv cache dtype"}),
    ({"options": {"model_class": "module:name"}}, {"model class"}),
    ({"options": {"prefix_caching_hash_algo": "sha256_cbor"}}, {"hash algorithm"}),
    ({"options": {"load_format": "dummy"}}, {"weights"}),
    ({"options": {"speculative_config": {"method": "ngram"}}}, {"drafter"}),
    ({"layout": layout(block_size=32)}, {"block size", "arrangement"}),
    ({"layout": layout(policy=WindowPolicy(8))}, {"groups"}),
    ({"layout": layout(dtype="float16")}, {"arrays"}),
    ({"layout": layout((4, 4, 4))}, {"groups", "arrays", "arrangement"}),
    ({"layout": layout((4, 2))}, {"arrangement"}),
]


@pytest.mark.parametrize(
    ("change", "names"), CHANGES, ids=lambda value: ", ".join(sorted(value)) if isinstance(value, set) else ""
)
def test_what_changes_a_content_changes_the_fingerprint(change: dict[str, Any], names: set[str]) -> None:
    before, after = described(), described(**dict(change))
    assert before.keys() == FIELDS
    assert {name for name in FIELDS if before[name] != after[name]} == names
    assert fingerprint.digest(before) != fingerprint.digest(after) and fingerprint.digest(before) == fingerprint.digest(
        described()
    )


@pytest.mark.parametrize("name", ["format version", "jaxllm version"])
def test_versions_change_the_fingerprint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = described()
    monkeypatch.setattr(fingerprint, "FORMAT_VERSION", 1 + (name == "format version"))
    monkeypatch.setattr("jaxllm.__version__", "0.0" if name == "jaxllm version" else before["jaxllm version"])
    assert [each for each in FIELDS if before[each] != described()[each]] == [name]


def test_scales_of_the_cache_change_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = described()
    monkeypatch.setattr(ModelConfig, "kv_format", Scales())
    assert [each for each in FIELDS if before[each] != described()[each]] == ["kv cache scales"]


@pytest.mark.parametrize(("heads", "same"), [((8, 8), True), ((8, 8, 4), False)])
def test_the_number_of_devices_matters_only_where_it_orders_the_bytes(heads: tuple[int, ...], same: bool) -> None:
    one, two, four = (BlockFormat.of(layout(heads), size).arrangement for size in (1, 2, 4))
    assert (one == two == four) is same
    # Two heads on four devices are stored twice each; a content has them once.
    assert BlockFormat.of(layout((4, 4)), 4, 2).arrangement == BlockFormat.of(layout((2, 2)), 2).arrangement


def test_devices_that_split_tokens_matter_and_those_that_split_heads_beside_them_do_not() -> None:
    whole, one, two, copies = (
        BlockFormat.of(layout(heads), *sizes).arrangement
        for heads, *sizes in (((4, 4), 2), ((4, 4), 1, 1, 2), ((4, 4), 2, 1, 2), ((8, 8), 4, 2, 2))
    )
    assert one == two == copies and one != whole
    format = BlockFormat.of(layout((4, 4)), 2, 1, 2)
    assert (format.num_devices, format.num_parts) == (4, 4)
    assert format.block_bytes == BlockFormat.of(layout((4, 4)), 1).block_bytes


@pytest.mark.parametrize(("num_heads", "same"), [(8, True), (12, False)])
def test_states_by_row_are_part_of_it(num_heads: int, same: bool) -> None:
    """The number of devices matters where words of a block cannot be divided among all heads."""
    states = (StateArray(num_heads, (3, 4), "float32"), StateArray(num_heads, (5,), "bfloat16"))
    with_states = dataclasses.replace(layout(), states=states)
    assert with_states.block_bytes // 4 % num_heads == (0 if same else 8)
    found = described(layout=with_states)
    assert found.keys() == FIELDS | {"states"}
    other = (states[0], StateArray(num_heads, (5,), "float32"))
    assert described(layout=dataclasses.replace(with_states, states=other))["states"] != found["states"]
    assert (described(layout=with_states, options={"tensor_parallel_size": 2})["states"] == found["states"]) is same


def write(directory: Path, **files: bytes) -> Path:
    directory.mkdir()
    for name, content in files.items():
        (directory / name.replace("_", ".")).write_bytes(content)
    return directory


def test_weights_are_told_apart_by_name_size_and_content(tmp_path: Path) -> None:
    large = bytes(range(256)) * 8192
    digest = fingerprint.weights_digest
    first = digest(write(tmp_path / "a", a_safetensors=large, config_json=b"{}"))
    assert first == digest(write(tmp_path / "copy", a_safetensors=large, config_json=b"other"))
    assert first != digest(write(tmp_path / "b", b_safetensors=large))
    assert first != digest(write(tmp_path / "c", a_safetensors=large + b"x"))
    assert first != digest(write(tmp_path / "d", a_safetensors=large[::-1]))
    assert first != digest(write(tmp_path / "e", a_safetensors=large, b_safetensors=large))


def test_all_parts_of_a_gguf_file_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in (*parts, tmp_path / "other-00001-of-00002.gguf"):
        part.write_bytes(b"1")
    first = fingerprint.weights_digest(parts[0])
    parts[1].write_bytes(b"2")
    assert fingerprint.weights_digest(parts[0]) != first
    second = fingerprint.weights_digest(parts[0])
    (tmp_path / "other-00001-of-00002.gguf").write_bytes(b"2")
    assert fingerprint.weights_digest(parts[0]) == second


def test_weights_that_differ_in_a_bias_alone_are_told_apart(tmp_path: Path) -> None:
    ranges = {"first": [0, 1_000_000], "bias": [1_000_000, 1_000_064], "last": [1_000_064, 2_000_000]}
    tensors = {
        name: {"dtype": "I8", "shape": [end - start], "data_offsets": [start, end]} for name, (start, end) in ranges.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    file, content = tmp_path / "a.safetensors", bytearray(2_000_000)
    digests = set()
    for value in range(3):
        content[1_000_040] = value
        file.write_bytes(len(header).to_bytes(8, "little") + header + content)
        digests.add(fingerprint.weights_digest(file))
    assert len(digests) == 3
