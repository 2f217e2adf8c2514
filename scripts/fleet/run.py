"""Runs clients, API servers with real balancers, and engines without a model, event by event."""

import heapq
import itertools
import random
import sys
import time
from dataclasses import dataclass, field

from jaxllm.routing.balancer import Balancer, RoutingPolicy
from scripts.fleet.engine import BLOCK_SIZE, BlockCache, FakeEngine, Job, StepCosts
from scripts.fleet.work import Chat, Clients, Work

_CHAT, _TURN, _WAKE, _REPORT = range(4)
_cpu = time.thread_time


@dataclass
class Result:
    """Results of a run."""

    policy: str
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_best_tokens: int = 0
    """Tokens found cached if nothing were ever evicted and every engine had everything."""
    seconds: float = 0.0
    """Simulated."""
    num_output_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    """Mean time between tokens of each request."""
    routing_seconds: float = 0.0
    """CPU time of choosing, without hashes, and noting ends."""
    event_seconds: float = 0.0
    """CPU time of applying cache events, on one API server."""
    num_event_blocks: int = 0
    load_seconds: float = 0.0
    """CPU time of applying loads, on one API server."""
    num_reports: int = 0
    index_share: float = 1.0
    api_servers: list[Balancer] = field(default_factory=list)
    engines: list[FakeEngine] = field(default_factory=list)

    @property
    def cached_share(self) -> float:
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def best_share(self) -> float:
        return self.num_best_tokens / max(1, self.num_prompt_tokens)


def simulate(
    policy: RoutingPolicy,
    num_replicas: int,
    work: Work,
    costs: StepCosts,
    *,
    num_api_servers: int = 1,
    report_seconds: float = 0.01,
    max_indexed_blocks: int = 4_000_000,
    seed: int = 0,
) -> Result:
    """Serve the work to its end. report_seconds: shortest time between two reports of an engine."""
    engines = [FakeEngine(number, costs, BlockCache(costs.num_blocks), num_api_servers) for number in range(num_replicas)]
    api_servers = [
        Balancer(
            num_replicas,
            block_size=BLOCK_SIZE,
            max_num_seqs=engines[0].max_num_seqs,
            policy=policy,
            num_api_servers=num_api_servers,
            max_indexed_blocks=max_indexed_blocks,
        )
        for _ in range(num_api_servers)
    ]
    for api_server, engine in itertools.product(api_servers, engines):
        api_server.set_up(engine.number)
    result = Result(policy, api_servers=api_servers, engines=engines)
    _Simulation(result, work, report_seconds, seed).run()
    return result


class _Simulation:
    """Events, in the order of time, between the API servers and engines of a result."""

    def __init__(self, result: Result, work: Work, report_seconds: float, seed: int):
        self._result, self._work, self._report_seconds = result, work, report_seconds
        self._clients = Clients(work, random.Random(seed))
        self._api_server_rng = random.Random(seed + 1)
        self._chat_of: dict[int, Chat] = {}
        """By the number of its job."""
        self._ids = itertools.count()
        self._events: list[tuple[float, int, int, Chat | FakeEngine | None]] = []

    def run(self) -> None:
        now = 0.0
        self._push(self._clients.next_arrival(now), _CHAT)
        while self._events:
            now, _, kind, thing = heapq.heappop(self._events)
            if isinstance(thing, FakeEngine):
                if kind == _REPORT:
                    self._report(thing, now)
                elif thing.wakes_at == now:  # or it has been told to wake at another time
                    self._wake(thing, now)
            elif self._clients.num_made < self._work.num_requests:
                self._send(thing or self._clients.new_chat(), now)
                if kind == _CHAT:
                    self._push(self._clients.next_arrival(now), _CHAT)
        self._result.seconds = now
        self._result.index_share = self._result.api_servers[0].index.share

    def _push(self, at: float, kind: int, thing: Chat | FakeEngine | None = None) -> None:
        heapq.heappush(self._events, (at, next(self._ids), kind, thing))

    # A request

    def _send(self, chat: Chat, now: float) -> None:
        """A client asks; an API server chooses the engine."""
        api_servers, result = self._result.api_servers, self._result
        api_server = self._api_server_rng.randrange(len(api_servers)) if len(api_servers) > 1 else 0
        job, num_best = self._clients.turn(chat, now, api_server)
        self._chat_of[job.number] = chat
        keys = job.keys[: job.num_prompt_tokens // BLOCK_SIZE]
        began = _cpu()
        engine = result.engines[api_servers[api_server].choose_by_keys(str(job.number), job.num_prompt_tokens, keys)]
        result.routing_seconds += _cpu() - began
        result.num_best_tokens += num_best
        if engine.add(job, now):
            self._note_step(engine, now)

    def _finish(self, job: Job, now: float) -> None:
        """An answer is whole: count it, and have its client think about the next turn."""
        result = self._result
        began = _cpu()
        result.api_servers[job.api_server].ended(str(job.number))
        result.routing_seconds += _cpu() - began
        result.num_requests += 1
        if result.num_requests % 100_000 == 0:
            print(f"{result.num_requests} requests, {now:.0f} s simulated", file=sys.stderr)
        result.num_prompt_tokens += job.num_prompt_tokens
        result.num_cached_tokens += job.num_cached
        result.num_output_tokens += job.num_output_tokens
        result.first_token_seconds.append(job.first_token_seconds)
        if job.num_output_tokens > 1:
            decoding = now - job.arrived - job.first_token_seconds
            result.token_seconds.append(decoding / (job.num_output_tokens - 1))
        chat = self._chat_of.pop(job.number)
        pause = self._clients.ended(chat, job)
        if pause is not None and self._clients.num_made < self._work.num_requests:
            self._push(now + pause, _TURN, chat)

    # An engine

    def _note_step(self, engine: FakeEngine, now: float) -> None:
        """An engine has planned a step."""
        self._push(engine.wakes_at, _WAKE, engine)
        self._plan_report(engine, now)

    def _plan_report(self, engine: FakeEngine, now: float) -> None:
        if engine.reports_at == float("inf"):
            engine.reports_at = max(now, engine.reported_at + self._report_seconds)
            self._push(engine.reports_at, _REPORT, engine)

    def _wake(self, engine: FakeEngine, now: float) -> None:
        """A step has ended."""
        engine.wake(now)
        for job in engine.started:
            job.first_token_seconds = now - job.arrived
            self._clients.first_token(self._chat_of[job.number])
        for job in engine.finished:
            self._finish(job, now)
        if engine.wakes_at < float("inf"):
            self._note_step(engine, now)
        else:
            self._plan_report(engine, now)

    def _report(self, engine: FakeEngine, now: float) -> None:
        """Every API server gets an engine's load and cache events."""
        result = self._result
        engine.reports_at, engine.reported_at = float("inf"), now
        events, stats = engine.cache.take_events(), engine.stats()
        for number, api_server in enumerate(result.api_servers):
            began = _cpu()
            if events is not None:
                api_server.note_events(engine.number, events)
            noted = _cpu()
            api_server.note_load(engine.number, stats, engine.num_received[number])
            if not number:
                result.event_seconds += noted - began
                result.load_seconds += _cpu() - noted
        result.num_reports += 1
        if events is not None:
            result.num_event_blocks += (len(events.stored) + len(events.removed)) // 8
