"""Replies, metrics and log lines about blocks that leave for host memory and come back."""

import logging

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.http_client.scrape import read_scrape, view
from jaxllm.http_client.view_text import as_lines
from server.app import create_app
from tests.helpers.core_client import make_prompts
from tests.kv_tiers.test_offloading import NUM_BLOCKS, make
from tests.server.client import Client
from tests.server.conftest import options


@pytest.mark.slow
def test_replies_metrics_and_top_agree_on_where_prompts_came_from(caplog: pytest.LogCaptureFixture) -> None:
    prompts = make_prompts(8)
    with caplog.at_level(logging.INFO, "jaxllm"):
        core = make("qwen3")
    num_blocks = core.stats().num_host_slots
    (fits,) = [line for line in caplog.messages if line.startswith("host memory: ")]
    assert fits.startswith(f"host memory: {num_blocks} blocks of ") and fits.endswith(f" fit, {16 * num_blocks} tokens")
    given = options(enable_prompt_tokens_details=True)
    with AsyncLLM(core=core) as engine, Client(create_app(engine, given)) as client:
        empty = read_scrape(client.get("/metrics").text, 0.0)
        usages = [
            client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4}).json()["usage"] for prompt in prompts * 3
        ]
        page = client.get("/metrics").text
    details = [usage["prompt_tokens_details"] for usage in usages]
    of_host = sum(each.get("cached_tokens_by_source", {}).get("host", 0) for each in details)
    assert of_host > 16 * NUM_BLOCKS
    for each in details:
        assert sum(each.get("cached_tokens_by_source", {"device": each["cached_tokens"]}).values()) == each["cached_tokens"]
    counts = read_scrape(page, 1.0)
    assert counts.values["external_prefix_cache_hits"] == of_host, "no request was preempted"
    loaded = [
        line for line in page.splitlines() if line.startswith("jaxllm:prompt_tokens_by_source_total{") and 'tier="host"' in line
    ]
    assert [float(line.split()[-1]) for line in loaded] == [of_host]
    assert counts.values["prompt_tokens_by_source"] == counts.values["prompt_tokens"] == sum(map(len, prompts)) * 3
    assert counts.values["kv_offload_load_size_sum"] == counts.values["kv_offload_load_bytes"] > 0
    num_copies = [counts.values[f"kv_offload_{way}_size_count"] for way in ("load", "store")]
    assert counts.values["kv_offload_copy_seconds_count"] == sum(num_copies) and min(num_copies) > 0
    (shown,) = [line for line in as_lines(view(empty, counts)) if line.startswith("host memory")]
    assert "0 requests loading, hits " in shown
