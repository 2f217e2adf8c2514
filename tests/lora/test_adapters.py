"""Adapters come and go while requests use them. The engine has no model; every output is checked to be that of its adapter."""

from pathlib import Path

import pytest

from jaxllm.engine.fault_points import injected
from jaxllm.lora.manager import CLAIM_SECONDS
from tests.helpers.adapters import AdapterEngine, refused


def put(directory: Path, value: int) -> Path:
    """An adapter on disk."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_text(str(value))
    return directory


def make(num_slots: int = 2, *names: str, **options: object) -> AdapterEngine:
    """An engine with adapters of these names, whose numbers are 1, 2, …"""
    engine = AdapterEngine(num_slots, **options)  # type: ignore[arg-type]
    for value, name in enumerate(names, 1):
        assert engine.add(name, str(value)) == ""
    return engine


def where(engine: AdapterEngine) -> dict[str, str]:
    return {info.name: info.where for info in engine.adapters.list_adapters()}


def test_requests_of_several_adapters_and_of_none_share_steps():
    engine = make(2, "a", "b")
    for adapter in ("a", None, "b", "a"):
        engine.ask(adapter, [1] * 20)
    engine.run()
    assert len({tuple(tokens) for tokens in engine.received.values()}) == 3 and not engine.errors
    assert where(engine) == {"a": "device", "b": "device"}
    assert (engine.stats.num_adapter_loads, engine.stats.num_adapter_evictions) == (2, 0)


def test_adapters_with_the_same_files_share_cached_blocks_and_others_do_not():
    engine = make(3, "a", "b", "c")
    assert engine.add("c", "1", replace=True) == ""  # as a
    numbers = []
    for adapter in "abc":
        engine.ask(adapter, [1] * 20)
        engine.run()
        numbers.append(engine.scheduler.stats().prefix_cache_hits)
    assert numbers == [0, 0, 16]


def test_at_most_as_many_adapters_as_slots_run_and_others_are_overtaken():
    engine = make(2, "a", "b", "c", max_host=3)
    asked = {name: engine.ask(name[0]) for name in ("a1", "b1", "c1", "a2", "plain")[:4]} | {"plain": engine.ask(None)}
    ids = {request_id: name for name, request_id in asked.items()}
    admitted: list[str] = []
    while len(admitted) < 4:
        admitted += [ids[request_id] for request_id in engine.step()]
        assert len(engine.stats.running_adapters) <= 2
    assert admitted[0] == "plain" and set(admitted) == {"plain", "a1", "a2", "b1"}
    assert engine.stats.waiting_adapters == ("c",) and set(engine.stats.running_adapters) == {"a", "b"}
    engine.run()
    assert engine.stats.num_adapter_evictions == 1 and where(engine)["c"] == "device"


def test_steps_go_on_while_an_adapter_is_read_and_it_has_its_slot_before_it_is_next_in_line():
    engine = make(2, "a", "b", max_num_seqs=1, seconds={"read": 1.0, "stage": 0.01})
    engine.adapters._host.clear()
    engine.ask(None, max_tokens=100)
    late = engine.ask("b")
    for _ in range(60):
        engine.step()
    assert where(engine) == {"a": "disk", "b": "device"} and late not in engine.admitted_at
    engine.run()
    assert engine.clock.now < 2 * 1.0 + 130 * 0.02  # two adapters were read before, and none held up a step


def test_the_least_recently_used_slot_is_taken_and_never_a_pinned_one():
    engine = make(2, "a", "b", "c", max_host=3)
    engine.adapters.pin_adapter("a")
    for adapter in "bcbc":
        engine.ask(adapter)
        engine.run()
        assert where(engine)["a"] == "device"
    engine = make(3, "a", "b", "c", "d", max_host=4)
    for adapter in "abcad":
        engine.ask(adapter)
        engine.run()
    assert [name for name, place in where(engine).items() if place != "device"] == ["b"]


def test_what_pins_refuse():
    engine = make(1, "a", "b")
    waiting = engine.ask("b")
    assert "requests for 'b'" in refused(lambda: engine.adapters.pin_adapter("a"))
    engine.run()
    engine.adapters.pin_adapter("a")
    assert "all 1 slots have pinned adapters" in refused(lambda: engine.adapters.pin_adapter("b"))
    assert "all 1 have pinned adapters" in refused(lambda: engine.ask("b"))
    assert "AdapterNotFoundError" in refused(lambda: engine.adapters.pin_adapter("x"))
    old = engine.ask("a")
    assert engine.add("a", "7", replace=True) == ""
    new = engine.ask("a")
    engine.run()
    assert engine.received[old] != engine.received[new] and engine.adapters.list_adapters()[0].is_pinned
    assert engine.adapters.remove_adapter("a") and engine.received[waiting]
    engine.ask("b")
    engine.run()


def test_an_adapter_that_waits_long_gets_a_slot_from_one_whose_requests_never_end():
    engine = make(1, "hot", "cold", max_host=2, max_num_seqs=4)
    engine.ask("hot")
    asked_at, cold = engine.clock.now, engine.ask("cold")
    while cold not in engine.admitted_at and engine.clock.now < asked_at + 10:
        engine.ask("hot", max_tokens=3)
        engine.step()
    assert CLAIM_SECONDS <= engine.admitted_at[cold] - asked_at < CLAIM_SECONDS + 1
    engine.run()


def test_adapters_that_lack_a_slot_take_turns_and_each_turn_serves_a_request():
    engine = make(1, "a", "b", "c", max_host=3, max_num_seqs=2)
    for index in range(30):
        engine.ask("abc"[index % 3])
    engine.run()
    assert engine.stats.num_adapter_loads <= 30


def test_a_request_whose_adapter_is_loaded_is_admitted_before_another_adapter_takes_the_slot():
    engine = make(1, "a", "b", max_host=2)
    first, other = engine.ask("a", max_tokens=30), engine.ask("b")
    while first in engine.scheduler.requests:
        engine.step()
    second = engine.ask("a")
    engine.run()
    assert engine.admitted_at[second] < engine.admitted_at[other]


def test_a_slot_that_a_request_cannot_use_yet_goes_to_a_more_urgent_one():
    engine = make(1, "a", "b", max_host=2, max_num_seqs=1, scheduling_policy="priority")
    engine.ask(None, max_tokens=60)
    engine.ask("a", priority=1)
    for name in "ab":
        for _ in range(15):
            engine.step()
        assert where(engine)[name] == "device"
        engine.ask("b", priority=0)
    engine.run()


def test_a_request_that_waits_for_blocks_keeps_its_slot():
    engine = make(2, "a", "b", "c", max_host=3, num_blocks=9, block_size=4, max_model_len=32, caching=False)
    engine.ask("c", [1] * 20, max_tokens=12)
    for adapter in "abab":
        engine.ask(adapter, [1] * 20, max_tokens=12)
    engine.run()
    assert engine.stats.num_adapter_loads <= 5


# Disk


def test_an_adapter_that_left_the_disk_lives_in_memory_and_fails_its_requests_alone_when_it_is_evicted(tmp_path):
    engine = make(1, "a", "b", "c")
    path = put(tmp_path / "x", 7)
    assert engine.add("x", path) == ""
    engine.ask("x")
    engine.run()
    (path / "adapter_model.safetensors").unlink()
    good = engine.ask("x", [2] * 9)
    engine.run()
    for adapter in "abc":
        engine.ask(adapter)
    engine.run()
    assert where(engine)["x"] == "disk" and engine.received[good] and not engine.errors
    lost, other = engine.ask("x"), engine.ask("a")
    engine.run()
    assert set(engine.errors) == {lost} and engine.received[other]
    assert "adapter_model.safetensors of adapter 'x'" in engine.errors[lost] and "is gone" in engine.errors[lost]
    put(path, 8)
    changed = engine.ask("x")
    engine.run()
    assert "has changed since the adapter was added" in engine.errors[changed]
    assert engine.add("x", path, replace=True) == ""
    mended = engine.ask("x")
    engine.run()
    assert mended not in engine.errors and engine.values[engine.requests[mended][0].adapter.number] == 8


@pytest.mark.parametrize("fault", ["adapter.read:id=b:error", "adapter.stage:id=b:error", "op:1:error"])
def test_a_failure_on_the_way_ends_those_that_wait_and_the_next_request_tries_again(fault):
    engine = make(2, "a", "b")
    engine.ask("a")
    engine.run()
    engine.adapters._host.clear()
    running, plain = engine.ask("a", max_tokens=60), engine.ask(None, max_tokens=60)
    engine.step()
    with injected(fault):
        failed = [engine.ask("b"), engine.ask("b")]
        for _ in range(30):
            engine.step()
    assert set(engine.errors) == set(failed)
    good = engine.ask("b")
    engine.run()
    assert engine.received[good] and engine.received[running] and engine.received[plain] and set(engine.errors) == set(failed)


def test_requests_whose_adapters_fail_in_the_same_step_all_end():
    engine = make(2, "b", "c")
    engine.adapters._host.popitem()
    with injected("op:1:error,adapter.read:1:error"):
        plain, *asked = engine.ask(None, max_tokens=60), engine.ask("b"), engine.ask("c")
        engine.step()
        engine.tick(0.1)
        engine.abort(plain)
        engine.step()
    assert set(engine.errors) == set(asked) and not engine.scheduler.requests


def test_slots_that_were_lost_are_filled_again():
    engine = make(2, "a", "b")
    for adapter in ("a", "b", None):
        engine.ask(adapter, max_tokens=40)
    for _ in range(10):
        engine.step()
    engine.scheduler.start_over()
    engine.engine.in_flight.clear()
    engine.engine.runner.start_over()
    engine.engine.runner.slots = [0, 0]
    engine.adapters.forget_slots()
    engine.adapters._host.clear()
    engine.check()
    engine.run()
    assert engine.stats.num_adapter_loads == 4


def test_what_requests_wait_for_is_read_while_many_adapters_are_added():
    engine = make(2, "a", max_host=30)
    engine.adapters._host.clear()
    for index in range(20):
        engine.start_adding(f"b{index}", "5")
    asked_at, request = engine.clock.now, engine.ask("a")
    engine.run()
    assert engine.admitted_at[request] - asked_at < 0.2


# Names


def test_adapters_are_added_once_unless_replaced():
    engine = make(2, "a")
    assert "loaded already" in refused(lambda: engine.add("a", "5"))
    first, second = engine.start_adding("b", "5"), engine.start_adding("b", "5")
    assert first == second
    assert "is being loaded from 5" in refused(lambda: engine.add("b", "6"))
    assert "AdapterNotFoundError" in refused(lambda: engine.ask("b"))
    third = engine.start_adding("b", "6", replace=True)
    assert engine.adapters.adapter_state(first).error == "adapter 'b' was replaced before it was loaded"
    engine.tick(1)
    assert engine.adapters.adapter_state(third).state == "ready"
    engine.ask("b")
    engine.run()
    assert "1 to 256 characters" in refused(lambda: engine.add("a\n", "1"))
    assert "no adapter was added with the number 99" in refused(lambda: engine.adapters.adapter_state(99))
    assert not engine.adapters.remove_adapter("x")


def test_an_adapter_that_cannot_be_read_is_not_added_and_the_one_it_replaces_stays(tmp_path):
    engine = make(2, "a")
    bad = tmp_path / "none"
    assert str(bad) in engine.add("b", bad)
    assert str(bad) in engine.add("a", bad, replace=True)
    with injected("adapter.read:id=b:oom"):
        assert "cannot be read from 1 (RuntimeError)" in engine.add("b", "1")
    engine.ask("a")
    engine.run()
    assert list(where(engine)) == ["a"] and not engine.errors


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("how", ["replaced", "removed and added"])
def test_requests_end_with_the_adapter_that_they_began_with(num_slots, how):
    engine = make(num_slots, "a", max_host=2)
    old = [engine.ask("a", [1] * 20, max_tokens=40) for _ in range(3)]
    for _ in range(12):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    if how == "replaced":
        assert engine.add("a", "9", replace=True) == ""
    else:
        assert engine.adapters.remove_adapter("a")
        assert "AdapterNotFoundError" in refused(lambda: engine.ask("a"))
        assert engine.add("a", "9") == ""
    new = engine.ask("a", [1] * 20, max_tokens=40)
    most = 0
    while engine.scheduler.has_requests():
        engine.step()
        most = max(most, sum(adapter is not None for adapter in engine.adapters._slots))
    engine.run()
    assert len({tuple(engine.received[request_id]) for request_id in old}) == 1
    assert engine.received[new] != engine.received[old[0]] and most == num_slots
    assert len([adapter for adapter in engine.adapters._slots if adapter]) == 1  # the old one is nowhere


def test_removal_while_it_is_read_staged_or_used():
    engine = make(2, "a", seconds={"read": 0.1, "stage": 0.1})
    number = engine.start_adding("b", "2")
    assert engine.adapters.remove_adapter("b")
    assert engine.adapters.adapter_state(number).error == "adapter 'b' was removed before it was loaded"
    engine.tick(1)
    assert list(where(engine)) == ["a"]
    engine.adapters._host.clear()
    request = engine.ask("a")
    for _ in range(5):
        engine.step()
        assert engine.adapters.remove_adapter("a") == (_ == 0)
    engine.run()
    assert engine.received[request] and not where(engine) and not engine.adapters._host
    assert engine.add("a", "4") == ""
    aborted = engine.ask("a", max_tokens=90)
    engine.ask(None, max_tokens=30)
    engine.step()
    assert engine.adapters._staging is not None
    engine.adapters.remove_adapter("a")
    engine.abort(aborted)
    engine.run()
    assert engine.adapters._slots == [None, None] and engine.adapters._staging is None


def test_an_abort_while_an_adapter_is_read_leaves_it_in_memory_and_nothing_else():
    engine = make(1, "a")
    engine.adapters._host.clear()
    engine.ask(None, max_tokens=30)
    engine.abort(engine.ask("a"))
    engine.run()
    assert not engine.received["r1"] and where(engine)["a"] == "host"
    assert engine.adapters.remove_adapter("a") and not engine.adapters._host


def test_many_are_added_and_only_as_many_as_fit_are_kept_in_memory():
    engine = AdapterEngine(2, max_host=3)
    numbers = [engine.start_adding(f"a{index}", str(index + 1)) for index in range(10)]
    engine.tick(10)
    assert {engine.adapters.adapter_state(number).state for number in numbers} == {"ready"}
    assert list(where(engine).values()) == ["host"] * 3 + ["disk"] * 7
    for index in (*range(10), 4, 5):
        engine.ask(f"a{index}")
    engine.run()
    assert not engine.errors and len(engine.adapters._host) == 3


def test_an_engine_whose_requests_have_no_adapters_does_nothing_for_them():
    engine = make(2, "a")
    plain = engine.ask(None)
    engine.adapters._take_in_read = engine.adapters._start_staging = None
    engine.run()
    assert engine.received[plain] and engine.stats.num_adapter_loads == 0
