import json
from collections.abc import Iterator

import pytest

from jaxllm.cli.main import main
from jaxllm.http_client.scrape import read_scrape, view
from jaxllm.http_client.view_text import as_lines
from tests.helpers.stub_server import Stub, running_stub

PAGE = """
jaxllm:num_requests_running{engine="0",model_name="m"} 2.0
jaxllm:num_requests_waiting{engine="0",model_name="m"} 7.0
jaxllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
jaxllm:generation_tokens_total{engine="0",model_name="m"} 100
jaxllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 0.0
jaxllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 0.0
jaxllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 4
http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 7.0
"""


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with running_stub() as stub:
        yield stub


def top(stub: Stub, *arguments: str) -> int:
    return main(["top", "--url", stub.url, "--once", "--interval", "0.01", *arguments])


def test_once_tells_the_load(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.pages["/metrics"] = PAGE
    assert top(stub) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["running"], lines["waiting"], lines["generation"]) == ("2 requests", "7 requests", "0.0 tokens/s")
    assert lines["ended"] == "stop 4 (+0)" and lines["HTTP"] == "2xx 7 (+0)"


def test_programs_that_requests_wait_for_are_shown(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    awaited = 'jaxllm:awaited_programs{{engine="0",model_name="m",state="{}"}} {}\n'
    stalled = 'jaxllm:replica_state{engine="0",model_name="m",state="stalled"} 1\n'
    stub.pages["/metrics"] = PAGE + awaited.format("ready", 1) + awaited.format("missing", 3) + stalled
    assert top(stub) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "compiling           program 2 of 4; requests wait for it" in lines
    assert "stalled             1 engines seem to hang" in lines


def test_acceptance_of_drafts_is_shown(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    pages = [PAGE + drafts(10, 20, 5), PAGE + drafts(14, 28, 11)]
    stub.pages["/metrics"] = pages[0]
    assert top(stub) == 0
    assert "drafts              –" in capsys.readouterr().out.splitlines()
    lines = as_lines(view(*(read_scrape(page, 0.0) for page in pages)))
    assert "drafts              75.0% accepted, 2.50 tokens a step of a request" in lines


def test_padding_of_the_encoder_is_shown() -> None:
    def page(patches: int, computed: int) -> str:
        counts = {"mm_encoder_patches": patches, "mm_encoder_computed_patches": computed}
        return PAGE + "".join(f'jaxllm:{name}_total{{model_name="m"}} {count}\n' for name, count in counts.items())

    lines = as_lines(view(*(read_scrape(text, 0.0) for text in (page(100, 256), page(300, 512)))))
    assert "encoder             200 patches, 22% of what it computed was padding" in lines


def test_host_memory_is_shown_where_blocks_are_kept_there() -> None:
    def page(num_bytes: float, hits: int, lost: int) -> str:
        gauges = {"num_requests_loading": 3, "kv_offload_cpu_cache_usage_perc": 0.5}
        totals = {
            "kv_offload_store_bytes": num_bytes,
            "kv_offload_load_bytes": 2 * num_bytes,
            "kv_offload_stores_skipped": lost,
        }
        totals |= {"external_prefix_cache_queries": 10 * hits, "external_prefix_cache_hits": 8 * hits}
        counts = gauges | {f"{name}_total": value for name, value in totals.items()}
        return PAGE + "".join(f'jaxllm:{name}{{engine="0",model_name="m"}} {count}\n' for name, count in counts.items())

    def line(before: str, now: str) -> str:
        lines = dict(line.split("  ", 1) for line in as_lines(view(read_scrape(before, 0.0), read_scrape(now, 2.0))))
        return lines.get("host memory", "").strip()

    shown = "50.0%, stores {} GB/s, loads {} GB/s, 3 requests loading"
    assert line(page(1e9, 100, 7), page(7e9, 200, 9)) == shown.format("3.0", "6.0") + ", hits 80.0%, 2 blocks not copied"
    assert line(page(1e9, 100, 7), page(1e9, 100, 7)) == shown.format("0.0", "0.0")
    assert line(PAGE, PAGE) == ""


def drafts(num_drafts: int, num_draft_tokens: int, num_accepted: int) -> str:
    counts = {"num_drafts": num_drafts, "num_draft_tokens": num_draft_tokens, "num_accepted_tokens": num_accepted}
    return "".join(f'jaxllm:spec_decode_{name}_total{{engine="0",model_name="m"}} {count}\n' for name, count in counts.items())


def test_once_as_json_is_for_scripts(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.pages["/metrics"] = PAGE
    assert top(stub, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_requests_running"], found["kv_cache_usage"], found["latency_ms"]) == (2, 0.25, {"ttft": None})


@pytest.mark.parametrize("page", ["<html>hello</html>", "go_threads 5\n"])
def test_a_page_without_our_metrics_is_an_error(stub: Stub, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    stub.pages["/metrics"] = page
    assert top(stub) == 1
    assert f"{stub.url}/metrics" in capsys.readouterr().err


def test_a_server_without_metrics_is_an_error(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.pages.clear()
    assert top(stub) == 1
    assert "HTTP 404" in capsys.readouterr().err


def test_json_is_one_reading() -> None:
    assert main(["top", "--json"]) == 2
