"""Answers that decode engines have not begun to report."""

from dataclasses import replace

from jaxllm.kv_transfer import KVTransfer
from jaxllm.replicas.second_legs import SecondLegs
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import RequestOutputKind
from tests.replicas.test_prefill_decode import request_of

BLOCKS = KVTransfer(remote_engine_id="e", lease_id="l")
SECOND = replace(request_of("a"), options=RequestOptions(kv_transfer=BLOCKS), awaits_first_token=True)


def test_a_request_runs_again_behind_its_first_token_and_fetches_nothing() -> None:
    legs = SecondLegs()
    legs.note_sent(SECOND, 1)
    legs.note_begun(SECOND, [7])
    assert legs.take_lease("a") == (1, BLOCKS) and legs.take_lease("a") is None
    again = legs.take_begun(["b", "a"])["a"]
    assert again.output_token_ids == (7,) and again.options.kv_transfer is None and not again.awaits_first_token
    assert not legs and not legs.take_begun(["a"])


def test_what_has_reported_something_or_has_no_first_token_does_not() -> None:
    legs = SecondLegs()
    legs.note_begun(SECOND, [])
    params = SECOND.sampling_params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    legs.note_begun(replace(SECOND, sampling_params=params), [7])
    legs.note_sent(request_of("b"), 1)  # nothing was left for it
    assert not legs
    legs.note_sent(SECOND, 1)
    legs.note_begun(SECOND, [7])
    legs.forget("a")
    assert not legs
