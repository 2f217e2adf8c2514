"""A prefill and a decode engine with a tiny model behind their router: whatever a request asks for, its tokens are those of one engine."""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine import messages
from jaxllm.engine.core import EngineCore
from jaxllm.engine.messages import Failed, Load, Outputs, Refused
from jaxllm.errors import JaxLLMError
from jaxllm.kv_transfer import KVTransfer
from jaxllm.replicas.prefill_decode import PrefillDecode
from jaxllm.request import EngineCoreRequest, FinishReason, Grammar
from jaxllm.structured.grammar_text import grammar_text
from jaxllm.structured.token_table import Vocabulary
from jaxllm.structured_outputs import StructuredOutputsParams
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.thinking import ThinkingBudget
from tests.helpers import engines
from tests.helpers.engines import Answer, make_core
from tests.helpers.tiny_tokenizers import write_tokenizer
from tests.replicas.test_prefill_decode import FakeClient, Listener

BLOCK, THRESHOLD, EOS, END = 8, 12, 1, 101
PREFILL, DECODE = 0, 1
SIZES = {"block_size": BLOCK, "num_gpu_blocks_override": 60, "enable_prefix_caching": True}
OFFLOADING = {"kv_offloading_size": 0.02}
CHUNKS = {"max_num_batched_tokens": 16, "token_buckets": (16,)}
"""Prompts are computed in chunks, so that decode engines are sent them early."""


class CoreClient(FakeClient):
    """The client of an engine in this process, which computes when `step` is called. Messages are encoded on their way."""

    on_outputs: Callable[[Outputs], None]
    on_refused: Callable[[Refused], None]
    on_failed: Callable[[Failed], None]

    def __init__(self, config: EngineConfig, core: EngineCore):
        super().__init__(config)
        self.core = core
        self.inbox: deque[Any] = deque()
        """Messages that the engine has not got."""
        self._known: set[str] = set()
        """Its unfinished requests."""
        self._ready.max_model_len = core.max_model_len

    def add(self, request: EngineCoreRequest) -> None:
        super().add(request)
        self._send(messages.Add(self.name, request))

    def abort(self, request_ids: list[str]) -> None:
        super().abort(request_ids)
        self._send(messages.Abort(self.name, request_ids))

    def continue_request(self, request_id: str, output_token_ids: Any) -> None:
        super().continue_request(request_id, output_token_ids)
        self._send(messages.Continue(self.name, request_id, list(output_token_ids)))

    def end_lease(self, transfer: KVTransfer) -> None:
        super().end_lease(transfer)
        self._send(messages.EndLease(self.name, transfer))

    def _send(self, message: Any) -> None:
        self.inbox.append(messages.decode_client_message(messages.encode(message)))

    @property
    def is_idle(self) -> bool:
        return not self.inbox and not self.core.has_unfinished_requests()

    def step(self, num_messages: int = 1000) -> None:
        """Have the engine process so many messages, and make a step."""
        for _ in range(min(num_messages, len(self.inbox))):
            self._obey(self.inbox.popleft())
        if not self.core.has_unfinished_requests():
            return
        outputs = [output for output in self.core.step() if output.request_id in self._known]
        self._known -= {output.request_id for output in outputs if output.finish_reason is not None}
        self.core.scheduler.check_integrity()
        if outputs:
            load = Load(self.core.stats(), received={self.name: len(self.sent)})
            found = messages.decode_engine_message(messages.encode(Outputs(outputs, load)))
            assert isinstance(found, Outputs)
            self.on_outputs(found)

    def fail(self) -> None:
        """A step fails, and all requests with it."""
        while self.inbox:
            self._obey(self.inbox.popleft())
        self.core.abort_requests(list(self._known))
        self._known.clear()
        self.on_failed(Failed("a step failed"))

    def _obey(self, message: Any) -> None:
        match message:
            case messages.Add(request=request):
                try:
                    self.core.add_request(request)
                    self._known.add(request.request_id)
                except JaxLLMError as error:
                    self.on_refused(Refused(request.request_id, messages.fault_of(error)))
            case messages.Abort(request_ids=ids):
                self._known.difference_update(ids)
                self.core.abort_requests(ids)
            case messages.Continue(request_id=request_id, output_token_ids=tokens):
                self.core.continue_request(request_id, tokens)
            case messages.EndLease(transfer=transfer):
                self.core.end_lease(transfer)


class Caller(Listener):
    """Collects answers; may end one at a token, as a stop string does."""

    def __init__(self, core: PrefillDecode, stops: dict[str, int], decode: CoreClient):
        super().__init__()
        self.answers: dict[str, Answer] = {}
        self._core, self._stops, self._decode = core, stops, decode

    @property
    def num_continued(self) -> tuple[int, int]:
        """Requests that the decode engine continued behind a first token: those that waited for it, and others."""
        waited = sum(bool(token_ids) for _, token_ids in self._decode.continued)
        return waited, sum(bool(request.output_token_ids) for request in self._decode.sent)

    def take_outputs(self, outputs: Any) -> None:
        for output in outputs:
            answer = self.answers.get(output.request_id)
            if answer is None or answer.finish_reason is not None:
                continue  # of a first leg, or on its way when its request ended
            answer.take(output)
            if self._stops.get(output.request_id) in output.new_token_ids and answer.finish_reason is None:
                self._core.abort([output.request_id])
                answer.finish_reason = FinishReason.STOP


@dataclass
class Cores:
    """An engine that computes all, and one of each role."""

    one: EngineCore
    prefill: EngineCore
    decode: EngineCore

    @property
    def leases(self) -> Any:
        return self.prefill._tiers[0]._leases  # type: ignore[attr-defined]

    def run(
        self,
        requests: list[EngineCoreRequest],
        *,
        seed: int | None = None,
        stops: dict[str, int] | None = None,
        disturb: Callable[[random.Random, PrefillDecode, list[CoreClient], Caller], None] = lambda *arguments: None,
    ) -> Caller:
        """The answers by two engines. seed: of a random order of their steps; None: in turns. disturb: called between steps."""
        rng = random.Random(seed)

        async def main() -> Caller:
            config = EngineConfig.from_options(data_parallel_size=2, max_num_seqs=4, **OFFLOADING, **SIZES)
            clients = [CoreClient(config, core) for core in (self.prefill, self.decode)]
            router = PrefillDecode(
                lambda rank, pid: clients[rank],  # type: ignore[arg-type, return-value]
                [1, 2],
                prefill_ranks=(0,),
                threshold=THRESHOLD,
            )
            await router.ready()
            caller = Caller(router, stops or {}, clients[DECODE])
            router.start(caller)
            for client in clients:
                client.core.reset_prefix_cache()
            left = list(requests)
            for _ in range(20_000):
                if left and (seed is None or rng.random() < 0.3):
                    request = left.pop(0)
                    caller.answers[request.request_id] = Answer()
                    router.add(request)
                    continue
                if all(client.is_idle for client in clients) and self.decode.is_paused():
                    self.decode.resume()
                if all(client.is_idle for client in clients):
                    if not left:
                        break
                    continue
                disturb(rng, router, clients, caller)
                for client in clients if seed is None else (rng.choice(clients),):
                    client.step(1000 if seed is None else rng.randrange(4))
            else:
                raise AssertionError("not done")
            known = (router.first_legs, router.second_legs)
            assert not any(known) and not any(router.balancer.num_requests(rank) for rank in (PREFILL, DECODE))
            for client in clients:
                client.core.check_integrity()
            router.shutdown()
            return caller

        return asyncio.run(main())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "ascii")


@pytest.fixture(scope="module")
def cores(directory: Any) -> Iterator[Cores]:
    options = {"tokenizer": str(directory), "warmup": "lazy", "shares_programs": True, **SIZES}
    made = [
        make_core("llama_gqa", **options),
        make_core("llama_gqa", **options, **OFFLOADING, **CHUNKS, kv_role="prefill", kv_port=0),
        make_core("llama_gqa", **options, **OFFLOADING, kv_role="decode", kv_pull_timeout=1.0),
    ]
    yield Cores(*made)
    for core in made:
        core.shutdown()


@pytest.fixture(scope="module")
def grammar_of(directory: Any) -> Callable[..., Grammar]:
    vocabulary = Vocabulary.of(load_tokenizer(directory), 128, (EOS,))

    def make(start_after: tuple[int, ...] | None = None, **form: Any) -> Grammar:
        return Grammar(grammar_text(StructuredOutputsParams(**form), vocabulary.split), start_after_token_ids=start_after)

    return make


def prompt_of(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 90) for _ in range(count)]


COUNTS = (24, 31, 32, 33, 70, 95, 96, 97)


def kinds_of(grammar_of: Callable[..., Grammar], first: int = 0, num_tokens: Sequence[int] = COUNTS) -> list[EngineCoreRequest]:
    """A request of every kind, each with another prompt, of these numbers of tokens in turn."""
    draws = {"temperature": 0.9, "seed": 5}
    params: list[dict[str, Any]] = [
        {},
        draws,
        {**draws, "top_p": 0.7, "top_k": 20, "min_p": 0.02, "logprobs": 2},
        {"presence_penalty": 1.5, "frequency_penalty": 0.9, "repetition_penalty": 1.4, "logprobs": 1},
        {"min_tokens": 4, "stop_token_ids": list(range(5, 90)), "logprobs": 0},
        {"min_tokens": 1, "stop_token_ids": list(range(5, 90))},
        {"stop_token_ids": list(range(128))},
        {"ignore_eos": False, "logit_bias": {EOS: 100.0}},
        {"ignore_eos": False, "logit_bias": {EOS: 100.0}, "min_tokens": 3},
        {**draws, "logit_bias": {40: 3.0}, "bad_words": None, "allowed_token_ids": list(range(30, 60)), "logprobs": 3},
        {"max_tokens": 1, "logprobs": 2},
        {"max_tokens": 2, **draws},
        {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}, "allowed_token_ids": [40, 41]},
        {"prompt_logprobs": 1, "logprobs": 1},
        {"logprobs": 4, **draws},
        {"logprob_token_ids": [40, 50]},
    ]
    counts = itertools.cycle(num_tokens)
    requests = [
        replace(
            engines.request(f"{first}-{number}", prompt_of(next(counts), first + number), **{"max_tokens": 10, **each}),
            eos_token_ids=(EOS,),
        )
        for number, each in enumerate(params)
    ]
    grammars = [
        ({"regex": "[a-f]{4,9}"}, None, {}),
        ({"regex": "ab12"}, None, {"ignore_eos": True, "logprobs": 1}),
        ({"choice": ["x", "y"]}, None, {"ignore_eos": True}),
        ({"choice": ["x", "y"]}, None, {"ignore_eos": False}),
        ({"regex": "0+"}, (9,), {"logit_bias": {9: 100.0}}),
    ]
    for form, start_after, more in grammars:
        name = f"{first}-{len(requests)}"
        request = engines.request(name, prompt_of(next(counts), first + len(requests)), max_tokens=10, **draws, **more)
        requests.append(replace(request, grammar=grammar_of(start_after, **form), eos_token_ids=(EOS,)))
    for budget in (0, 1, 3):
        name = f"{first}-{len(requests)}"
        request = engines.request(
            name, prompt_of(next(counts), first + len(requests)), max_tokens=8, **draws, logit_bias={END: -50.0}
        )
        thinking = ThinkingBudget(budget, 100, (END,), is_open=True)
        requests.append(replace(request, thinking_budget=thinking, eos_token_ids=(EOS,)))
    return requests


def logprobs_of(answer: Answer) -> tuple[list[int], np.ndarray]:
    """The first token of each position, which is the drawn one unless ids are named, and all logprobs."""
    first = [token_id for each in answer.logprobs for token_id in each.token_ids[:, 0].tolist()]
    return first, np.concatenate([np.zeros(0), *(each.logprobs.ravel() for each in answer.logprobs)])


def check_same(found: Answer, wanted: Answer, name: str) -> None:
    """All that callers see is the same, but for roundings of logprobs."""
    assert found.tokens == wanted.tokens, name
    assert (found.finish_reason, found.stop_reason, found.error_kind) == (
        wanted.finish_reason,
        wanted.stop_reason,
        wanted.error_kind,
    ), name
    (ids, values), (wanted_ids, wanted_values) = logprobs_of(found), logprobs_of(wanted)
    assert ids == wanted_ids, name
    np.testing.assert_allclose(values, wanted_values, rtol=1e-4, atol=1e-4, err_msg=name)


def alone(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, Answer]:
    core.reset_prefix_cache()
    answers: dict[str, Answer] = {}
    for request in requests:
        answers |= engines.run(core, [request])
    return answers


@pytest.mark.slow
def test_requests_of_all_kinds_are_those_of_one_engine(cores: Cores, grammar_of: Any) -> None:
    """Each alone. Prompts of one chunk are fetched when they are computed, others while they are."""
    kinds, others = kinds_of(grammar_of, 100), kinds_of(grammar_of, 200, (13, 14, 15, 16))
    assert not any(request.grammar or request.thinking_budget for request in others[:16])
    for requests, place, num_ended in ((kinds, 0, 5), (others[16:], 1, 1)):
        wanted = alone(cores.one, requests)
        num_continued = 0
        for request in requests:
            name = request.request_id
            caller = cores.run([request])
            check_same(caller.answers[name], wanted[name], name)
            num_continued += caller.num_continued[place]
            assert not caller.num_continued[1 - place]
        assert num_continued == len(requests) - num_ended, "the others end with their first token, or need one engine"
        assert len(wanted[requests[0].request_id[:3] + "-18"].tokens) == 1


def random_requests(rng: random.Random, grammar_of: Any, count: int) -> tuple[list[EngineCoreRequest], dict[str, int]]:
    """Requests of random kinds, some of them answers to one prompt; and tokens at which callers end some."""
    kinds = kinds_of(grammar_of)
    kinds += 2 * [kind for kind in kinds if kind.thinking_budget or kind.grammar]  # these meet in steps
    requests: list[EngineCoreRequest] = []
    stops: dict[str, int] = {}
    for number in range(count):
        kind = rng.choice(kinds)
        prompt = prompt_of(rng.randrange(8, 100), rng.randrange(10**9))
        params = kind.sampling_params.clone()
        params.max_tokens = rng.randrange(1, 12)
        params.min_tokens = min(params.min_tokens, params.max_tokens)
        num_answers = 1 if params.is_greedy or params.prompt_logprobs is not None else rng.choice((1, 1, 2, 3))
        for answer in range(num_answers):
            own = params.clone()
            own.seed = number * 100 + answer
            name = f"{answer}_{number}"
            requests.append(replace(kind, request_id=name, prompt_token_ids=prompt, sampling_params=own))
            if rng.random() < 0.2:
                stops[name] = rng.randrange(5, 90)
    return requests, stops


def cut(answer: Answer, stop: int | None) -> Answer:
    """An answer that its caller ends at a token, unless it ends there by itself."""
    if stop in answer.tokens[:-1] or (stop in answer.tokens[-1:] and answer.finish_reason is None):
        count = answer.tokens.index(stop) + 1
        return Answer(answer.tokens[:count], finish_reason=FinishReason.STOP)
    return answer


def disturb(rng: random.Random, router: PrefillDecode, clients: list[CoreClient], caller: Caller) -> None:
    chance = rng.random()
    unfinished = [name for name, answer in caller.answers.items() if answer.finish_reason is None]
    if chance < 0.02 and unfinished:
        name = rng.choice(unfinished)
        router.abort([name])
        caller.answers[name].finish_reason = FinishReason.ABORT
    elif chance < 0.03:
        clients[PREFILL].core._tiers[0]._leases.end_all()  # type: ignore[attr-defined]
    elif chance < 0.035:
        clients[PREFILL].fail()
    elif chance < 0.04:
        clients[DECODE].fail()
    elif chance < 0.06:  # they lose their places and blocks
        held = list(clients[DECODE].core.scheduler.requests)
        clients[DECODE].core.hold_requests(held)
        clients[DECODE].core.release_requests(held)
    elif chance < 0.07 and not clients[DECODE].core.is_paused():  # new requests wait outside the queue
        clients[DECODE].core.pause("keep")
    elif chance < 0.12 and clients[DECODE].core.is_paused():
        clients[DECODE].core.resume()
    for name in itertools.chain.from_iterable(
        ids for _, ids in caller.failures
    ):  # requests that one engine computes whole fail with it
        caller.answers[name].finish_reason = FinishReason.ABORT


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_with_failures_and_callers_that_leave(cores: Cores, grammar_of: Any, seed: int) -> None:
    requests, stops = random_requests(random.Random(seed), grammar_of, 20)
    wanted = alone(cores.one, requests)
    caller = cores.run(requests, seed=seed, stops=stops, disturb=disturb)
    assert not caller.refusals
    whole = 0
    for request in requests:
        name = request.request_id
        found, expected = caller.answers[name], wanted[name]
        if found.finish_reason is FinishReason.ABORT:
            assert found.tokens == expected.tokens[: len(found.tokens)], name
        elif name in stops and (shorter := cut(expected, stops[name])) is not expected:
            assert found.tokens == shorter.tokens, name
        else:
            check_same(found, expected, name)
            whole += 1
    assert whole, "all were disturbed"
