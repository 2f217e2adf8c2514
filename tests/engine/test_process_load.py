"""The load that an engine process reports, and the metrics that API servers exchange through it."""

import asyncio
import itertools
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine import messages, process, process_core
from jaxllm.engine.client import EngineClient
from jaxllm.engine.process import EngineLoop
from jaxllm.engine.sockets import Pulse, Stop
from jaxllm.errors import EngineDeadError
from jaxllm.metrics.metric import Counter
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from tests.helpers.engine_processes import (
    ENDLESS,
    FullOutbox,
    Served,
    begun,
    num_running,
    run,
    served,
    text_of,
    until_idle,
    until_running,
)
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.waiting import wait_until


def test_two_clients_may_use_the_same_ids_and_share_metrics(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_core, "SHARE_SECONDS", 30.0)  # a busy machine may take more than a second

    def succeeded(metrics: list[Any]) -> int:
        return sum(m.value for m in metrics if m.name == "jaxllm:request_success" and m.labels["finished_reason"] == "stop")

    async def main() -> None:
        async with shared.connected(0) as one, shared.connected(1) as two:
            before = succeeded(await one.get_metrics())
            texts = await asyncio.gather(*(text_of(llm, request_id="same") for llm in (one, two) for _ in range(5)))
            assert texts == ["one two three"] * 10
            assert succeeded(await one.get_metrics()) - before == 10
            two.shutdown()
            await until_idle(one)
            assert succeeded(await one.get_metrics()) - before == 10, "what a client counted was lost with it"

    run(main())


def test_a_client_that_does_not_answer_holds_up_one_scrape_alone(shared: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        stopped = shared.client(1)
        await stopped.ready()
        await stopped.call(messages.ShareMetrics([Counter("jaxllm:test_stopped", {}, "", 7)]))

        def seen(metrics: list[Any]) -> list[float]:
            return [metric.value for metric in metrics if metric.name == "jaxllm:test_stopped"]

        async with shared.connected(0) as llm:
            monkeypatch.setattr(process_core, "SHARE_SECONDS", 0.05)
            assert seen(await llm.get_metrics()) in ([], [7])  # it waits as long as it may
            await llm.call_core("is_paused")  # so the engine has been asked
            await asyncio.sleep(1.1)
            monkeypatch.setattr(process_core, "SHARE_SECONDS", 600.0)
            async with asyncio.timeout(60):
                assert seen(await llm.get_metrics()) == [7]
        stopped.close()

    run(main())


def test_metrics_that_a_client_shared_before_it_was_asked_do_not_answer_a_scrape(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_core, "SHARE_SECONDS", 30.0)  # a busy machine may take more than a second

    def share(client: EngineClient, count: int, asked: int) -> asyncio.Future[Any]:
        own = [Counter("jaxllm:test_shared", {}, "", count)]
        return client.call(messages.ShareMetrics(own, asked=asked))

    async def main() -> None:
        other = shared.client(1)
        await other.ready()
        await share(other, 1, asked=0)
        replies: list[asyncio.Future[Any]] = []

        def asked(number: int) -> None:
            replies.append(share(other, 1, asked=number - 1))  # was under way
            replies.append(share(other, 2, asked=number))

        other.on_want_metrics = asked
        async with shared.connected(0) as llm:
            found = await llm.get_metrics()
            assert [m.value for m in found if m.name == "jaxllm:test_shared"] == [2]
            await asyncio.gather(*replies)
        other.close()

    run(main())


def test_metrics_are_told_while_a_step_does_not_end(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_core, "SHARE_SECONDS", 0.05)

    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm:
                task = asyncio.create_task(text_of(llm, "hang now"))
                seconds = 0.0
                while seconds < process_core.SHARE_SECONDS:  # until the engine answers no more
                    start = time.monotonic()
                    metrics = await llm.get_metrics()
                    seconds = time.monotonic() - start
                assert "jaxllm:num_requests_running" in {metric.name for metric in metrics}
                engine.process.kill()
                with pytest.raises(EngineDeadError):
                    await task

    run(main())


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_load_is_told_when_requests_come_or_end_and_now_and_then_but_not_in_every_step(
    num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, outbox, commands = FakeEngineCore(lambda request: []), FullOutbox(room=10_000), queue.SimpleQueue()  # type: ignore[var-annotated]
    pulse, num_calls, stats = Pulse(), itertools.count(), core.stats
    monkeypatch.setattr(core, "stats", lambda: (next(num_calls), stats())[1])
    loop = EngineLoop(core, commands, outbox, pulse, num_replicas=num_replicas)  # type: ignore[arg-type]

    def add(request_id: str, max_tokens: int) -> None:
        params = replace(ENDLESS, max_tokens=max_tokens)
        request = EngineCoreRequest(request_id=request_id, prompt_token_ids=[1], sampling_params=params)
        commands.put(messages.Add("client", request))

    def told(num_steps: int) -> list[int]:
        """The numbers of running requests that so many steps tell. The heartbeat has the latest."""
        outbox.sent.clear()
        for _ in range(num_steps):
            loop._obey()
            loop._step()
        found = [each.load for each in outbox.sent if isinstance(each, messages.Outputs) and each.load is not None]
        if found:
            assert pulse.load is found[-1] or pulse.load == found[-1]
        return [load.stats.num_running for load in found]

    for each in ("LOAD_SECONDS", "_UPDATE_SECONDS"):
        monkeypatch.setattr(process, each, 3600.0)
    add("long", 100)
    assert told(50) == [1]
    add("short", 20)
    before = next(num_calls)
    assert told(30) == [2, 1], "once it has come and once it has ended"
    assert next(num_calls) - before < 6
    for each in ("LOAD_SECONDS", "_UPDATE_SECONDS"):
        monkeypatch.setattr(process, each, 0.0)
    assert told(5) == [1] * 5
    for each in ("LOAD_SECONDS", "_UPDATE_SECONDS"):
        monkeypatch.setattr(process, each, 3600.0)
    assert told(15) == [0] and not core.has_unfinished_requests(), "the last one has ended"
    core.outputs, before = [EngineCoreOutput("aborted", [5])], next(num_calls)
    loop._step()
    assert next(num_calls) - before == 2, "no further step comes"
    commands.put(Stop())
    loop.run()
    updates = [each.load.stats.num_running for each in outbox.sent if isinstance(each, messages.Update)]
    assert updates == ([] if num_replicas == 1 else [0]), "what is owed is sent before it waits"


def test_a_client_knows_the_load_once_requests_have_come_and_ended(shared: Served) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
            await until_idle(llm)
            first = await begun(llm)
            assert (await llm.load()).num_running == 1
            second = await begun(llm, request_id="s")
            assert (await llm.load()).num_running == 2 == await num_running(llm)
            second.cancel()
            await until_running(llm, 1)
            assert (await llm.load()).num_running == 1
            assert await text_of(llm, request_id="t") == "one two three"
            assert (await llm.load()).num_running == 1
            first.cancel()
            await until_idle(llm)

    run(main())


def test_an_engine_without_work_tells_that_its_load_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine fetches what a prefill engine keeps while that one has nothing to do."""
    monkeypatch.setattr(process, "_IDLE_LOAD_SECONDS", 0.001)
    core, commands = FakeEngineCore(lambda request: [5]), queue.SimpleQueue()  # type: ignore[var-annotated]
    numbers, usual = itertools.chain([1, 1, 1], itertools.repeat(0)), core.stats()
    monkeypatch.setattr(core, "stats", lambda: replace(usual, num_kv_leases=next(numbers)))
    outbox = FullOutbox(room=1000)
    loop = EngineLoop(core, commands, outbox, Pulse(), num_replicas=2)  # type: ignore[arg-type]

    def told() -> list[int]:
        return [message.load.stats.num_kv_leases for message in outbox.sent if isinstance(message, messages.Update)]

    def stop() -> None:
        try:
            wait_until(lambda: 0 in told())
        finally:
            commands.put(Stop())

    stopping = threading.Thread(target=stop)
    stopping.start()
    loop.run()
    stopping.join()
    assert (told()[0], told()[-1]) == (1, 0)
