"""The two legs of a request, and how a balancer counts requests whose prompt is computed elsewhere."""

from dataclasses import replace

import numpy as np
import pytest

from jaxllm.kv_transfer import KVTransfer
from jaxllm.request import Grammar
from jaxllm.routing.two_legs import TwoLegs, decode_leg, prefill_leg
from jaxllm.sampling_params import SamplingParams
from tests.routing.test_balancer import BLOCK, make_balancer, make_request, stats
from tests.test_kv_transfer import PULLED, TO_DECODE

DECODES = np.array([False, True, True])


def test_a_first_leg_asks_for_one_token_of_the_same_prompt() -> None:
    request = replace(
        make_request("a", [1, 2, 3], cache_salt="s", session_id="x", priority=2), grammar=Grammar("g"), eos_token_ids=(7,)
    )
    leg = prefill_leg(request)
    assert leg.prompt_token_ids is request.prompt_token_ids and leg.arrival_time == request.arrival_time
    assert leg.options == replace(
        request.options, session_id=None, kv_transfer=KVTransfer(keep_for_decode=True, tells_early=True)
    )
    assert leg.sampling_params.max_tokens == 1 and (leg.grammar, leg.eos_token_ids) == (request.grammar, (7,))
    assert request.sampling_params.max_tokens != 1
    slow = replace(request, sampling_params=SamplingParams(max_tokens=9, min_tokens=5), output_token_ids=(1,))
    leg = prefill_leg(slow)
    assert leg.sampling_params == SamplingParams(max_tokens=1, min_tokens=1) and leg.output_token_ids == ()


@pytest.mark.parametrize(("params", "expected"), [(None, None), ({}, None), (TO_DECODE, PULLED)])
def test_a_second_leg_is_the_request_with_where_its_blocks_are(
    params: dict[str, object] | None, expected: KVTransfer | None
) -> None:
    request = make_request("a", [1, 2, 3])
    assert decode_leg(request, params) == replace(request, options=replace(request.options, kv_transfer=expected))


def test_decode_engines_are_chosen_by_the_tokens_that_they_hold() -> None:
    balancer = make_balancer()
    balancer.note_load(1, stats(cache_usage=0.1, num_running=1))  # 400 tokens
    balancer.note_load(2, stats(cache_usage=0.05, num_running=3))  # 200 tokens
    chosen = [balancer.choose(make_request(n, [n] * 150), among=DECODES, is_prefilled=True) for n in range(4)]
    assert chosen == [2, 2, 1, 2], "prompts that were sent count until a report covers them"
    assert balancer.loads.work[1] - 64 * 2 == BLOCK, "all but a block of the prompt is fetched, not computed"
    balancer.note_load(2, stats(cache_usage=0.2, num_running=6), 3)
    assert list(balancer.loads.held) == [0, 550, 800]


def test_the_decode_engine_of_the_same_host_is_taken_unless_it_has_more_tokens_by_the_prompt() -> None:
    fetched = KVTransfer(remote_engine_id="e")
    for prefill_rank, expected in ((1, [1, 1, 2, 1]), (2, [2, 2, 1, 2]), (0, [1, 2, 1, 2])):
        balancer = make_balancer()
        routes = TwoLegs(balancer, (0,), 0, 1000, num_hosts=3)
        requests = [make_request(n, [n] * 100, kv_transfer=fetched) for n in range(4)]
        assert [routes.choose_decode(request, prefill_rank) for request in requests] == expected, prefill_rank
        balancer.note_load(prefill_rank, stats(num_running=8))
        assert routes.choose_decode(make_request("full", [1] * 100, kv_transfer=fetched), prefill_rank) != prefill_rank


def test_decode_engines_without_a_seat_or_blocks_are_taken_last() -> None:
    balancer = make_balancer()
    balancer.note_load(1, stats(num_running=8))
    balancer.note_load(2, stats(num_running=1, cache_usage=0.9))
    assert balancer.choose(make_request("a", [1] * 300), among=DECODES, is_prefilled=True) == 2
    assert balancer.choose(make_request("b", [2] * 300), among=DECODES, is_prefilled=True) == 1, (
        "neither has room: the fewest tokens"
    )


def test_what_engines_of_a_role_must_compute() -> None:
    balancer = make_balancer()
    request = make_request("a", [1] * 100)
    assert balancer.fewest_uncached(request, DECODES) == 100
    assert balancer.takes_requests(DECODES)
    for rank in (1, 2):
        balancer.set_draining(rank)
    assert not balancer.takes_requests(DECODES) and balancer.takes_requests(~DECODES)
