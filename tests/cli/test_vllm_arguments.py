"""Command lines of vLLM's users."""

import argparse
from pathlib import Path

import pytest

from jaxllm.cli.main import command_parser, main
from jaxllm.cli.options import engine_options
from jaxllm.engine_args import AsyncEngineArgs, EngineArgs
from jaxllm.errors import ConfigError
from jaxllm.log import info_once, warn_once


@pytest.fixture(autouse=True)
def forget_messages() -> None:
    info_once.cache_clear()
    warn_once.cache_clear()


def options_of(line: str) -> dict[str, object]:
    """The engine options that `jaxllm serve LINE` sets."""
    parser = command_parser("serve")
    found = parser.parse(line.split())
    parser.take_vllm_flags(found)
    return engine_options(found)


NOTHING = (
    "--trust-remote-code --enforce-eager --swap-space 4 --disable-log-requests --tokenizer-mode auto "
    "--decode-context-parallel-size 1 --structured-outputs-config.backend xgrammar --compilation-config {} -O3 -cc.mode 3 "
    "--enable-sleep-mode --model-impl auto --max-seq-len-to-capture 8192 "
    "--disable-custom-all-reduce --no-enable-lora-bias --cudagraph-capture-sizes 1 2 4 "
    "-dc {} --sleep-preserve-parameter-names a b --hf-token -O.level=3"
)


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (NOTHING, {}),
        (
            "-pp 2 -dp 1 -tp 2 --tokenizer-mode hf",
            {"pipeline_parallel_size": 2, "data_parallel_size": 1, "tensor_parallel_size": 2},
        ),
        ("-n 2 -r 1 -tp 2", {"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}),
        (
            "-n 2 -dp 4 -dpa 10.0.0.1 -dpp 5000",
            {"nnodes": 2, "data_parallel_size": 4, "master_addr": "10.0.0.1", "master_port": 5000},
        ),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("-q fp8", {"quantization": "fp8"}),
        ("-q", {}),
        ("-q fp8_per_channel --load-format fastsafetensors", {"quantization": "fp8", "load_format": "auto"}),
        ("--device-memory-utilization 0.5 --quantization none", {"gpu_memory_utilization": 0.5, "quantization": None}),
        ("--stream-interval 2", {"stream_interval": 2}),
        (
            "--disable-prefix-caching --disable_chunked_prefill",
            {"enable_prefix_caching": False, "enable_chunked_prefill": False},
        ),
        (
            "--enable-log-stats --enable-hybrid-kv-cache-manager",
            {"disable_log_stats": False, "disable_hybrid_kv_cache_manager": False},
        ),
        ("--enable-custom-all-reduce --disable-flashinfer-autotune --disable-log-requests", {}),
        ("--tensor-parallel 2 --hf-over.rope_theta 3", {"tensor_parallel_size": 2, "hf_overrides": {"rope_theta": 3}}),
        (
            "--limit-mm-per-prompt.image 2 --mm-hasher-algorithm blake3",
            {"limit_mm_per_prompt": {"image": 2}, "mm_hasher_algorithm": "sha256"},
        ),
        ("--allowed-media-domains a.org --allowed-media-domains b.org", {"allowed_media_domains": ["a.org", "b.org"]}),
        ("--task embed", {"runner": "pooling"}),
        ("--task embed --runner generate", {"runner": "generate"}),
        ("--generation-config vllm", {"generation_config": "none"}),
        ('--override-generation-config {"top_k":5}', {"override_generation_config": {"top_k": 5}}),
        ("--override-generation-config.top_k 5", {"override_generation_config": {"top_k": 5}}),
        ('-sc {"method":"ngram"} --spec-tokens 3', {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        (
            "--spec-method ngram -sc.num_speculative_tokens 3",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        ("--num-speculative-tokens 2 --spec-model a/b", {"speculative_config": {"num_speculative_tokens": 2, "model": "a/b"}}),
    ],
)
def test_flags_of_vllm_are_accepted(line: str, options: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    assert options_of(line) == options
    if line == NOTHING:
        for given in (
            "--enforce-eager",
            "-O 3",
            "--cudagraph-capture-sizes 1 2 4",
            "--compilation-config {} -cc.mode 3 -O.level=3",
            "--hf-token",
        ):
            assert f"{given} changes nothing here" in caplog.text
        assert "--no-enable-lora-bias" not in caplog.text


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-dcp 2", "-dcp 2 is refused (only 1 is taken): the devices that split each layer keep the cache by heads"),
        ("--enable-lora-bias", "--enable-lora-bias is refused: biases of adapters are not supported"),
        ("-q quark", "argument --quantization: 'quark' is refused: only "),
        ("--hf-token secret", "--hf-token is refused: set $HF_TOKEN"),
        ("-dc.steps 4", "-dc.steps 4 is refused: no model here has use for it"),
        ("--omni", "--omni is refused: models read text and images and write text"),
        ("--structured-outputs-config.disable_any_whitespace true", "is refused: llguidance"),
        ("--enforce-eagr", "did you mean '--enforce-eager'?"),
        ("--api-key one ./model", "--api-key takes every word after it, './model' too; write the model before it"),
    ],
)
def test_flags_of_vllm_are_refused_with_the_reason(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *line.split()]) == 2
    assert told in capsys.readouterr().err


def test_several_words_after_one_flag() -> None:
    found = command_parser("serve").parse(["demo", "--api-key", "a", "b", "--served-model-name", "x", "y", "--api-key", "c"])
    assert found.model == "demo" and found.api_key == ["a", "b", "c"] and found.served_model_name == ["x", "y"]
    assert command_parser("serve").parse(["--api-key", "a", "--served-model-name", "x"]).api_key == ["a"]


def test_a_config_file_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("enforce-eager: true\ntask: embed\ndtype: half\nserved_model_name: [a, b]\n")
    assert options_of(f"--config {path}") == {"runner": "pooling", "dtype": "float16"}
    path.write_text("spec-tokens: 3\nspeculative-config: {method: ngram}\n")
    assert options_of(f"--config {path}") == {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    path.write_text("spec-tokens: 3\nspeculative-config: {num_speculative_tokens: 2}\n")
    with pytest.raises(ConfigError, match=f"{path}:2: speculative-config is set already at {path}:1"):
        options_of(f"--config {path}")
    path.write_text("seed: 1\nenable-lora-bias: true\n")
    with pytest.raises(ConfigError, match=rf"{path}:2: enable-lora-bias is refused: biases"):
        options_of(f"--config {path}")


def test_help_says_what_becomes_of_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=eager"]) == 0
    assert "--enforce-eager: no effect: every step is a compiled program" in capsys.readouterr().out


def script_parser() -> argparse.ArgumentParser:
    """As scripts written for vLLM make it, with arguments of their own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-tokens", type=int, default=9)
    assert EngineArgs.add_cli_args(parser) is parser
    parser.set_defaults(model="org/mine")
    return parser


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("", {}),
        ("--trust-remote-code --enforce-eager --swap-space 4 -pp 1 -O3 --cudagraph-capture-sizes 1 2 4 --no-enable-lora", {}),
        ("--model other --max-model-len 4k", {"model": "other", "max_model_len": 4000}),
        ("-tp 2 -q fp8", {"tensor_parallel_size": 2, "quantization": "fp8"}),
        ("--dtype half --no-enable-prefix-caching --max-tokens 3", {"dtype": "float16", "enable_prefix_caching": False}),
        ("--task embed", {"runner": "pooling"}),
        ("--load-format instanttensor --disable-prefix-caching", {"load_format": "auto", "enable_prefix_caching": False}),
        ('--hf-overrides {"a":1} --hf-overrides {"b":2}', {"hf_overrides": {"a": 1, "b": 2}}),
        ('--spec-tokens 3 -sc {"method":"ngram"}', {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [EngineArgs, AsyncEngineArgs])
def test_a_script_takes_the_flags_into_its_own_parser(kind: type[EngineArgs], line: str, options: dict[str, object]) -> None:
    found = script_parser().parse_args(line.split())
    wanted = kind(**{"model": "org/mine", **options})
    assert kind.from_cli_args(found) == wanted
    assert found.tensor_parallel_size == options.get("tensor_parallel_size", 1), "unset options have their defaults"
    given = vars(found)
    given.pop("max_tokens")
    assert kind(**given) == wanted


def test_defaults_that_a_script_sets_count_for_flags_of_vllm_too() -> None:
    parser = script_parser()
    parser.set_defaults(task="embed", enforce_eager=True, max_num_seqs=7)
    args = EngineArgs.from_cli_args(parser.parse_args([]))
    assert (args.runner, args.max_num_seqs) == ("pooling", 7)


@pytest.mark.parametrize("line", ["--enable-lora-bias", "--dtype int3", "--max-model-len many"])
def test_a_script_ends_at_a_flag_that_is_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script_parser().parse_args(line.split())
    assert line.split()[0] in capsys.readouterr().err


def test_a_unique_prefix_is_taken_and_the_log_names_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    assert options_of("--gpu_memory 0.5 --max-logp=3 --enforce") == {"gpu_memory_utilization": 0.5, "max_logprobs": 3}
    for line in (
        "--gpu_memory is taken as --gpu-memory-utilization",
        "--max-logp is taken as --max-logprobs",
        "--enforce-eager changes",
    ):
        assert line in caplog.text
