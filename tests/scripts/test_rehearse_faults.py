"""Findings of rehearsals of killed engines: how each client's request ended, wrong answers, and memory of dead processes."""

import asyncio
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from jaxllm.async_llm import AsyncLLM
from scripts.rehearse_faults import FAULTS
from scripts.rehearsing.mixed_load import THRESHOLD, Answer, differences, mixed
from scripts.rehearsing.server import holders_of_dead_memory
from scripts.rehearsing.streams import LEFT, WHOLE, Stream, Streams
from tests.helpers.live_server import LiveServer
from tests.helpers.scripted_core import fake_core
from tests.helpers.tiny_tokenizers import write_tokenizer


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over a fake engine, which takes seconds for thousands of tokens."""
    core = fake_core(write_tokenizer(tmp_path_factory.mktemp("served")), max_model_len=8192)
    core.before_step = lambda: time.sleep(0.001)
    with AsyncLLM(core=core) as engine, LiveServer.start(engine) as server:
        yield f"http://{server.host}:{server.port}"


async def ended(url: str, *streams: Stream) -> Streams:
    load = Streams(url, streams)
    load.start()
    await load.ended(20.0)
    return load


def test_answers_are_kept_streamed_and_not(url: str) -> None:
    async def run() -> None:
        [streamed, whole] = mixed(3, 8, "kept")[1:]
        whole.body["prompt"] = streamed.body["prompt"]
        load = await ended(url, streamed, whole)
        assert streamed.body["stream"] and not whole.body["stream"] and load.counts() == {WHOLE: 2}
        assert streamed.text == whole.text != ""
        assert await differences(url, [streamed, whole]) == []
        cut, other = replace(streamed, text=streamed.text[:3], outcome=LEFT), replace(whole, text=whole.text[:3])
        wrong = replace(streamed, text="?" + streamed.text[:3], outcome=LEFT)
        found = await differences(url, [cut, other, wrong])
        assert len(found) == 2 and all(" in place of " in each for each in found), "a cut answer may be the beginning alone"

    asyncio.run(run())


def test_clients_that_leave_have_no_failure(url: str) -> None:
    async def run() -> None:
        body = {"prompt": "leaves", "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}
        load = await ended(url, Answer(body, leaves_after_seconds=0.05))
        assert load.counts() == {LEFT: 1} and load.last_failure == 0.0
        load = await ended(url, Answer({**body, "max_tokens": -1}))
        assert [outcome[:4] for outcome in load.counts()] == ["400 "] and load.last_failure > 0.0

    asyncio.run(run())


def test_the_load_has_all_kinds() -> None:
    answers = mixed(32, 8, "all")
    kinds = {
        (len(each.body["prompt"]) > 4 * THRESHOLD, each.body["stream"], each.leaves_after_seconds is not None)
        for each in answers
    }
    assert {kind[:2] for kind in kinds} == {(long, streamed) for long in (True, False) for streamed in (True, False)}
    assert {kind[0] for kind in kinds if kind[2]} == {True, False}
    assert len({each.body["prompt"].partition(":")[0] for each in answers}) == 32


def test_memory_whose_owner_has_ended_is_found() -> None:
    owned = os.memfd_create("jaxllm-kv")
    os.ftruncate(owned, 4096)
    writer = mmap.mmap(owned, 4096)
    reader = mmap.mmap(owned, 4096, prot=mmap.PROT_READ)
    try:
        assert holders_of_dead_memory([os.getpid()]) == []
        writer.close()
        assert holders_of_dead_memory([os.getpid(), 2**22 + 1]) == [os.getpid()]
    finally:
        reader.close()
        os.close(owned)
    assert holders_of_dead_memory([os.getpid()]) == []


def test_the_page_has_a_row_of_each_fault() -> None:
    page = (Path(__file__).parents[2] / "docs" / "FAULTS.md").read_text(encoding="utf-8")
    assert [fault.title for fault in FAULTS.values() if f"| {fault.title}" not in page] == []
