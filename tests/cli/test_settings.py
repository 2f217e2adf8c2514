from pathlib import Path

import pytest

from jaxllm.cli.flags import all_flags
from jaxllm.cli.settings import chosen, read_config_file, read_environment, resolve
from jaxllm.errors import ConfigError


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return str(path)


def test_command_line_before_environment_before_file_before_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "max-num-seqs: 1\nblock_size: 32\ndtype: float16\n")
    monkeypatch.setenv("JAXLLM_OPT_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("JAXLLM_OPT_BLOCK_SIZE", "64")
    settings = resolve(all_flags().values(), {"max_num_seqs": 3}, path)
    origins = {name: (settings[name].value, settings[name].origin) for name in ("max_num_seqs", "block_size", "dtype", "seed")}
    assert origins == {
        "max_num_seqs": (3, "command line"),
        "block_size": (64, "$JAXLLM_OPT_BLOCK_SIZE"),
        "dtype": ("float16", f"{path}:3"),
        "seed": (None, "default"),
    }
    assert set(chosen(settings)) == {"max_num_seqs", "block_size", "dtype"}


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_CONFIG", written(tmp_path, "seed: 7\n"))
    assert resolve(all_flags().values(), {})["seed"].value == 7


def test_file_values_have_the_types_of_their_fields(tmp_path: Path) -> None:
    path = written(
        tmp_path, "max_num_batched_tokens: 8k\nhf-overrides: {rope: {a: 1}}\ndecode_buckets: [1, 8]\ntemperature: 1e-3\n"
    )
    values = {name: value for name, (value, _) in read_config_file(path).items()}
    assert values == {
        "max_num_batched_tokens": 8000,
        "hf_overrides": {"rope": {"a": 1}},
        "decode_buckets": (1, 8),
        "temperature": 0.001,
    }


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert read_config_file(written(tmp_path, "# nothing yet\n")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmax_num_seq: 8\n", "options.yaml:2: unknown option 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ("seed: 1\n\nblock_size: big\n", "options.yaml:3: block_size: 'big' is not a whole number"),
        ("seed: 1\nseed: 2\n", "options.yaml:2: seed is set already at"),
        ("- seed\n", "options.yaml:1: must hold `option: value` lines"),
        ("seed: [1\n", "options.yaml:2: not YAML"),
        ("seed: !!python/object:os.system {}\n", "not YAML"),
        ("revision: 1.0\n", "options.yaml:1: revision: 1.0 is not text"),
    ],
)
def test_a_bad_file_is_reported_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config_file(written(tmp_path, text))
    assert message in str(error.value)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file /no/such\.yaml: No such file"):
        read_config_file("/no/such.yaml")


def test_an_unknown_variable_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'JAXLLM_OPT_MAX_NUM_SEQ'; did you mean 'JAXLLM_OPT_MAX_NUM_SEQS'"):
        read_environment({"JAXLLM_OPT_MAX_NUM_SEQ": "8"})


def test_a_bad_variable_names_itself() -> None:
    with pytest.raises(ConfigError, match="environment variable JAXLLM_OPT_SEED: 'x' is not a whole number"):
        read_environment({"JAXLLM_OPT_SEED": "x"})


def test_an_empty_variable_is_unset() -> None:
    assert read_environment({"JAXLLM_OPT_SEED": "", "OTHER": "1"}) == {}
