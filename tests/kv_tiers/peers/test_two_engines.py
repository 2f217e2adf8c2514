"""A prompt computed in one engine and continued in another: the tokens are those of one engine."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.kv_tiers.peers import client
from jaxllm.kv_tiers.peers.prefill_tier import PrefillTier
from jaxllm.kv_transfer import KVTransfer, read_kv_transfer
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams
from tests.helpers.engines import make_core

NUM_BLOCKS = 40
PREFILL = {"kv_role": "prefill", "kv_port": 0}
DECODE = {"kv_role": "decode", "kv_pull_timeout": 5.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, seed=0)
SEEDED = SamplingParams(temperature=1.0, max_tokens=8, seed=7)


def make(name: str = "qwen3", **options: Any) -> EngineCore:
    return make_core(name, **{"kv_offloading_size": 0.02, "num_gpu_blocks_override": NUM_BLOCKS, **options})


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return [(7 * index * index + 11 * index + seed) % 60 for index in range(count)]


class Runner:
    """Runs requests of one engine."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.num_sent = 0

    def send(self, prompt: Sequence[int], params: SamplingParams, transfer: KVTransfer | None = None, **options: Any) -> str:
        self.num_sent += 1
        request_id = f"r{self.num_sent}"
        self.core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                sampling_params=params,
                options=RequestOptions(kv_transfer=transfer, **options),
            )
        )
        return request_id

    def finish(self) -> dict[str, tuple[list[int], EngineCoreOutput]]:
        """The tokens and the last output of each request."""
        tokens: dict[str, list[int]] = {}
        last: dict[str, EngineCoreOutput] = {}
        deadline = time.monotonic() + 60.0
        while self.core.has_unfinished_requests():
            assert time.monotonic() < deadline
            for output in self.core.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                last[output.request_id] = output
            self.core.scheduler.check_integrity()
        return {request_id: (tokens[request_id], last[request_id]) for request_id in tokens}

    def run(self, prompt: Sequence[int], params: SamplingParams = GREEDY, transfer: KVTransfer | None = None, **options: Any) -> Any:
        request_id = self.send(prompt, params, transfer, **options)
        return self.finish()[request_id]

    def prefill(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **options: Any) -> dict[str, Any] | None:
        """What a prefill engine answers."""
        one = SamplingParams(temperature=params.temperature, seed=params.seed, max_tokens=1)
        _, last = self.run(prompt, one, KVTransfer(keep_for_decode=True), **options)
        return last.kv_transfer_params

    def decode(self, prompt: Sequence[int], answer: Any, params: SamplingParams = GREEDY, **options: Any) -> Any:
        return self.run(prompt, params, read_kv_transfer(answer), **options)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Runner, Runner, Runner]]:
    """One that computes all, one of each role."""
    cores = make_core("qwen3", num_gpu_blocks_override=NUM_BLOCKS), make(**PREFILL), make(**DECODE)
    yield tuple(map(Runner, cores))
    for core in cores:
        core.shutdown()


@pytest.fixture(params=["shared memory", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tcp":
        monkeypatch.setattr(client, "socket_name", lambda engine_id: "\0jaxllm-nowhere")
    return str(request.param)


def leases_of(runner: Runner) -> Any:
    (tier,) = runner.core._tiers
    assert isinstance(tier, PrefillTier)
    return tier._leases


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_are_those_of_one_engine(engines: Any, transport: str, params: SamplingParams) -> None:
    one, prefill, decode = engines
    for core in (prefill.core, decode.core):
        assert core.reset_prefix_cache()
    for count, seed in ((95, 0), (64, 1), (80, 2), (79, 3)):
        prompt = prompt_of(count, seed + 100 * (params is SEEDED) + 1000 * (transport == "tcp"))
        wanted, _ = one.run(prompt, params)
        answer = prefill.prefill(prompt, params)
        assert answer is not None and len(answer["remote_block_ids"][0]) == count // 16
        tokens, last = decode.decode(prompt, answer, params)
        assert tokens == wanted
        assert last.num_cached_tokens == count // 16 * 16
    wait_for(lambda: all(lease.is_over for lease in leases_of(prefill)._leases.values()))
    assert prefill.prefill(prompt_of(10)) is None, "there is no full block"
    assert len(leases_of(prefill)) == 0
    for each in (prefill, decode):
        each.core.check_integrity()
