"""Runs clients, fronts with real balancers, and engines without a model, event by event."""

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


@dataclass
class Result:
    """What a run brought."""

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
    news_seconds: float = 0.0
    """CPU time of taking in news, on one front."""
    num_news_blocks: int = 0
    load_seconds: float = 0.0
    """CPU time of taking in loads, on one front."""
    num_reports: int = 0
    index_share: float = 1.0
    fronts: list[Balancer] = field(default_factory=list)
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
    num_fronts: int = 1,
    report_seconds: float = 0.01,
    max_indexed_blocks: int = 4_000_000,
    seed: int = 0,
) -> Result:
    """Serve the work to its end. report_seconds: shortest time between two reports of an engine."""
    clients = Clients(work, random.Random(seed))
    front_rng = random.Random(seed + 1)
    engines = [FakeEngine(number, costs, BlockCache(costs.num_blocks), num_fronts) for number in range(num_replicas)]
    fronts = [
        Balancer(
            num_replicas,
            block_size=BLOCK_SIZE,
            max_num_seqs=engines[0].max_num_seqs,
            policy=policy,
            num_fronts=num_fronts,
            max_indexed_blocks=max_indexed_blocks,
        )
        for _ in range(num_fronts)
    ]
    for front, engine in itertools.product(fronts, engines):
        front.set_up(engine.number)
    result = Result(policy, fronts=fronts, engines=engines)
    chat_of: dict[int, Chat] = {}
    ids = itertools.count()
    events: list[tuple[float, int, int, object]] = [(clients.next_arrival(0.0), next(ids), _CHAT, None)]
    cpu = time.thread_time

    def push(at: float, kind: int, thing: object) -> None:
        heapq.heappush(events, (at, next(ids), kind, thing))

    def send(chat: Chat, now: float) -> None:
        front = front_rng.randrange(num_fronts) if num_fronts > 1 else 0
        job, num_best = clients.turn(chat, now, front)
        chat_of[job.number] = chat
        keys = job.keys[: job.num_prompt_tokens // BLOCK_SIZE]
        began = cpu()
        engine = engines[fronts[front].choose_by_keys(str(job.number), job.num_prompt_tokens, keys)]
        result.routing_seconds += cpu() - began
        result.num_best_tokens += num_best
        if engine.add(job, now):
            after(engine, now)

    def after(engine: FakeEngine, now: float) -> None:
        """An engine has planned a step."""
        push(engine.wakes_at, _WAKE, engine)
        if engine.reports_at == float("inf"):
            engine.reports_at = max(now, engine.reported_at + report_seconds)
            push(engine.reports_at, _REPORT, engine)

    def wake(engine: FakeEngine, now: float) -> None:
        engine.wake(now)
        for job in engine.started:
            job.first_token_seconds = now - job.arrived
            clients.first_token(chat_of[job.number])
        for job in engine.finished:
            finish(job, now)
        if engine.wakes_at < float("inf"):
            after(engine, now)
        elif engine.reports_at == float("inf"):
            engine.reports_at = max(now, engine.reported_at + report_seconds)
            push(engine.reports_at, _REPORT, engine)

    def finish(job: Job, now: float) -> None:
        began = cpu()
        fronts[job.front].ended(str(job.number))
        result.routing_seconds += cpu() - began
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
        chat = chat_of.pop(job.number)
        pause = clients.ended(chat, job)
        if pause is not None and clients.num_made < work.num_requests:
            push(now + pause, _TURN, chat)

    def report(engine: FakeEngine, now: float) -> None:
        engine.reports_at, engine.reported_at = float("inf"), now
        news, stats = engine.cache.take_news(), engine.stats()
        for number, front in enumerate(fronts):
            began = cpu()
            if news is not None:
                front.note_news(engine.number, news)
            noted = cpu()
            front.note_load(engine.number, stats, engine.num_received[number])
            if not number:
                result.news_seconds += noted - began
                result.load_seconds += cpu() - noted
        result.num_reports += 1
        if news is not None:
            result.num_news_blocks += (len(news.stored) + len(news.removed)) // 8

    now = 0.0
    while events:
        now, _, kind, thing = heapq.heappop(events)
        if kind == _WAKE:
            assert isinstance(thing, FakeEngine)
            if thing.wakes_at == now:  # or it has been told to wake at another time
                wake(thing, now)
        elif kind == _REPORT:
            assert isinstance(thing, FakeEngine)
            report(thing, now)
        elif clients.num_made < work.num_requests:
            if isinstance(thing, Chat):
                send(thing, now)
            else:
                send(clients.new_chat(), now)
                push(clients.next_arrival(now), _CHAT, None)
    result.seconds = now
    result.index_share = fronts[0].index.share
    return result
