"""Every environment variable of vLLM is honoured, needs nothing or is warned about, and what texts recommend exists."""

import re
from pathlib import Path
from typing import Any

import pytest

from jaxllm import env, log
from jaxllm.cli.flags import all_flags
from jaxllm.cli.settings import resolve
from jaxllm.config import EngineConfig
from jaxllm.engine_args import EngineArgs
from jaxllm.errors import ConfigError
from jaxllm.flag_arguments import spelling
from jaxllm.vllm_compat.environment import OLDER, TABLE, report, with_engine_variables
from jaxllm.vllm_compat.flags import TABLE as FLAGS
from server.options import ServerOptions, server_flags

NAMES = {
    name
    for line in (Path(__file__).parent / "environment_0_33.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for name in line.split()
}


def test_every_variable_of_vllm_is_in_the_table() -> None:
    assert set(TABLE) == NAMES | OLDER and not NAMES & OLDER
    assert not [name for name, variable in TABLE.items() if variable.is_honoured and variable.is_harmless]
    assert {variable.option for variable in TABLE.values() if variable.option} <= set(all_flags())


def test_what_texts_recommend_exists() -> None:
    options = {spelling(name) for name in {*all_flags(), *FLAGS}}
    root = Path(__file__).parents[2]
    for variable in TABLE.values():
        assert set(re.findall(r"--[a-z][a-z-]*[a-z]", variable.text)) <= options, variable.name
        assert all((root / page).is_file() for page in re.findall(r"docs/\w+\.md", variable.text)), variable.name
        assert all(name in vars(env).values() for name in re.findall(r"\$(JAXLLM_\w+)", variable.text)), variable.name


@pytest.mark.parametrize(
    ("name", "text", "option", "value"),
    [
        ("API_KEY", "one,two", "api_key", ["one,two"]),
        ("SERVER_DEV_MODE", "1", "enable_dev_endpoints", True),
        ("SERVER_DEV_MODE", "0", "enable_dev_endpoints", False),
        ("EXECUTE_MODEL_TIMEOUT_SECONDS", "120", "step_timeout", 120.0),
        ("KEEP_ALIVE_ON_ENGINE_DEATH", "true", "keep_alive_on_engine_death", True),
        ("HTTP_TIMEOUT_KEEP_ALIVE", "75", "timeout_keep_alive", 75),
        ("HTTP_MAX_REQUEST_BODY_SIZE", "1024", "max_request_body_bytes", 1024),
        ("MAX_N_SEQUENCES", "1", "max_n", 1),
        ("MAX_COMPLETION_PROMPTS", "1", "max_prompts_per_request", 1),
        ("MAX_STOP_STRINGS", "4", "max_stop_strings", 4),
        ("CHAT_TEMPLATE_RENDER_TIMEOUT", "0.5", "chat_template_timeout", 0.5),
        ("ALLOW_LONG_MAX_MODEL_LEN", "1", "allow_long_max_model_len", True),
        ("PP_LAYER_PARTITION", "15,17", "pipeline_parallel_layers", (15, 17)),
        ("DISABLE_COMPILE_CACHE", "1", "compilation_cache", False),
        ("TORCH_PROFILER_DIR", "/tmp/traces", "profiler_dir", "/tmp/traces"),
    ],
)
def test_a_variable_sets_its_option_with_a_line_of_the_log(
    name: str, text: str, option: str, value: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jaxllm")
    monkeypatch.setenv(f"VLLM_{name}", text)
    flag = all_flags()[option]
    setting = resolve([flag], {})[option]
    assert (setting.value, setting.origin) == (value, f"$VLLM_{name}")
    assert f"VLLM_{name} is taken as {spelling(option)}" in caplog.text
    in_range = ServerOptions if flag in server_flags() else EngineConfig
    assert in_range.from_options(**{option: value}).flat()[option] == value


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("VLLM_SERVER_DEV_MODE", "yes", "VLLM_SERVER_DEV_MODE is 'yes'; as --enable-dev-endpoints it must be 1 or 0"),
        ("VLLM_MAX_N_SEQUENCES", "many", "VLLM_MAX_N_SEQUENCES is 'many'; as --max-n it must be a whole number, at least 1"),
        ("VLLM_HTTP_MAX_REQUEST_BODY_SIZE", "10", "it must be a whole number, at least 1024"),
        ("VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT", "0", "it must be a number of seconds above 0"),
        ("VLLM_PP_LAYER_PARTITION", "15;17", "it must be the layers of each stage, such as 15,17"),
        ("VLLM_LORA_RESOLVER_CACHE_DIR", "/no/such", "VLLM_LORA_RESOLVER_CACHE_DIR is '/no/such'; as --lora-dir it must be"),
        ("VLLM_API_KEY", "schlüssel", "VLLM_API_KEY is not usable; as --api-key it must be ASCII"),
    ],
)
def test_a_bad_value_is_an_error(name: str, text: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as raised:
        resolve(all_flags().values(), {})
    assert told in str(raised.value) and "schlüssel" not in str(raised.value)


def test_everything_else_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    (tmp_path / "options.yaml").write_text("max-n: 3\n")
    for name in ("MAX_N_SEQUENCES", "MAX_STOP_STRINGS", "HTTP_TIMEOUT_KEEP_ALIVE", "MAX_COMPLETION_PROMPTS"):
        monkeypatch.setenv(f"VLLM_{name}", "9")
    monkeypatch.setenv("JAXLLM_OPT_MAX_STOP_STRINGS", "5")
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "")
    settings = resolve(server_flags(), {"timeout_keep_alive": 7}, str(tmp_path / "options.yaml"))
    names = ("max_n", "max_stop_strings", "timeout_keep_alive", "max_prompts_per_request", "enable_dev_endpoints")
    assert [settings[name].value for name in names] == [3, 5, 7, 9, False]
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE has no effect: --timeout-keep-alive is set (command line)" in caplog.text


def test_a_key_of_ours_wins_over_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(**given: Any) -> list[str] | None:
        settings = resolve(server_flags(), given)
        return ServerOptions.from_options(api_key=settings["api_key"].value).access.api_key

    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert keys() == ["theirs"]
    monkeypatch.setenv("JAXLLM_API_KEY", "ours,second")
    assert keys() == ["ours", "second"]
    assert keys(api_key=["given"]) == ["given"]


def test_adapters_need_their_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "true")
    monkeypatch.setenv("VLLM_LORA_RESOLVER_CACHE_DIR", str(tmp_path))
    settings = resolve(server_flags(), {})
    assert settings["allow_runtime_lora_updating"].value is False and settings["lora_dir"].value is None
    assert "VLLM_LORA_RESOLVER_CACHE_DIR has no effect: it needs --enable-lora" in caplog.text
    settings = resolve(server_flags(), {"enable_lora": True})
    assert settings["allow_runtime_lora_updating"].value is True and settings["lora_dir"].value == str(tmp_path)


def test_a_program_takes_the_engine_s_variables(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "3")
    args = EngineArgs(compilation_cache=True)
    assert args.allow_long_max_model_len and args.compilation_cache
    assert "VLLM_DISABLE_COMPILE_CACHE has no effect: compilation_cache is given" in caplog.text
    assert "VLLM_MAX_N_SEQUENCES" not in caplog.text, "it is for servers"
    assert with_engine_variables({"seed": 1}) == {"seed": 1, "allow_long_max_model_len": True, "compilation_cache": False}


def test_the_log_says_once_what_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "jaxllm")
    found = {
        "VLLM_USE_DEEP_GEMM": "1",
        "VLLM_ROCM_USE_AITER": "0",
        "VLLM_USE_MODELSCOPE": "True",
        "VLLM_BATCH_INVARIANT": "0",
        "VLLM_NO_SUCH": "1",
        "VLLM_CACHE_ROOT": "/cache",
        "VLLM_LOGGING_LEVEL": "INFO",
        "JAXLLM_LOG_LEVEL": "debug",
        "VLLM_SERVICE_HOST": "10.0.0.1",
        "VLLM_PORT": "tcp://10.0.0.1:8000",
        "VLLM_PORT_8000_TCP_ADDR": "10.0.0.1",
        "HOME": "/root",
    }
    report(found)
    report(found)
    assert [record.getMessage() for record in caplog.records] == [
        "environment variable VLLM_CACHE_ROOT is taken as $JAXLLM_CACHE_DIR",
        "environment variable VLLM_LOGGING_LEVEL has no effect: $JAXLLM_LOG_LEVEL is set",
        "environment variable VLLM_USE_MODELSCOPE has no effect here: "
        "models come from the Hugging Face hub; download the model and give its directory",
        "nothing to do for the environment variables VLLM_ROCM_USE_AITER, VLLM_USE_DEEP_GEMM (docs/VLLM_ENVIRONMENT.md)",
        "no variables of vLLM 0.33, and without effect: VLLM_NO_SUCH",
    ]


def test_level_and_cache_follow_vllm_s_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (env.LOG_LEVEL, env.CACHE_DIR):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "CRITICAL")
    log.set_up()
    assert log.logger.level == 40 and env.cache_dir() == tmp_path / "jaxllm"
    monkeypatch.setenv(env.LOG_LEVEL, "debug")
    log.set_up()
    assert log.logger.level == 10
    monkeypatch.delenv(env.LOG_LEVEL)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(ConfigError, match="VLLM_LOGGING_LEVEL is 'loud', must be one of debug"):
        log.set_up()
