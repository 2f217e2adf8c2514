"""First legs, and the requests that wait for them."""

from jaxllm.replicas.first_legs import FirstLeg, FirstLegs
from tests.replicas.test_prefill_decode import request_of


def test_a_leg_is_forgotten_with_the_last_request_that_needs_it() -> None:
    legs, (a, b) = FirstLegs(), (request_of("a"), request_of("b"))
    legs.add("p", FirstLeg(0, "a"))
    assert legs.wait(a, "p") is legs.wait(b, "p") is legs.of("a") is legs["p"]
    legs["p"].sent["a"] = legs["p"].waiting.pop("a")
    assert legs.fetched_from(0) == ["p"] and not legs.fetched_from(1)
    assert legs.leave("a") is None and "p" in legs and legs.of("a") is None and not legs.fetched_from(0)
    assert legs.leave("a") is None and legs.leave("unknown") is None
    assert legs.leave("b") == "p" and not legs


def test_a_request_that_is_taken_leaves_the_leg_to_its_owner() -> None:
    legs, a = FirstLegs(), request_of("a")
    legs.add("p", FirstLeg(0, "a"))
    legs.wait(a, "p")
    assert legs.take("a") is a and legs.of("a") is None and "p" in legs
    legs.end("p")
    legs.end("p")
    assert not legs


def test_a_dropped_leg_is_needed_by_none() -> None:
    legs = FirstLegs()
    legs.add("p", FirstLeg(0))
    legs.wait(request_of("a"), "p")
    assert list(legs.drop("p").waiting) == ["a"] and not legs
