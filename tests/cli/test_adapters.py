"""--lora of the commands that run a model, and the adapters of `bench serve`."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.main import main
from jaxllm.http_client.datasets import LoadPrompt, with_models
from jaxllm.http_client.load import RequestMaker


@pytest.fixture
def sql(tmp_path: Path) -> Path:
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_config.json").write_text('{"r": 24, "rank_pattern": {"q_proj": 40, "x": "y"}}')
    return tmp_path / "sql"


@pytest.mark.parametrize(
    "line",
    [
        ["generate", "one two"],
        ["generate", "one", "two", "--json"],
        ["chat", "--quick", "one"],
        ["bench", "throughput", "--num-prompts", "2", "--input-len", "4", "--output-len", "2", "--warmup-runs", "0"],
    ],
    ids=" ".join,
)
def test_requests_name_the_adapter(line: list[str], opened: Any, sql: Path) -> None:
    assert main([*line, "-q", "--lora", f"a={sql}"]) == 0
    assert opened.options == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 40}
    assert opened.core.requests and {request.options.adapter for request in opened.core.requests} == {"a"}


def test_a_benchmark_takes_several_in_turn(opened: Any, sql: Path) -> None:
    line = f"bench throughput --num-prompts 3 --input-len 4 --output-len 2 --warmup-runs 0 --lora a={sql} --lora b={sql}"
    assert main([*line.split(), "--max-lora-rank", "64"]) == 0
    assert opened.options == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 64}
    assert [request.options.adapter for request in opened.core.requests] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("generate x --lora a", "--lora: 'a' must be NAME="),
        ("generate x --lora a=/no/such", "'/no/such' is neither a directory nor a hub id"),
        ("generate x --lora a={sql} --no-enable-lora", "--lora needs --enable-lora"),
        ("bench latency --lora a={sql} --lora a={sql}", "two adapters have the name 'a'"),
        ("chat --lora a={sql} --url http://127.0.0.1:1", "with --url name an adapter of the server with --model"),
        ("generate x --lora a={sql}/..", "adapter_config.json is missing"),
        ("serve --lora-modules a={sql}", "lora_modules needs --enable-lora beside it"),
        ("serve --enable-lora --lora-modules a", "must be NAME=PATH"),
        ("run-batch -i {sql}/adapter_config.json -o out --lora-modules a={sql}", "lora_modules needs --enable-lora beside it"),
    ],
)
def test_what_is_wrong_is_said(line: str, told: str, opened: Any, sql: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([part.replace("{sql}", str(sql)) for part in line.split()]) != 0
    assert told in capsys.readouterr().err and not (opened.core and opened.core.requests)


def test_a_load_test_spreads_over_adapters() -> None:
    prompts = [LoadPrompt("x", 1)] * 3000

    def models(assignment: str) -> list[str | None]:
        return [prompt.model for prompt in with_models(prompts, ["a", "b", "c"], assignment, seed=0)]

    assert models("round-robin")[:4] == ["a", "b", "c", "a"]
    counts = {assignment: [models(assignment).count(name) for name in "abc"] for assignment in ("random", "zipf")}
    assert all(900 < count < 1100 for count in counts["random"])
    assert 1550 < counts["zipf"][0] < 1750 and 450 < counts["zipf"][2] < 640
    maker = RequestMaker("openai", "m")
    assert [json.loads(maker.body(prompt))["model"] for prompt in (prompts[0], with_models(prompts, ["a"], "zipf", 0)[0])] == [
        "m",
        "a",
    ]
