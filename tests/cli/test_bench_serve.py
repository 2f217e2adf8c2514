import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jaxllm.cli.main import main
from tests.helpers.stub_server import Stub
from tests.helpers.tiny_tokenizers import write_tokenizer


@pytest.fixture
def stub(shared_stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    shared_stub.reset()
    for name in ("JAXLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return shared_stub


def bench(stub: Stub, *arguments: str) -> int:
    return main(["bench", "serve", "--base-url", stub.url, "-q", *arguments])


def measured(stub: Stub, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert bench(stub, "--json", *arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_random_token_ids_are_asked_and_measured(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "6", "--random-range-ratio", "0.5"]
    found = measured(stub, capsys, *arguments, "--ignore-eos", "--goodput", "ttft:60000", "e2el:60000")
    assert (found["completed"], found["failed"], found["num_prompts"], found["model_id"]) == (12, 0, 12, "stub")
    assert (found["request_rate"], found["backend"]) == ("inf", "openai")
    bodies = stub.bodies[1:]
    assert found["total_input_tokens"] == sum(len(body["prompt"]) for body in bodies)
    assert found["total_output_tokens"] == sum(body["max_tokens"] for body in bodies)
    assert {10 <= len(body["prompt"]) <= 30 for body in bodies} == {True} and len(bodies) == 12
    assert {(body["ignore_eos"], body["temperature"], body["stream"]) for body in bodies} == {(True, 0.0, True)}
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert stub.bodies[0]["prompt"] not in [body["prompt"] for body in bodies], "the first request warms no measured prompt"


def test_the_table_tells_latencies_and_errors(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.fail = lambda body: (500, {"error": {"message": "broken"}}) if len(stub.bodies) % 2 == 0 else None
    arguments = ["--num-prompts", "4", "--output-len", "3", "--input-len", "5", "--percentile-metrics", "ttft,e2el"]
    assert bench(stub, *arguments, "--metric-percentiles", "50,99") == 0
    shown = capsys.readouterr().out
    assert "time to first token" in shown and "inter-token" not in shown and "p50" in shown
    assert "2 × HTTP 500: broken" in shown


def test_acceptance_of_drafts_is_read_from_the_server_s_metrics(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-prompts", "2", "--input-len", "3", "--output-len", "4"]
    assert not [name for name in measured(stub, capsys, *arguments) if name.startswith("spec_decode")]
    page = 'vllm:spec_decode_{}_total{{engine="0",model_name="m"{}}} {}\n'

    def set_metrics(scale: int) -> None:
        counts = {"num_drafts": 4, "num_draft_tokens": 8, "num_accepted_tokens": 6}
        lines = [page.format(name, "", scale * count) for name, count in counts.items()]
        lines += [page.format("num_accepted_tokens_per_pos", f',position="{i}"', scale * (4 - 2 * i)) for i in (1, 0)]
        stub.pages["/metrics"] = "".join(lines)

    def answer(body: dict[str, Any]) -> None:
        set_metrics(len(stub.bodies))

    set_metrics(0)
    stub.fail = answer
    found = measured(stub, capsys, *arguments)
    assert (found["spec_decode_acceptance_length"], found["spec_decode_acceptance_rate"]) == (2.5, 75)
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]
    assert found["spec_decode_num_drafts"] == 8, "without the request that waited for the server"
    assert bench(stub, *arguments) == 0
    assert "mean acceptance length" in capsys.readouterr().out


def test_a_server_without_usage_is_noted(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.with_usage = False
    arguments = ["--num-prompts", "2", "--input-len", "3", "--output-len", "4", "--json"]
    assert main(["bench", "serve", "--base-url", stub.url, *arguments]) == 0
    shown = capsys.readouterr()
    assert "reports no usage" in shown.err
    assert json.loads(shown.out)["total_output_tokens"] == 8 and json.loads(shown.out)["total_input_tokens"] == 6


def test_nothing_answered_is_a_failure(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.fail = lambda body: (500, {"error": {"message": "broken"}})
    assert bench(stub, "--num-prompts", "2", "--ready-check-timeout-sec", "0") == 1
    assert "HTTP 500: broken" in capsys.readouterr().out


def test_a_request_that_the_server_refuses_ends_the_run_before_it_begins(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.fail = lambda body: (400, {"error": {"message": "prompt must be text"}})
    assert bench(stub, "--num-prompts", "2") == 1
    assert "prompt must be text" in capsys.readouterr().err
    assert len(stub.bodies) == 1


def test_a_mix_file_gives_lengths(stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    path.write_text(json.dumps({"requests": [[5, 2], [7, 3], [9, 4]]}))
    found = measured(stub, capsys, "--dataset-name", "mix", "--dataset-path", str(path))
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (21, 9)
    assert bench(stub, "--dataset-name", "mix", "--dataset-path", str(path), "--num-prompts", "4") == 2


def test_chat_asks_random_text_of_the_tokenizer(stub: Stub, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path))
    arguments = ["--backend", "openai-chat", "--num-prompts", "3", "--input-len", "9", "--output-len", "2"]
    found = measured(stub, capsys, *arguments, "--tokenizer", tokenizer, "--top-p", "0.5", "--extra-body", '{"user": "me"}')
    assert found["completed"] == 3 and found["tokenizer_id"] == tokenizer
    body = stub.bodies[-1]
    assert isinstance(body["messages"][0]["content"], str) and (body["top_p"], body["user"]) == (0.5, "me")


def test_random_images_are_parts_of_chat_messages(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "openai-chat", "--dataset-name", "random-mm", "--num-prompts", "8", "--input-len", "3"]
    images = ["--random-mm-base-items-per-request", "2", "--random-mm-num-mm-items-range-ratio", "0.5"]
    sizes = ["--random-mm-limit-mm-per-prompt", '{"image": 3}', "--random-mm-bucket-config", "{(16, 24, 1): 0.5, (8, 8, 1): 1}"]
    assert measured(stub, capsys, *arguments, *images, *sizes, "--output-len", "2")["completed"] == 8
    counts, found = set(), set()
    for body in stub.bodies:
        text, *parts = body["messages"][0]["content"]
        assert text["type"] == "text" and len(text["text"].split()) in (3, 128)  # that of the first request is longer
        counts.add(len(parts))
        for part in parts:
            head, data = part["image_url"]["url"].split(",")
            assert head == "data:image/jpeg;base64" and part["type"] == "image_url"
            found.add(Image.open(io.BytesIO(base64.b64decode(data))).size)
    assert counts == {1, 2, 3} and found == {(24, 16), (8, 8)}
    assert (
        bench(stub, *arguments, "--random-mm-base-items-per-request", "9", "--random-mm-limit-mm-per-prompt", '{"image": 3}')
        == 1
    )
    assert "at least 9 images" in capsys.readouterr().err


def test_headers_key_and_model_are_sent(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_API_KEY", "secret")
    assert bench(stub, "--num-prompts", "1", "--model", "other", "--header", "X-Team=a=b", "--num-warmups", "2") == 0
    assert (stub.headers[-1]["authorization"], stub.headers[-1]["x-team"]) == ("Bearer secret", "a=b")
    assert stub.bodies[-1]["model"] == "other" and len(stub.bodies) == 1 + 2 + 1
    stub.bodies.clear()
    assert bench(stub, "--num-prompts", "4", "--lora-modules", "a", "b", "--lora-assignment", "round-robin") == 0
    assert sorted(body["model"] for body in stub.bodies[1:]) == ["a", "a", "b", "b"]


def test_results_are_saved_and_appended(stub: Stub, tmp_path: Path) -> None:
    where = ["--result-dir", str(tmp_path / "new"), "--result-filename", "r.json", "--num-prompts", "2", "--output-len", "2"]
    metadata = ["--label", "first", "--metadata", "gpu=none", "run=1"]
    assert bench(stub, "--save-result", "--save-detailed", *where, *metadata) == 0
    assert bench(stub, "--append-result", *where) == 0
    first, second = map(json.loads, (tmp_path / "new" / "r.json").read_text().splitlines())
    assert (first["label"], first["gpu"], first["run"], first["output_lens"]) == ("first", "none", "1", [2, 2])
    assert "output_lens" not in second and second["completed"] == 2


def test_the_result_goes_into_a_given_file(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "r.json"
    assert bench(stub, "--num-prompts", "1", "--output-json", str(path)) == 0
    assert json.loads(path.read_text())["completed"] == 1
    stub.reset()
    assert bench(stub, "--num-prompts", "1", "--output-json", "/dev/null/r.json") == 1
    assert "cannot write /dev/null/r.json" in capsys.readouterr().err and not stub.bodies


def test_a_result_file_without_a_name_is_named_after_the_run(stub: Stub, tmp_path: Path) -> None:
    arguments = ["--result-dir", str(tmp_path), "--max-concurrency", "2", "--request-rate", "500"]
    assert bench(stub, "--save-result", "--num-prompts", "1", *arguments) == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("openai-500qps-concurrency2-stub-") and path.suffix == ".json"


@pytest.mark.plot
def test_a_run_is_drawn(stub: Stub, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    assert bench(stub, "--num-prompts", "3", "--plot", str(tmp_path / "run.svg")) == 0
    assert (tmp_path / "run.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rate", "0"], "must be above 0, or inf"),
        (["--burstiness", "inf"], "must be above 0"),
        (["--range-ratio", "1"], "less than 1"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--dataset-path", "x"], "add --dataset-name"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps"),
        (["--goodput", "itl:5"], "'itl:5' must be NAME:MILLISECONDS"),
        (["--goodput", "ttft:nan"], "must be NAME:MILLISECONDS"),
        (["--metadata", "x"], "'x' must be NAME=VALUE"),
        (["--header", "x"], "'x' must be NAME=VALUE"),
        (["--percentile-metrics", "tft"], "'tft' is none of"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
        (["--extra-body", "[]"], "not a JSON object"),
        (["--chat-template-kwargs", "{}"], "--chat-template-kwargs is for --backend openai-chat"),
        (
            ["--dataset-name", "hf"],
            "'hf' is not offered (one of random, random-mm, mix, sharegpt, custom, prefix_repetition): its dataset",
        ),
        (["--hf-split", "train"], "--hf-split train is refused: its dataset is not offered; write the prompts to a file"),
        (["--tokenizer-mode", "kimi_k3"], "--tokenizer-mode kimi_k3 is refused"),
        (["--num-promts", "5"], "did you mean '--num-prompts'?"),
        (["--random", "5"], "ambiguous option '--random': it may be --random-input-len, --random-output-len"),
        (["--dataset-name", "random-mm"], "random-mm is for --backend openai-chat"),
        (["--random-mm-bucket-config", "{(720, 1280, 16): 0.5}"], "asks for videos; models see images"),
        (["--random-mm-bucket-config", "{(720, 1280, 1): 0}"], "no size whose probability is above 0"),
        (["--random-mm-bucket-config", "{(720, 1280): 1}"], "must be a dict of (height, width, frames)"),
        (["--random-mm-bucket-config", "__import__('os')"], "must be a dict of (height, width, frames)"),
        (["--random-mm-limit-mm-per-prompt", '{"audio": 1}'], 'must be such as {"image": 4}'),
        (["--random-mm-num-mm-items-range-ratio", "1.1"], "must be from 0 to 1"),
    ],
)
def test_wrong_arguments_are_refused(
    stub: Stub, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(stub, *arguments) == 2
    assert message in capsys.readouterr().err
    assert not stub.bodies


def test_flags_of_vllm_s_benchmark(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    names = "--model org/model --served-model-name served --backend openai-chat --num-prompt 2 --output-len 3"
    arguments = [*names.split(), "--chat-template-kwargs", '{"enable_thinking": false}', "--trust-remote-code"]
    found = measured(stub, capsys, *arguments, "--tokenizer-mode", "auto", "--skip-tokenizer-init", "--disable-shuffle")
    assert found["completed"] == 2 and {body["model"] for body in stub.bodies} == {"served"}
    assert {body["chat_template_kwargs"]["enable_thinking"] for body in stub.bodies} == {False}


def test_serve_is_named_where_bench_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "bench serve" in capsys.readouterr().out
    assert main(["bench", "-q", "serve"]) == 2
    assert "must follow `bench` at once" in capsys.readouterr().err
    assert main(["bench", "serve", "--help=ramp"]) == 0
    assert "--ramp-up-strategy" in capsys.readouterr().out


def test_embeddings_are_asked_for_within_a_trace(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "openai-embeddings", "--num-prompts", "3", "--input-len", "9", "--disable-tqdm", "--profile"]
    found = measured(stub, capsys, *arguments, "--extra-body", '{"dimensions": 8}')
    assert (found["completed"], found["total_input_tokens"], found["total_output_tokens"]) == (3, 27, 0)
    assert found["mean_e2el_ms"] > 0
    first, begin, *asked, end = stub.bodies
    assert (begin, end) == ({"path": "/start_profile"}, {"path": "/stop_profile"}) and len(asked) == 3
    assert set(asked[0]) == set(first) == {"model", "input", "dimensions"}
