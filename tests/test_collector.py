"""The garbage collector rests."""

import gc

from jaxllm.collector import no_collections


def test_the_collector_rests_until_all_who_hold_it_up_have_ended() -> None:
    with no_collections():
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled(), "the outer one still holds it up"
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled(), "it was off before"
    finally:
        gc.enable()
