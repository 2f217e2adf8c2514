"""Ends of engine processes, and how hanging ones are found. Most tests have a process of their own."""

import asyncio
import faulthandler
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxllm.async_llm import AsyncLLM
from jaxllm.engine import messages, process_core, sockets
from jaxllm.engine.launch import socket_directory
from jaxllm.engine.process import EngineLoop
from jaxllm.engine.sockets import EXIT_HUNG, Listener, Pulse, Stop
from jaxllm.errors import EngineDeadError, EngineStalledError
from tests.helpers.engine_processes import (
    FullOutbox,
    Served,
    begun,
    run,
    served,
    text_of,
    until,
)
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.served_core import SLOW_FACTORY
from tests.helpers.tiny_tokenizers import write_tokenizer


async def seconds_until_dead(llm: AsyncLLM, cause: Callable[[], None], num_requests: int = 20) -> float:
    """How long after the cause every request has ended with EngineDeadError."""
    tasks = [await begun(llm, request_id=str(n)) for n in range(num_requests)]
    start = time.monotonic()
    cause()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.monotonic() - start
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert llm.dead_error is not None and not llm.is_running
    for call in (text_of(llm), llm.check_health(), llm.get_metrics()):
        with pytest.raises(EngineDeadError):
            await call
    return seconds


def test_every_request_hears_of_the_engine_s_end_at_once(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm:
                assert await seconds_until_dead(llm, engine.process.kill) < 30

    run(main())


def test_an_engine_that_drains_ends_once_every_client_has_let_it_go(model_directory: Path) -> None:
    async def work() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm, engine.connected(1) as other:
                client = other._core._client  # type: ignore[attr-defined]
                client.on_draining = lambda: None
                answers = await begun(llm, request_id="a"), await begun(other, request_id="b")
                client.drain()
                await until(lambda: client.is_draining)
                late = engine.client(2)
                await llm.abort("a")
                assert await answers[0]
                assert await text_of(other, request_id="c"), "what a client sends before it lets go is answered"
                await other.abort("b")
                assert await answers[1] and engine.process.poll() is None
                client.let_go()
                await until(lambda: engine.process.poll() is not None)
                assert engine.process.returncode == 0 and not late.is_ready
                late.close()

    run(work())


def test_a_prefill_engine_that_drains_ends_once_its_blocks_are_fetched(model_directory: Path) -> None:
    async def work() -> None:
        with served(model_directory) as engine:
            leased = model_directory / "leased"
            leased.touch()
            try:
                async with engine.connected() as llm:
                    client = llm._core._client  # type: ignore[attr-defined]
                    client.drain()
                    await until(lambda: client.is_draining)  # it is let go at once
                    await asyncio.sleep(1.0)
                    assert engine.process.poll() is None
                    leased.unlink()
                    await until(lambda: engine.process.poll() is not None)
                    assert engine.process.returncode == 0
            finally:
                leased.unlink(missing_ok=True)

    run(work())


def test_a_fatal_step_is_told_and_ends_the_process(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm:
                with pytest.raises(EngineDeadError, match="the device is lost"):
                    await text_of(llm, "die now")
                assert "the device is lost" in str(llm.dead_error)
                assert await asyncio.to_thread(engine.process.wait, 60) == 1

    run(main())


@pytest.mark.slow
def test_an_engine_process_that_stands_still_is_found(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            client = engine.client(silence_seconds=2.0, stall_seconds=0.75)
            told: list[str | None] = []
            client.on_stall = told.append
            llm = await AsyncLLM.connect(client)
            task = await begun(llm)
            await llm.check_ready()
            engine.process.send_signal(signal.SIGSTOP)
            await until(lambda: llm.replicas()[0].state == "stalled")
            with pytest.raises(EngineStalledError, match="no sign of life from the engine process for 1 s"):
                await llm.check_ready()
            await llm.check_health()
            await until(lambda: told)
            engine.process.send_signal(signal.SIGCONT)
            await until(lambda: llm.replicas()[0].state == "serving")
            await llm.check_ready()
            assert not task.done() and await text_of(llm, request_id="s") == "one two three"
            await until(lambda: len(told) == 2)
            assert told[0] is not None and told[1] is None
            engine.process.send_signal(signal.SIGSTOP)
            with pytest.raises(EngineDeadError, match="no sign of life"):
                await task
            client.close()

    run(main())


def test_a_step_that_hangs_is_found_but_not_one_that_compiles(
    model_directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_core, "SHARE_SECONDS", 0.05)

    async def programs(llm: AsyncLLM) -> dict[str, float]:
        metrics = await llm.get_metrics()
        return {metric.labels["state"]: metric.value for metric in metrics if metric.name == "jaxllm:awaited_programs"}

    async def main() -> None:
        with served(model_directory, step_timeout_seconds=1.0, stall_timeout_seconds=0.25) as engine:
            async with engine.connected() as llm:
                task = asyncio.create_task(text_of(llm, "compile first"))
                while await programs(llm) != {"ready": 1, "missing": 2}:
                    assert not task.done(), "the programs that the request waits for are not reported"
                await until(lambda: llm.replicas()[0].detail == "compiling program 2 of 3, for 1 s")
                await llm.check_ready()
                assert await task == "one two three"
                assert await programs(llm) == {"ready": 0, "missing": 0}
                hung = asyncio.create_task(text_of(llm, "hang now"))
                await until(lambda: llm.replicas()[0].state == "stalled")
                assert "in one step for" in llm.replicas()[0].detail
                with pytest.raises(EngineDeadError, match="--step-timeout 1"):
                    await hung
            assert await asyncio.to_thread(engine.process.wait, 60) == EXIT_HUNG

    run(main())
    assert "served_core.py" in capfd.readouterr().err, "no stacks in the log"


def test_loading_is_told_with_phase_and_amount_and_its_failure_with_the_reason(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)

    async def main() -> None:
        with served(directory, SLOW_FACTORY) as engine:
            client = engine.client()
            await until(lambda: client.status is not None and client.status.phase == "loading weights")
            assert client.status is not None
            assert (client.status.state, client.status.done, client.status.total) == ("loading", 1, 4)
            (directory / "bad").touch()
            (directory / "go").touch()
            with pytest.raises(EngineDeadError, match="the weights are torn"):
                await client.ready()
            assert await asyncio.to_thread(engine.process.wait, 60) == 1
            client.close()

    run(main())


def test_the_engine_ends_when_its_parent_is_gone(model_directory: Path) -> None:
    async def main() -> None:
        with served(model_directory) as engine:
            async with engine.connected() as llm:
                assert await text_of(llm) == "one two three"
                assert engine.process.stdin is not None
                engine.process.stdin.close()  # as the kernel does when the parent dies
                await until(lambda: llm.dead_error is not None)
                assert await asyncio.to_thread(engine.process.wait, 60) == 1

    run(main())


@pytest.mark.parametrize(
    ("call", "state"), [("wake_up", "calling"), ("sleep", "calling"), ("list_adapters", "running"), ("is_paused", "running")]
)
def test_the_heartbeat_tells_short_calls_that_hang_from_long_ones(
    call: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, commands, pulse = FakeEngineCore(lambda request: [5]), queue.SimpleQueue(), Pulse()  # type: ignore[var-annotated]
    loop = EngineLoop(core, commands, FullOutbox(room=9), pulse)  # type: ignore[arg-type]
    found: list[str] = []
    monkeypatch.setattr(core, call, lambda *_: found.append(pulse.state()))
    commands.put(messages.Call("client", 1, messages.call_of(call)))
    commands.put(lambda: found.append(pulse.state()))
    commands.put(Stop())
    loop.run()
    assert found == [state, "running"]
    pulse.rest()
    assert pulse.state() == "idle"


@pytest.mark.parametrize(
    ("call", "beats", "death"),
    [
        ("", (100.0, 101.0, 102.5), "a step has not ended for 2 s, more than --step-timeout 2 s"),
        ("", (100.0, 101.0, 301.0, 302.0), None),  # this process did not run
        ("wake_up", (100.0, 102.5), None),
        ("wake_up", (100.0, 109.0), "wake_up has not ended for 9 s, more than --compile-timeout 8 s"),
    ],
)
def test_the_watch_ends_what_hangs_but_not_after_a_time_in_which_it_did_not_run(
    call: str, beats: tuple[float, ...], death: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=beats[0])
    monkeypatch.setattr(sockets, "time", clock)
    pulse = Pulse(is_loaded=True)
    with socket_directory() as directory:
        listener = Listener(
            str(directory), pulse, step_timeout_seconds=2.0, compile_timeout_seconds=8.0, stall_timeout_seconds=1.0
        )
        deaths: list[str] = []
        monkeypatch.setattr(listener, "_die", deaths.append)
        pulse.begin(call)
        for clock.now in beats:
            listener._beat()
        listener._inbox.close()
        listener.context.destroy(linger=0)
    assert deaths == ([] if death is None else [death])


def test_a_client_that_did_not_run_does_not_take_that_for_the_engine_s_silence(
    shared: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with shared.connected() as llm:
            client = llm._core._client  # type: ignore[attr-defined]
            monkeypatch.setattr(client, "_fetch", lambda: None)
            client._heard = client._ticked = time.monotonic() - 1000.0
            client._tick()
            assert client.dead_error is None and client.stall is None
            client._heard = time.monotonic() - 1000.0
            client._tick()
            assert "no sign of life" in str(client.dead_error)

    run(main())
