"""Random comings and goings of adapters and requests, with failures: each request gets the tokens of its adapter, or its own error."""

import contextlib
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.engine.fault_points import injected
from jaxllm.errors import JaxLLMError
from jaxllm.lora.manager import CLAIM_SECONDS
from jaxllm.scheduler.admission import Fit
from tests.helpers.adapters import AdapterEngine
from tests.helpers.slow import slow_except

NAMES = "abcdef"


class _Load:
    """A random series of events."""

    def __init__(self, seed: int, **options: Any):
        self.rng = random.Random(seed)
        # The largest request always fits; few more do.
        self.engine = AdapterEngine(num_blocks=14, block_size=4, max_model_len=48, max_num_batched_tokens=24, **options)
        self.num_added = 0
        for name in NAMES[:3]:
            self.add(name)

    def event(self) -> None:
        rng, engine = self.rng, self.engine
        kind = rng.random()
        if kind < 0.3:
            self.ask()
        elif kind < 0.34:
            self.add(rng.choice(NAMES))
        elif kind < 0.37:
            engine.adapters.remove_adapter(rng.choice(NAMES))
        elif kind < 0.38:
            self.refusable(lambda: engine.adapters.pin_adapter(rng.choice(NAMES)))
        elif kind < 0.42 and engine.scheduler.requests:
            engine.abort(*rng.sample(sorted(engine.scheduler.requests), 1))
        elif kind < 0.44:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.engine.in_flight.clear()
        elif kind < 0.45:
            engine.start_over()
        elif kind < 0.46:
            engine.start_over(lost=True)
            engine.adapters.forget_slots()
        elif kind < 0.5:
            engine.tick(rng.choice([0.05, 3.0]))
        elif kind < 0.56:
            with injected(f"{rng.choice(['adapter.read:1-', 'adapter.stage:1-', 'op:id=WriteAdapter'])}:error"):
                engine.tick(0.15)
                engine.step()
        else:
            engine.step()
        engine.check()

    def add(self, name: str) -> None:
        self.num_added += 1
        self.refusable(lambda: self.engine.start_adding(name, str(self.num_added % 7 + 1), replace=self.rng.random() < 0.7))

    def ask(self) -> None:
        rng = self.rng
        adapter = rng.choice([None, *NAMES[:2], *NAMES])
        prompt = [rng.randrange(2)] * rng.choice([1, 8, 20])
        self.refusable(lambda: self.engine.ask(adapter, prompt, max_tokens=rng.choice([1, 3, 20]), priority=rng.randrange(2)))

    @staticmethod
    def refusable(call: Any) -> None:
        """A call that may be refused, which changes nothing."""
        with contextlib.suppress(JaxLLMError):
            call()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    num_slots=st.sampled_from([1, 2, 4]),
    max_host=st.sampled_from([1, 3, 6]),
    depth=st.sampled_from([1, 3]),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    step_seconds=st.sampled_from([0.02, 0.5]),
)
def test_random_adapters(seed: int, **options: Any) -> None:
    load = _Load(seed, **options)
    for _ in range(120):
        load.event()
    load.engine.run()
    for name in NAMES:
        load.engine.adapters.remove_adapter(name)
    load.engine.tick(10)
    load.engine.adapters.list_adapters()  # processes what was read
    load.engine.adapters.check_integrity()
    slots, host = load.engine.adapters._slots, load.engine.adapters._host
    assert not any(slots) and not host


@pytest.mark.parametrize(("rate", "longest"), slow_except([(30, 1.0)], [(30, 1.0), (60, 8.0)]), ids=["busy", "overloaded"])
@pytest.mark.slow
def test_with_many_adapters_none_starves_and_requests_of_loaded_ones_do_not_wait(rate: float, longest: float) -> None:
    """200 adapters with Zipf's frequencies in 16 slots. At most 10 adapters are read in a second.

    rate: requests in a second. longest: wait of any, in seconds.
    """
    rng, weights = random.Random(1), [1 / (index + 1) for index in range(200)]
    engine = AdapterEngine(16, max_host=64, max_num_seqs=128, seconds={"read": 0.1, "stage": 0.015})
    engine.check = engine.scheduler.check_integrity = lambda: None  # type: ignore[method-assign]
    for index in range(len(weights)):
        engine.start_adding(f"a{index}", str(index + 1))
    engine.tick(60)
    arrivals = list(itertools.accumulate((rng.expovariate(rate) for _ in range(500)), initial=engine.clock.now))
    asked: dict[str, float] = {}
    was_loaded: list[str] = []
    while len(asked) < len(arrivals) or engine.scheduler.has_requests():
        while len(asked) < len(arrivals) and arrivals[len(asked)] <= engine.clock.now:
            name = f"a{rng.choices(range(len(weights)), weights)[0]}"
            request_id = engine.ask(name, 8, max_tokens=rng.choice([5, 20, 60]))
            asked[request_id] = engine.clock.now
            if engine.adapters.fits(engine.requests[request_id][0]) is Fit.NOW:
                was_loaded.append(request_id)
        engine.step()
    waits = {request_id: engine.admitted_at[request_id] - asked_at for request_id, asked_at in asked.items()}
    assert max(waits.values()) < longest
    of_loaded = sorted(waits[request_id] for request_id in was_loaded)
    # A few lose the slot of their adapter before they run, to an adapter that waited long.
    assert len(of_loaded) > 150 and of_loaded[-3] < 0.1 and of_loaded[-1] < CLAIM_SECONDS
    engine.adapters.check_integrity()
