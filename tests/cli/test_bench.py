import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.main import main
from jaxllm.errors import ConfigError
from jaxllm.http_client.datasets import read_mix
from jaxllm.log import info_once
from jaxllm.scheduler_stats import SchedulerStats
from tests.helpers.fake_engine_core import FakeEngineCore, fake_stats


def test_throughput_counts_the_tokens_of_all_requests(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-prompts", "3", "--input-len", "5", "--output-len", "4", "--warmup-runs", "2", "--iterations", "2"]
    assert main(["bench", "throughput", *arguments, "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_requests"], report["num_prompt_tokens"], report["num_output_tokens"]) == (3, 15, 12)
    seconds = report["elapsed_seconds"]
    assert report["requests_per_second"] == pytest.approx(3 / seconds)
    assert report["output_tokens_per_second"] == pytest.approx(12 / seconds)
    assert report["total_tokens_per_second"] == pytest.approx(27 / seconds)
    assert len(report["all_elapsed_seconds"]) == 2
    assert 0 < report["median_time_to_first_token_seconds"] < seconds
    assert report["median_time_per_output_token_seconds"] > 0
    assert len(opened.core.requests) == 3 * 4
    assert all(request.sampling_params.ignore_eos for request in opened.core.requests)
    assert not any(request.sampling_params.detokenize for request in opened.core.requests)


@pytest.mark.parametrize("what", ["throughput", "latency"])
def test_acceptance_of_drafts_is_reported(
    what: str, opened: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stats(core: FakeEngineCore) -> SchedulerStats:
        count = len(core.requests)
        return fake_stats(
            num_drafts=count, num_draft_tokens=2 * count, num_accepted_tokens=count, accepted_per_position=(count, 0)
        )

    monkeypatch.setattr(FakeEngineCore, "stats", stats)
    arguments = ["bench", what, "--num-prompts", "2", "--iterations", "3", "--input-len", "5", "--output-len", "4", "-q"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["spec_decode_acceptance_length"], found["spec_decode_num_drafts"]) == (2.0, 6)
    assert main(arguments) == 0
    assert "acceptance by position              100% 0%" in capsys.readouterr().out.splitlines()


def test_latency_reports_average_and_percentiles(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = "--batch-size 2 --input-len 8 --output-len 3 --num-iters 4 --num-iters-warmup 1"
    assert main(["bench", "latency", *lengths.split(), "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["avg_latency_seconds"] == pytest.approx(statistics.fmean(report["all_latencies_seconds"]))
    assert set(report["percentiles_seconds"]) == {"10", "25", "50", "75", "90", "99"}
    assert len(opened.core.requests) == 2 * (1 + 4)
    assert main(["bench", "latency", "--input-len", "8", "--output-len", "3", "-q"]) == 0
    assert "avg latency" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["throughput", "latency"])
def test_the_result_may_go_into_a_file(what: str, opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info_once.cache_clear()
    path = tmp_path / "new" / "r.json"
    asked = "--backend vllm --input-len 5 --output-len 2 --num-prompts 2 --iterations 1 --json --output-json"
    assert main(["bench", what, *asked.split(), str(path)]) == 0
    shown = capsys.readouterr()
    assert json.loads(path.read_text()) == json.loads(shown.out)
    assert "--backend vllm changes nothing here" in shown.err


def test_a_mix_gives_the_lengths(opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mix.json"
    path.write_text(json.dumps({"about": "x", "requests": [[5, 2], [7, 3], [9, 4]]}))
    assert main(["bench", "throughput", "--mix", str(path), "--num-prompts", "2", "--warmup-runs", "0", "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["num_prompt_tokens"] == 12
    assert [request.sampling_params.max_tokens for request in opened.core.requests] == [2, 3]


def test_vllm_s_spellings_spread_lengths_after_a_shared_prefix(opened: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = "--random-input-len 20 --random-output-len 6 --random-range-ratio 0.5 --random-prefix-len 7"
    others = "--num-prompts 12 --num-warmups 0 --n 1 --disable-detokenize --async-engine --json"
    assert main(["bench", "throughput", *lengths.split(), *others.split()]) == 0
    shown = capsys.readouterr()
    prompts = [request.prompt_token_ids for request in opened.core.requests]
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 1
    assert {17 <= len(prompt) <= 37 for prompt in prompts} == {True} and len(set(map(len, prompts))) > 1
    assert {3 <= request.sampling_params.max_tokens <= 9 for request in opened.core.requests} == {True}
    assert json.loads(shown.out)["num_prompt_tokens"] == sum(map(len, prompts))
    assert "--disable-detokenize changes nothing here: token ids are measured" in shown.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["throughput", "--input-len", "0"], 2, "must be at least 1"),
        (["throughput", "--mix", "x", "--input-len", "5"], 2, "leave out --input-len"),
        (["latency", "--mix", "x"], 2, "--mix is for throughput"),
        (["thruput"], 2, "invalid choice: 'thruput'"),
        ([], 2, "required"),
        (["throughput", "--max-tokens", "5"], 2, "unknown option '--max-tokens'"),
        (["throughput", "--mix", "/no/such"], 1, "cannot read /no/such"),
        (["throughput", "--backend", "hf"], 2, "invalid choice: 'hf'"),
        (["latency", "--output-json", "/dev/null/r.json"], 1, "cannot write /dev/null/r.json"),
        (["latency", "--random-prefix-len", "5"], 2, "--range-ratio and --prefix-len are for throughput of random prompts"),
        (["throughput", "--dataset-name", "sonnet"], 2, "'sonnet' is not offered (one of random, sharegpt): its dataset"),
        (["throughput", "--hf-subset", "en"], 2, "--hf-subset en is refused: its dataset is not offered"),
        (["throughput", "--n", "2"], 2, "invalid choice: 2"),
    ],
)
def test_wrong_arguments_are_refused(
    opened: Any, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == code
    assert message in capsys.readouterr().err
    assert opened.core is None


@pytest.mark.parametrize("content", ["[]", '{"requests": []}', '{"requests": [[1]]}', '{"requests": [[1, 0]]}', "{"])
def test_a_bad_mix_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mix.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        read_mix(str(path))


def test_throughput_of_conversations(opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "talks.json"
    turns = [{"value": "one two three four five"}, {"value": "six seven eight nine"}]
    path.write_text(json.dumps([{"conversations": turns}]))
    asked = ["--dataset-name", "sharegpt", "--dataset-path", str(path)]
    assert main(["bench", "throughput", *asked, "--num-prompts", "2", "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_requests"], report["num_output_tokens"]) == (2, 2 * 4)
    for wrong in (["throughput", *asked[:2]], ["throughput", *asked[2:]], ["latency", *asked]):
        assert main(["bench", *wrong]) == 2
    lengths = ["--num-prompts", "1", "--input-len", "4", "--output-len", "2"]
    assert main(["bench", "throughput", "--dataset-name", "random", *lengths, "-q"]) == 0
