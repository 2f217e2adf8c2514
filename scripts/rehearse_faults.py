"""Breaks a server on purpose, in every way that it must survive, and reports its clients' view: the table in docs/FAULTS.md.

Each fault has a fresh `jaxllm serve demo` (its real processes) and 32 concurrent streams, unless stated otherwise. Exits
with 1 if a client got a wrong result, was informed too late, or anything was left behind.
"""

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxllm.http_client.client import ServerClient, ServerError
from scripts.rehearsing.attackers import HOSTILE, NUM_ATTACKERS, attack
from scripts.rehearsing.mixed_load import THRESHOLD, Answer, differences, mixed
from scripts.rehearsing.other_host import OtherHost
from scripts.rehearsing.server import RehearsedServer, rehearsed
from scripts.rehearsing.streams import CLOSED, LEFT, WHOLE, Streams, alike, is_among, told
from scripts.soak import gauges_at_rest, hold

NUM_STREAMS = 32
LONG, SHORT = 1900, 200
"""Tokens of a stream that a fault interrupts, and of one that is to become whole."""
KNOWN_WITHIN_SECONDS = 1.0
STEP_TIMEOUT_SECONDS = 3.0
NOTICE_SECONDS = 2.0
"""More, if it is in the midst of a collective, which fails before its connection is closed."""
SILENCE_SECONDS = 10.0
"""Within which a host that is silent, and not gone, must be noticed."""
ON_TWO_HOSTS = "--data-parallel-size 2 --nnodes 2"
STAGES_ON_TWO_HOSTS = "--pipeline-parallel-size 2 --nnodes 2 --warmup background"
TWO_ROLES = f"--prefill 1 --decode 2 --prefill-threshold {THRESHOLD} --kv-offloading-size 0.5 --warmup lazy --max-num-batched-tokens 128"
LEASES_END_WITHIN_SECONDS = 45.0
"""Leases that no engine asked for end after 30 s."""
BETWEEN_LEGS_SECONDS = 8.0
"""Prompts are computed within it, and their leases do not end."""
LAYERS_ON_TWO_HOSTS = "--tensor-parallel-size 2 --nnodes 2 --warmup background"


@dataclass
class Row:
    """Result of one fault."""

    clients: str = ""
    seconds: float | None = None
    """From the fault until the last client knew."""
    after: str = ""
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)


@dataclass(frozen=True)
class Fault:
    """A thing that happens to a server."""

    title: str
    happens: Callable[[RehearsedServer, Row], Awaitable[None]]
    flags: str = ""
    variable: str = ""
    """JAXLLM_FAULT."""
    has_other_host: bool = False

    def described(self) -> str:
        """With what makes it happen."""
        made_by = [self.flags, f"JAXLLM_FAULT={self.variable}" if self.variable else ""]
        told = ", ".join(f"`{each}`" for each in made_by if each)
        return f"{self.title} ({told})" if told else self.title


async def streams_of(server: RehearsedServer, num_tokens: int) -> Streams:
    """Streams that have all begun (or been refused)."""
    streams = Streams(server.url, alike(NUM_STREAMS, num_tokens))
    streams.start()
    await streams.begun()
    return streams


async def outcomes(row: Row, streams: Streams, allowed: Sequence[str], since: float | None = None) -> Counter[str]:
    """Note how the streams ended, and how long after the fault the last one knew."""
    await streams.ended()
    counts = streams.counts()
    row.clients = told(counts)
    if since is not None:
        row.seconds = max(0.0, streams.last_failure - since)
    row.expect(is_among(counts, allowed), f"clients may only see {', '.join(allowed)}")
    return counts


async def goes_on(server: RehearsedServer, row: Row, after: str = "serves on") -> None:
    """The server serves, nothing is left in it, and it ends in order."""
    async with ServerClient(server.url, timeout_seconds=60) as client:
        try:
            await client.get("/health")
            await client.post_json("/v1/completions", {"prompt": "import ", "max_tokens": 4})
        except ServerError as error:
            row.wrong.append(f"it does not serve: {error}")
    gauges = await gauges_at_rest(server.url)
    row.expect(not any(gauges.values()), f"gauges are {gauges}")
    row.wrong += await asyncio.to_thread(server.left_while_alive)
    server.process.send_signal(signal.SIGTERM)
    await ends(server, row, 0, after)


async def ends(server: RehearsedServer, row: Row, code: int, after: str = "") -> None:
    """The server ends by itself with this code, and nothing of it is left."""
    found = await asyncio.to_thread(server.exit_code)
    row.after = after or f"exit code {found}"
    row.expect(found == code, f"exit code {found} in place of {code}")
    row.wrong += await asyncio.to_thread(server.left_behind)


async def engine_killed(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, LONG)
    [engine] = server.pids("engine.process")
    since = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    await outcomes(row, streams, ["error event engine_dead"], since)
    row.expect((row.seconds or 0) < KNOWN_WITHIN_SECONDS, f"they knew after {row.seconds:.2f} s")
    await ends(server, row, 1)


async def replica_killed(server: RehearsedServer, row: Row) -> None:
    since = await replica_lost(server, row)
    await serve_again(server, row, since)


async def replica_lost(server: RehearsedServer, row: Row) -> float:
    """Kill one under load. Returns when."""
    streams = await streams_of(server, LONG // 4)
    engine = server.pids("engine.process")[0]
    since = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    counts = await outcomes(row, streams, [WHOLE, "error event replica_lost"], since)
    row.expect(
        counts[WHOLE] > 0 and counts["error event replica_lost"] > 0, "one replica's clients must be served, the other's not"
    )
    row.expect((row.seconds or 0) < KNOWN_WITHIN_SECONDS, f"they knew after {row.seconds:.2f} s")
    return since


async def replica_killed_under_attack(server: RehearsedServer, row: Row) -> None:
    seen: Counter[str] = Counter()
    attackers = [asyncio.create_task(attack(server.url, seen)) for _ in range(NUM_ATTACKERS)]
    try:
        async with asyncio.timeout(120):
            while len(seen) < len(HOSTILE):
                await asyncio.sleep(0.1)
        since = await replica_lost(server, row)
    finally:
        for attacker in attackers:
            attacker.cancel()
        await asyncio.wait(attackers)
    row.clients += f"; {seen.total()} hostile requests meanwhile"
    await serve_again(server, row, since, is_new_family=True)


async def stopped(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, LONG // 4)
    [engine] = server.pids("engine.process")
    os.kill(engine, signal.SIGSTOP)
    await is_not_ready_meanwhile(server, row, streams, lambda: os.kill(engine, signal.SIGCONT))
    await outcomes(row, streams, [WHOLE])
    await goes_on(server, row, row.after)


async def held(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, LONG // 4)
    await is_not_ready_meanwhile(server, row, streams, lambda: None)
    await outcomes(row, streams, [WHOLE])
    await goes_on(server, row, row.after)


async def is_not_ready_meanwhile(server: RehearsedServer, row: Row, streams: Streams, then: Callable[[], None]) -> None:
    """/ready turns 503, /health stays 200, and with the engine /ready returns."""
    async with ServerClient(server.url, timeout_seconds=10) as client, asyncio.timeout(30):

        async def until(ready: bool) -> None:
            while await is_ready() is not ready:
                await asyncio.sleep(0.02)

        async def is_ready() -> bool:
            try:
                await client.get("/ready")
            except ServerError:
                return False
            return True

        await until(False)
        began, noticed = streams.last_output, time.monotonic()
        row.expect((await client.get_json("/health"))["status"] == "stalled", "/health does not say so")
        then()
        await until(True)
        ready = time.monotonic() - began
        row.after = f"is not ready {noticed - began:.1f} s after the last token, ready after {ready:.1f} s, serves on"


async def all_serve(server: RehearsedServer, since: float) -> float:
    """Wait until all replicas serve again. Returns how long after the fault."""
    async with ServerClient(server.url, timeout_seconds=60) as client, asyncio.timeout(120):
        while any(replica["state"] != "serving" for replica in (await client.get_json("/health"))["replicas"]):
            await asyncio.sleep(0.05)
    return time.monotonic() - since


async def serve_again(server: RehearsedServer, row: Row, since: float, *, is_new_family: bool = False) -> None:
    """All replicas serve again; note how long after the fault. `is_new_family`: there may be more processes than before, for
    chat templates and grammars."""
    seconds = await all_serve(server, since)
    if is_new_family:
        server.note_family()
    await asyncio.to_thread(server.wait_whole)
    await goes_on(server, row)
    row.after += f", with both replicas again {seconds:.0f} s after the fault"


async def prefill_killed_in_first_legs(server: RehearsedServer, row: Row) -> None:
    since, answers = await prefill_lost(server, row, "num_requests_running")
    row.expect("decode engines compute them" in server.log.read_text(), "no prompt was being computed")
    await two_roles_again(server, row, since, answers)


async def prefill_killed_in_pulls(server: RehearsedServer, row: Row) -> None:
    since, answers = await prefill_lost(server, row, "kv_leases")
    async with ServerClient(server.url) as client:
        row.expect(await of_decode_engines(client, "kv_pull_failures_total") > 0, "no blocks were being fetched")
    await two_roles_again(server, row, since, answers)


async def prefill_killed_in_early_fetches(server: RehearsedServer, row: Row) -> None:
    """Decode engines have a part of the blocks of prompts that are being computed."""
    load, answers = await mixed_load(server, "kv_leases", 0)
    async with ServerClient(server.url) as client:
        before = await of_decode_engines(client, "kv_pull_bytes_total")
        while await of_decode_engines(client, "kv_pull_bytes_total") <= before:
            await asyncio.sleep(0.01)
        row.expect(await metric(client, "num_requests_running", 0) > 0, "no prompt was being computed")
        since = time.monotonic()
        os.kill(min(server.pids("engine.process")), signal.SIGKILL)  # the first that was started
        counts = await outcomes(row, load, [WHOLE, LEFT])
        row.expect(counts[LEFT] > 0, "no client left")
        row.expect(await of_decode_engines(client, "kv_pull_failures_total") > 0, "no blocks were being fetched")
    await two_roles_again(server, row, since, answers)


async def of_decode_engines(client: ServerClient, name: str) -> float:
    """The sum of a metric over both."""
    return sum([await metric(client, name, rank) for rank in (1, 2)])


async def prefill_lost(server: RehearsedServer, row: Row, gauge: str) -> tuple[float, list[Answer]]:
    """Kill the prefill engine under load as soon as this gauge of it is above 0: no client learns of it. Returns when, and the answers."""
    load, answers = await mixed_load(server, gauge, 0)
    since = time.monotonic()
    os.kill(min(server.pids("engine.process")), signal.SIGKILL)  # the first that was started
    counts = await outcomes(row, load, [WHOLE, LEFT])
    row.expect(counts[LEFT] > 0, "no client left")
    return since, answers


async def mixed_load(server: RehearsedServer, gauge: str, rank: int, at_least: int = 1) -> tuple[Streams, list[Answer]]:
    """Requests of all kinds, once this gauge of this engine has this value."""
    await fetch_to_all(server, "before")
    answers = mixed(NUM_STREAMS, SHORT, "during")
    load = Streams(server.url, answers)
    load.start()
    await until_metric(server, gauge, rank, lambda value: value >= at_least)
    return load, answers


async def decode_killed(server: RehearsedServer, row: Row) -> None:
    load, answers = await mixed_load(server, "num_requests_running", 2, at_least=5)
    since = time.monotonic()
    os.kill(max(server.pids("engine.process")), signal.SIGKILL)  # the last that was started
    lost = ["error event replica_lost", "503 replica_lost"]
    counts = await outcomes(row, load, [WHOLE, LEFT, *lost], since)
    row.expect(counts[WHOLE] > 0 and counts[LEFT] > 0, "the other engine's clients must be served, and some leave")
    row.expect(any(counts[each] for each in lost), "the engine had no request")
    row.expect((row.seconds or 0) < KNOWN_WITHIN_SECONDS, f"they knew after {row.seconds:.2f} s")
    await two_roles_again(server, row, since, answers)


async def api_server_killed_between_legs(server: RehearsedServer, row: Row) -> None:
    """It is stopped while prompts of its requests are computed, and killed before it sends any of them to a decode engine."""
    load, answers = await mixed_load(server, "kv_leases", 0)
    api_server = server.pids("server.api_server")[0]
    os.kill(api_server, signal.SIGSTOP)
    await asyncio.sleep(BETWEEN_LEGS_SECONDS)
    since = time.monotonic()
    os.kill(api_server, signal.SIGKILL)
    counts = await outcomes(row, load, [WHOLE, LEFT, CLOSED], since)
    row.expect(counts[WHOLE] > 0 and counts[CLOSED] > 0, "one API server's clients must be served and the other's not")
    row.expect((row.seconds or 0) < KNOWN_WITHIN_SECONDS, f"they knew after {row.seconds:.2f} s")
    await until_metric(server, "kv_leases", 0, lambda value: not value, LEASES_END_WITHIN_SECONDS)
    seconds = time.monotonic() - since
    async with ServerClient(server.url) as client:
        row.expect(await metric(client, "kv_lease_expired_total", 0) > 0, "it had sent all requests on")
    await asyncio.to_thread(server.wait_whole)
    await two_roles_again(server, row, since, answers)
    row.after = f"serves on, no prompt of it is kept {seconds:.0f} s after the fault"


async def two_roles_again(server: RehearsedServer, row: Row, since: float, answers: Sequence[Answer]) -> None:
    """All engines serve again and pass blocks on, no prompt is kept any more, and what clients got is what one engine answers."""
    seconds = await all_serve(server, since)
    row.wrong += await differences(server.url, answers)
    await fetch_to_all(server, "after", is_first=False)
    await until_metric(server, "kv_leases", 0, lambda value: not value, LEASES_END_WITHIN_SECONDS)
    await goes_on(server, row, f"serves on, with all engines again {seconds:.0f} s after the fault")


async def fetch_to_all(server: RehearsedServer, name: str, *, is_first: bool = True) -> None:
    """Have both decode engines fetch blocks of the prefill engine. is_first: the connections that this makes may stay."""
    async with ServerClient(server.url) as client, asyncio.timeout(120):
        before = [await metric(client, "kv_pull_bytes_total", rank) for rank in (1, 2)]
        load = Streams(server.url, [each for each in mixed(NUM_STREAMS, 8, name) if each.leaves_after_seconds is None])
        load.start()
        await load.ended()
        for rank, fetched in zip((1, 2), before, strict=True):
            while await metric(client, "kv_pull_bytes_total", rank) <= fetched:
                await asyncio.sleep(0.1)
    if is_first:
        server.note_family()


async def until_metric(
    server: RehearsedServer, name: str, rank: int, holds: Callable[[float], bool], within_seconds: float = 20.0
) -> None:
    """Wait until this metric of an engine is as it must be. Raises AssertionError."""
    async with ServerClient(server.url) as client:
        deadline = time.monotonic() + within_seconds
        while not holds(value := await metric(client, name, rank)):
            assert time.monotonic() < deadline, f"{name} is {value:g} after {within_seconds:g} s"
            await asyncio.sleep(0.02)


async def metric(client: ServerClient, name: str, rank: int) -> float:
    """A metric of one engine; 0 if it has none."""
    lines = (await client.get("/metrics")).decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f'jaxllm:{name}{{engine="{rank}"'))


async def remote_replica_killed(server: RehearsedServer, row: Row) -> None:
    other = _other(server)
    await loses_half(server, row, lambda: os.kill(other.pids("engine.process")[0], signal.SIGKILL), KNOWN_WITHIN_SECONDS)
    await ends_in_order(server, row)


async def host_killed(server: RehearsedServer, row: Row) -> None:
    await loses_half(server, row, lambda: _other(server).signal(signal.SIGKILL), KNOWN_WITHIN_SECONDS, restart=True)
    await ends_in_order(server, row)


async def part_killed(server: RehearsedServer, row: Row) -> None:
    await loses_part(server, row, signal.SIGKILL, KNOWN_WITHIN_SECONDS + NOTICE_SECONDS)


async def part_stopped(server: RehearsedServer, row: Row) -> None:
    await loses_part(server, row, signal.SIGSTOP, SILENCE_SECONDS)


async def loses_part(server: RehearsedServer, row: Row, number: signal.Signals, within_seconds: float) -> None:
    """Send a signal to the other host, without which nothing can be computed."""
    streams = await streams_of(server, LONG)
    since = time.monotonic()
    _other(server).signal(number)
    await outcomes(row, streams, ["error event engine_dead"], since)
    row.expect((row.seconds or 0) < within_seconds, f"they knew after {row.seconds:.2f} s")
    await ends(server, row, 1)


async def host_told_to_stop(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, LONG // 4)
    _other(server).process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.5)
    late = Streams(server.url, alike(4, SHORT))
    late.start()
    await outcomes(row, streams, [WHOLE])
    await late.ended()
    row.clients += f"; new ones: {told(late.counts())}"
    row.expect(is_among(late.counts(), [WHOLE]), "new ones must be served by host 0")
    await ends_in_order(server, row)
    since = time.monotonic()
    _other(server).start()
    await serve_again(server, row, since)
    row.after = row.after.replace("after the fault", "after the host's start")
    await ends_in_order(server, row)


async def host_stopped(server: RehearsedServer, row: Row) -> None:
    def resume() -> None:
        _other(server).signal(signal.SIGCONT)
        ends_by_itself(server, row)

    await loses_half(server, row, lambda: _other(server).signal(signal.SIGSTOP), SILENCE_SECONDS, restart=True, then=resume)
    await ends_in_order(server, row)


async def cable_cut(server: RehearsedServer, row: Row) -> None:
    def mend() -> None:
        ends_by_itself(server, row)
        _other(server).cable.mend()

    await loses_half(server, row, _other(server).cable.cut, SILENCE_SECONDS, restart=True, then=mend)
    await ends_in_order(server, row)


async def loses_half(
    server: RehearsedServer,
    row: Row,
    breaks: Callable[[], None],
    within_seconds: float,
    *,
    restart: bool = False,
    then: Callable[[], None] = lambda: None,
) -> None:
    """Break the other host under load: only its clients learn of it. Then start it again, if it does not come back by itself."""
    streams = await streams_of(server, LONG // 2)
    since = time.monotonic()
    breaks()
    counts = await outcomes(row, streams, [WHOLE, "error event replica_lost"], since)
    row.expect(counts[WHOLE] > 0 and counts["error event replica_lost"] > 0, "host 0's clients must be served, the other's not")
    row.expect((row.seconds or 0) < within_seconds, f"they knew after {row.seconds:.2f} s")
    if restart:
        await asyncio.to_thread(then)
        since = time.monotonic()
        _other(server).start()
    await serve_again(server, row, since)
    if restart:
        row.after = row.after.replace("after the fault", "after the host's start")


def ends_by_itself(server: RehearsedServer, row: Row) -> None:
    """Host 1 notices that it is alone, and says so."""
    other = _other(server)
    row.expect(other.process.wait(15) == 1, "host 1 did not end with code 1")
    row.expect("host 0 is lost" in other.log.read_text(), "host 1 did not say why it ends")


async def ends_in_order(server: RehearsedServer, row: Row) -> None:
    code = await asyncio.to_thread(_other(server).process.wait, 30)
    row.expect(code == 0, f"host 1 ended with code {code}")


def _other(server: RehearsedServer) -> OtherHost:
    assert server.other is not None, "this server has one host"
    return server.other


async def api_server_killed(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, LONG // 4)
    api_server = server.pids("server.api_server")[0]
    since = time.monotonic()
    os.kill(api_server, signal.SIGKILL)
    counts = await outcomes(row, streams, [WHOLE, CLOSED], since)
    row.expect(counts[WHOLE] > 0 and counts[CLOSED] > 0, "one API server's clients must be served and the other's not")
    row.expect((row.seconds or 0) < KNOWN_WITHIN_SECONDS, f"they knew after {row.seconds:.2f} s")
    await asyncio.to_thread(server.wait_whole)
    await goes_on(server, row)


async def disconnects(server: RehearsedServer, row: Row) -> None:
    report = await hold(server.url, "demo", 1000, 64, 500)
    row.clients = f"{report['left']} left, {report['whole']} × {WHOLE}"
    row.expect(report["left"] == report["whole"] == 500, "; ".join(report["faults"]) or "not all of them")
    await goes_on(server, row)


async def told_to_stop(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, SHORT)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.5)
    late = Streams(server.url, alike(4, 4))
    late.start()
    await late.ended()
    await outcomes(row, streams, [WHOLE])
    row.clients += f"; new ones: {told(late.counts())}"
    row.expect(is_among(late.counts(), ["503 stopping"]), "new ones must be refused")
    await ends(server, row, 0)


async def told_to_stop_soon(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, LONG)
    since = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await outcomes(row, streams, ["error event aborted"], since)
    await ends(server, row, 0)


async def told_twice(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, LONG)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    since = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    await outcomes(row, streams, [CLOSED], since)
    row.expect((row.seconds or 0) < KNOWN_WITHIN_SECONDS, f"they knew after {row.seconds:.2f} s")
    await ends(server, row, 128 + signal.SIGTERM)


async def full(server: RehearsedServer, row: Row) -> None:
    streams = Streams(server.url, alike(NUM_STREAMS, SHORT))
    since = time.monotonic()
    streams.start()
    counts = await outcomes(row, streams, [WHOLE, "503 overloaded"], since)
    row.expect(counts[WHOLE] >= 12 and counts["503 overloaded"] > 0, "4 run and 8 wait, the others are refused")
    await goes_on(server, row)


async def out_of_memory(server: RehearsedServer, row: Row) -> None:
    await outcomes(row, await streams_of(server, SHORT), [WHOLE])
    row.expect("RESOURCE_EXHAUSTED" in server.log.read_text(), "the fault did not happen")
    await goes_on(server, row)


async def step_failed(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, SHORT)
    counts = await outcomes(row, streams, [WHOLE, "error event engine_error"])
    row.expect(counts["error event engine_error"] > 0, "the fault did not happen")
    await goes_on(server, row)


async def hangs(server: RehearsedServer, row: Row) -> None:
    streams = await streams_of(server, LONG)
    await streams.ended()
    await outcomes(row, streams, ["error event engine_dead"], streams.last_output)
    row.expect((row.seconds or 0) < STEP_TIMEOUT_SECONDS + 2, f"they knew after {row.seconds:.2f} s")
    await ends(server, row, 1)


FAULTS = {
    "engine": Fault("kill -9 of the engine process", engine_killed),
    "api-server": Fault("kill -9 of one of 2 API servers", api_server_killed, "--api-server-count 2"),
    "replica": Fault("kill -9 of one of 2 replicas", replica_killed, "--data-parallel-size 2"),
    "attacked-replica": Fault(
        f"kill -9 of one of 2 replicas under attack by {NUM_ATTACKERS} clients",
        replica_killed_under_attack,
        "--data-parallel-size 2",
    ),
    "prefill": Fault("kill -9 of the prefill engine while it computes prompts", prefill_killed_in_first_legs, TWO_ROLES),
    "prefill-pulls": Fault(
        "kill -9 of the prefill engine while others fetch from it",
        prefill_killed_in_pulls,
        TWO_ROLES,
        "kv.pull:1-:hang=1,kv.locate:1-:hang=1",
    ),
    "prefill-early": Fault(
        "kill -9 of the prefill engine while others fetch the first blocks of prompts that it computes",
        prefill_killed_in_early_fetches,
        TWO_ROLES,
    ),
    "legs": Fault(
        "kill -9 of one of 2 API servers between prefill and decode of its requests",
        api_server_killed_between_legs,
        f"{TWO_ROLES} --api-server-count 2",
    ),
    "decode": Fault("kill -9 of one of 2 decode engines", decode_killed, TWO_ROLES),
    "remote-replica": Fault("kill -9 of the replica on host 1 of 2", remote_replica_killed, ON_TWO_HOSTS, has_other_host=True),
    "host": Fault("kill -9 of all processes of host 1", host_killed, ON_TWO_HOSTS, has_other_host=True),
    "stopped-host": Fault("SIGSTOP of all processes of host 1", host_stopped, ON_TWO_HOSTS, has_other_host=True),
    "host-sigterm": Fault("SIGTERM to host 1 under load", host_told_to_stop, ON_TWO_HOSTS, has_other_host=True),
    "cable": Fault("nothing comes through between the hosts any more", cable_cut, ON_TWO_HOSTS, has_other_host=True),
    "layers": Fault("kill -9 of host 1 of 2 that share each layer", part_killed, LAYERS_ON_TWO_HOSTS, has_other_host=True),
    "stopped-layers": Fault(
        "SIGSTOP of host 1 of 2 that share each layer", part_stopped, LAYERS_ON_TWO_HOSTS, has_other_host=True
    ),
    "stage": Fault("kill -9 of host 1 of 2 with a stage each", part_killed, STAGES_ON_TWO_HOSTS, has_other_host=True),
    "stopped-stage": Fault("SIGSTOP of host 1 of 2 with a stage each", part_stopped, STAGES_ON_TWO_HOSTS, has_other_host=True),
    "disconnects": Fault("500 of 1 000 clients leave in mid-stream", disconnects),
    "sigterm": Fault("SIGTERM under load", told_to_stop),
    "drain": Fault("SIGTERM, answers take longer than the drain", told_to_stop_soon, "--shutdown-timeout 1"),
    "second": Fault("a second SIGTERM, 0.3 s after the first", told_twice),
    "queue": Fault("a full queue", full, "--max-num-seqs 4 --max-num-queued-reqs 8"),
    "oom": Fault("out of memory in a step", out_of_memory, variable="step:50:oom"),
    "error": Fault("a step fails", step_failed, variable="step:50:error"),
    "stopped": Fault("SIGSTOP and SIGCONT of the engine process", stopped, "--stall-timeout 1"),
    "held": Fault("the engine's interpreter is held for 4 s", held, "--stall-timeout 1", "step:50:hold=4"),
    "hang": Fault("a step hangs", hangs, f"--step-timeout {STEP_TIMEOUT_SECONDS:g}", "step:50:hang"),
}


async def rehearse(fault: Fault) -> Row:
    """Let it happen to a fresh server."""
    row = Row()
    with rehearsed(fault.flags.split(), fault.variable, has_other_host=fault.has_other_host) as server:
        try:
            await fault.happens(server, row)
        except (AssertionError, OSError, ServerError, TimeoutError, ValueError) as error:
            row.wrong.append(f"{type(error).__name__}: {error}")
        if row.wrong:
            if server.other is not None:
                print("\n".join(server.other.log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
            print("\n".join(server.log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse, and print a row of a Markdown table for each fault. Returns 1 if anything was not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(FAULTS)} (default: all)")
    names = parser.parse_args(arguments).faults or list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    print("| fault | what clients saw | the last one knew after | then the server | left behind |")
    print("|---|---|---|---|---|", flush=True)
    passed = True
    for name in names:
        row = asyncio.run(rehearse(FAULTS[name]))
        passed = passed and not row.wrong
        seconds = "–" if row.seconds is None else f"{row.seconds:.2f} s"
        wrong = "WRONG: " + "; ".join(row.wrong) if row.wrong else "nothing"
        print(f"| {FAULTS[name].described()} | {row.clients} | {seconds} | {row.after} | {wrong} |", flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
