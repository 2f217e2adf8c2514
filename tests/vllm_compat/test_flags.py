"""Every flag of vLLM is accepted, ignored or refused, and the options that its text recommends exist."""

import re
import typing
from pathlib import Path
from typing import Any, Literal

import pytest

from jaxllm.cli.flags import all_flags
from jaxllm.config import type_matches
from jaxllm.errors import ConfigError
from jaxllm.flag_arguments import spelling, without_none
from jaxllm.vllm_compat import flags as vllm_flags
from jaxllm.vllm_compat.flags import OLDER, SHORT_NAMES, TABLE, TAKEN, TAKEN_BY_SERVER, as_options, translated
from jaxllm.vllm_compat.values import QUANTIZATIONS, VALUES, as_here

NAMES = {
    name
    for line in (Path(__file__).parent / "flags_0_33.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for name in line.split()
}
OPTIONS_OF_COMMANDS = {"config"}
OURS = set(all_flags()) | OPTIONS_OF_COMMANDS


def test_every_flag_of_vllm_is_in_exactly_one_list() -> None:
    lists: list[set[str]] = [set(TABLE), set(TAKEN), set(TAKEN_BY_SERVER)]
    assert set.union(*lists) == NAMES | OLDER
    assert sum(map(len, lists)) == len(set.union(*lists))
    assert set(TABLE) >= OLDER and not OLDER & NAMES


def test_taken_flags_are_options_of_ours_and_the_others_are_not() -> None:
    assert TAKEN | TAKEN_BY_SERVER <= OURS
    assert not set(TABLE) & OURS, "now that there is an option of this name, move the flag to TAKEN"
    assert {flag.option for flag in TABLE.values() if flag.option} <= OURS
    assert set(VALUES) <= TAKEN | TAKEN_BY_SERVER and set(SHORT_NAMES) <= TAKEN | TAKEN_BY_SERVER | set(TABLE)
    assert "fp8" in QUANTIZATIONS


def test_what_texts_recommend_exists() -> None:
    options = {spelling(name) for name in OURS | set(TABLE)}
    root = Path(__file__).parents[2]
    values = [(f"{name} {value}", entry.text) for name, entries in VALUES.items() for value, entry in entries.items()]
    for name, text in [*((flag.name, flag.text) for flag in TABLE.values()), *values]:
        assert set(re.findall(r"--[a-z][a-z-]*[a-z]", text)) <= options, name
        assert all((root / page).is_file() for page in re.findall(r"docs/\w+\.md", text)), name
    for flag in TABLE.values():
        named = re.findall(r"--[a-z][a-z-]*", flag.text)
        if flag.text.startswith("only matters with --") and flag.text.endswith("which is refused"):
            assert TABLE[named[0][2:].replace("-", "_")].refused


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("enforce_eager", True, "changes nothing here: every step is a compiled program"),
        ("enforce_eager", False, None),
        ("decode_context_parallel_size", 1, "changes nothing here"),
        (
            "decode_context_parallel_size",
            2,
            "refused (only 1 is taken): the devices that split each layer keep the cache by heads",
        ),
        ("decode_context_parallel_size", True, "refused"),
        ("structured_outputs_config", {"backend": "guidance", "enable_in_reasoning": False}, "changes nothing here"),
        ("structured_outputs_config", {"disable_any_whitespace": True}, "refused"),
        ("ec_transfer_config", None, None),
        ("ec_transfer_config", {"ec_role": "ec_both"}, "refused: caches and weights are not passed between servers"),
        ("worker_use_ray", True, "refused: --distributed-executor-backend ray starts the other hosts"),
        ("calculate_kv_scales", True, "refused: give the scales in the checkpoint"),
        ("hf_token", True, "hf_token changes nothing here: set $HF_TOKEN"),
        ("hf_token", "hf_secret", "hf_token is refused: set $HF_TOKEN"),
        ("omni", True, "refused: models read text and images and write text"),
        ("task", "reward", "refused: task can only be auto, generate, embed, embedding, classify, score"),
    ],
)
def test_a_flag_changes_nothing_or_is_refused(name: str, value: Any, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(vllm_flags, "info_once", said.append)
    monkeypatch.setattr(vllm_flags, "warn_once", said.append)
    try:
        assert translated(name, value) == {}
    except ConfigError as error:
        said.append(str(error))
    assert told in said[0] if told else not said


def test_flags_of_other_names_set_options_of_ours() -> None:
    given = {"task": "embed", "use_tqdm_on_load": False, "dtype": "float", "generation_config": "vllm", "max_model_len": "auto"}
    assert as_options(given) == {
        "runner": "pooling",
        "use_progress_bar": False,
        "dtype": "float32",
        "generation_config": "none",
        "max_model_len": -1,
    }
    assert as_options({"no_such": 1}) == {"no_such": 1}
    keys = {"spec_method": "ngram", "spec_tokens": 3, "num_speculative_tokens": None}
    assert as_options(keys) == as_options({**keys, "speculative_config": None})
    assert as_options(keys) == {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    keys["speculative_config"] = {"num_speculative_tokens": 4, "prompt_lookup_max": 2}
    both = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2}
    assert as_options(keys) == as_options(dict(reversed(keys.items()))) == {"speculative_config": both}


@pytest.mark.parametrize(
    ("name", "value", "here", "told"),
    [
        ("load_format", "fastsafetensors", "auto", "load_format='fastsafetensors' is taken as auto: files are memory-mapped"),
        ("quantization", "compressed-tensors", None, "changes nothing here: the checkpoint says how its weights are stored"),
        ("quantization", "fp8_per_tensor", "fp8", "is taken as fp8: weights have a scale for each output channel"),
        ("quantization", "ptpc_fp8", "fp8", ""),
        ("prefix_caching_hash_algo", "xxhash_cbor", "sha256_cbor", "is taken as sha256_cbor"),
    ],
)
def test_values_of_vllm_are_taken(name: str, value: str, here: Any, told: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    assert as_options({name: value}) == {name: here}
    assert told in caplog.text and bool(told) == bool(caplog.text)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("kv_cache_dtype", "fp8_e5m2", "kv_cache_dtype: 'fp8_e5m2' is refused: take fp8"),
        ("load_format", "sharded_state", "load_format: 'sharded_state' is refused: give the whole checkpoint"),
        ("distributed_executor_backend", "external_launcher", "is refused: start the command on each host"),
    ],
)
def test_values_of_vllm_are_refused_with_the_way_out(name: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        as_options({name: value})


def test_values_of_vllm_are_no_values_of_ours() -> None:
    for name, entries in VALUES.items():
        flag = all_flags()[name]
        for value, entry in entries.items():
            if not entry.refused:
                assert entry.value is None or type_matches(as_here(name, value), flag.type)
        if typing.get_origin(without_none(flag.type)[0]) is Literal:
            assert not set(entries) & set(typing.get_args(without_none(flag.type)[0]))
