"""Programs are compiled in the background, in order, once each; a caller waits only for the program it needs."""

import threading
import time

import pytest

from jaxllm.progress import SILENT
from jaxllm.runner import program_pool as module
from jaxllm.runner.program_pool import ProgramPool


class Lowered:
    """A program that compiles on command."""

    def __init__(self, key: str, compiled: list[str], gate: threading.Event | None = None):
        self.key, self._compiled, self._gate = key, compiled, gate

    def compile(self, *, compiler_options: dict[str, bool]) -> str:
        assert compiler_options == {}
        if self._gate is not None:
            assert self._gate.wait(5)
        self._compiled.append(self.key)
        return f"program {self.key}"


class Workshop:
    """Programs that note what is traced and compiled; those in `gates` compile only when their event is set."""

    def __init__(self, *, threads: int = 2, store=None):
        self.traced: list[str] = []
        self.compiled: list[str] = []
        self.gates: dict[str, threading.Event] = {}
        self.programs: ProgramPool[str] = ProgramPool(self.lower, threads=threads, store=store)

    def lower(self, key: str) -> Lowered:
        self.traced.append(key)
        if key == "broken":
            raise ValueError("cannot be traced")
        return Lowered(key, self.compiled, self.gates.get(key))


class Store:
    """A store in memory."""

    def __init__(self, *keys: str):
        self.content = {key: f"stored {key}" for key in keys}

    def load(self, key):
        return self.content.get(key)

    def save(self, key, program):
        self.content[key] = program


@pytest.fixture
def shop():
    made: list[Workshop] = []

    def make(**options) -> Workshop:
        made.append(Workshop(**options))
        return made[-1]

    yield make
    for each in made:
        for gate in each.gates.values():
            gate.set()
        each.programs.shutdown()


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def test_all_are_made_once(shop):
    at = shop(threads=3)
    at.programs.compile_all([str(i) for i in range(20)], SILENT)
    at.programs.compile_all([str(i) for i in range(20)], SILENT)
    assert sorted(at.compiled) == sorted(map(str, range(20))) and len(at.programs) == at.programs.num_compiled == 20


def test_a_request_that_needs_a_queued_program_makes_it_itself(shop):
    at = shop(threads=1)
    at.gates = {"slow": threading.Event(), "slow too": threading.Event()}
    at.programs.start(["slow", "slow too", "later"])
    until(lambda: sorted(at.traced) == ["slow", "slow too"])  # two threads are held up
    assert at.programs.get("later") == "program later"
    assert at.compiled == ["later"]


def test_two_that_need_the_same_program_share_one_compilation(shop):
    at = shop()
    at.gates = {"a": threading.Event()}
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(at.programs.get("a"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: at.traced)
    at.gates["a"].set()
    for thread in threads:
        thread.join()
    assert found == ["program a"] * 3 and at.traced == ["a"]


def test_rare_programs_come_last_and_one_at_a_time(shop):
    at = shop(threads=3)
    at.gates = {"rare 1": threading.Event()}
    at.programs.start(["a", "b"], rare=["rare 1", "rare 2"])
    at.programs.wait(["a", "b"])
    until(lambda: "rare 1" in at.traced)
    assert set(at.compiled) == {"a", "b"} and "rare 2" not in at.traced
    at.gates["rare 1"].set()
    at.programs.wait(["rare 1", "rare 2"])
    assert at.compiled[2:] == ["rare 1", "rare 2"]


def test_a_program_is_ready_before_it_is_stored(shop):
    kept = threading.Event()

    class SlowStore(Store):
        def save(self, key, program):
            assert kept.wait(5)
            super().save(key, program)

    store = SlowStore()
    at = shop(store=store)
    at.programs.start(["a", "b"])
    at.programs.wait(["a", "b"])
    assert at.programs.get("a") == "program a" and not store.content
    kept.set()
    at.programs.shutdown()  # waits for what is being stored
    assert store.content == {"a": "program a", "b": "program b"}


def test_nothing_is_traced_behind_a_busy_engine(shop, monkeypatch):
    monkeypatch.setattr(module, "_QUIET_SECONDS", 0.05)
    at = shop()
    at.programs.compile_all(["step"], SILENT)
    at.programs.is_warm = True
    at.programs.get("step")
    at.programs.start([], rare=["rare"])
    for _ in range(40):
        at.programs.get("step")
        time.sleep(0.002)
    assert "rare" not in at.traced
    until(lambda: at.compiled == ["step", "rare"])
    at.programs.get("rare")
    assert at.programs.num_compiled_after_warmup == 0, "nobody waited"


def test_a_program_that_is_needed_does_not_wait_for_an_idle_engine(shop, monkeypatch):
    monkeypatch.setattr(module, "_QUIET_SECONDS", 60.0)
    at = shop()
    at.programs.get("step")
    at.programs.start([], rare=["a", "b", "c"])
    at.programs.expect(["a", "b"])
    assert set(at.compiled) == {"step", "a", "b"}
    at.programs.expect(["step", "b"], ["likely"])
    assert "likely" not in at.traced, "the step itself need not wait"
    at.programs.expect(["step", "d", "e"], ["likely"])
    assert set(at.compiled) == {"step", "a", "b", "d", "e"}, "what is missing is made together"
    at.programs.expect(["f"], ["likely"])
    assert set(at.compiled) >= {"f", "likely"}


def test_only_compilations_that_somebody_waits_for_are_late(shop):
    at = shop(store=Store("stored"))
    at.programs.is_warm = True
    assert at.programs.get("stored") == "stored stored"
    assert at.programs.num_compiled_after_warmup == 0 and not at.traced
    at.gates = {"begun": threading.Event()}
    at.programs.start(["begun"])
    until(lambda: "begun" in at.traced)
    threading.Timer(0.05, at.gates["begun"].set).start()
    at.programs.get("begun")
    at.programs.get("unforeseen")
    assert at.programs.num_compiled_after_warmup == 2


def test_what_fails_is_raised_where_it_is_needed_and_stops_nothing_else(shop):
    at = shop()
    at.programs.start(["broken", "a"], rare=["b"])
    with pytest.raises(ValueError, match="cannot be traced"):
        at.programs.wait(["broken", "a"])
    assert at.programs.get("a") == "program a" and at.programs.get("b") == "program b"


def test_a_store_is_asked_first_and_filled(shop):
    store = Store("a")
    at = shop(store=store)
    at.programs.compile_all(["a", "b"], SILENT)
    assert at.traced == ["b"] and store.content["b"] == "program b"
    assert (at.programs.num_loaded, at.programs.num_compiled) == (1, 1)


def test_a_slow_start_says_whether_programs_are_loaded_or_compiled(shop, monkeypatch, caplog):
    monkeypatch.setattr(module, "_SLOW_SECONDS", 0.05)
    caplog.set_level("INFO", logger="jaxllm")
    store = Store("stored")
    load = store.load

    def slow_load(key):
        if key == "stored":
            until(lambda: caplog.text)
        return load(key)

    store.load = slow_load
    work = shop(store=store)
    work.programs.get("stored")
    assert "loading programs" in caplog.text and "compiling" not in caplog.text
    work.gates["new"] = threading.Event()
    thread = threading.Thread(target=work.programs.get, args=("new",))
    thread.start()
    until(lambda: "compiling programs as they are needed for the first time; the next run starts sooner" in caplog.text)
    work.gates["new"].set()
    thread.join()


def test_shutdown_begins_nothing_more(shop):
    at = shop(threads=1)
    at.gates = {"a": threading.Event(), "b": threading.Event()}
    at.programs.start(["a", "b", "c"], rare=["d"])
    until(lambda: len(at.traced) == 2)
    threading.Timer(0.05, lambda: [gate.set() for gate in at.gates.values()]).start()
    at.programs.shutdown()
    at.programs.shutdown()
    assert at.compiled and "c" not in at.traced and "d" not in at.traced


def test_what_callers_wait_for_can_be_asked_meanwhile(shop):
    at = shop(threads=1)
    at.programs.compile_all(["old"], SILENT)
    at.gates = {"b": threading.Event()}
    waiting = threading.Thread(target=at.programs.expect, args=[["a", "b", "old"]])
    waiting.start()
    until(lambda: at.programs.awaited == (1, 2))
    at.gates["b"].set()
    waiting.join()
    assert at.programs.awaited == (0, 0)


def test_a_program_that_a_request_waits_for_is_made_before_those_for_later_and_beside_them(shop, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LATER", 1)
    at = shop(threads=4)
    at.gates = {key: threading.Event() for key in ("later 1", "wanted")}
    at.programs.start((), later=["later 1", "later 2"], rare=["rare", "wanted"])
    at.programs.begin_later()
    until(lambda: at.traced == ["later 1"])
    jobs = [at.programs.want(key) for key in ("wanted", "wanted", "broken")]
    until(lambda: at.traced == ["later 1", "wanted"])
    assert jobs[0] is jobs[1], "once, and as many beside those for later as one"
    at.gates["wanted"].set()
    assert jobs[0].result(5) == "program wanted" == at.programs.want("wanted").result(0)
    with pytest.raises(ValueError, match="cannot be traced"):
        jobs[2].result(5)
    at.gates["later 1"].set()
    until(lambda: not at.programs.num_queued)
    assert at.traced[2:4] == ["broken", "later 2"] and len(at.programs) == 4
    last = [at.programs.want("broken") for _ in range(2)][1]
    with pytest.raises(ValueError, match="cannot be traced"):
        last.result(5)


def test_programs_for_later_are_made_few_at_a_time_behind_what_is_needed_and_before_rare_ones(shop, monkeypatch):
    monkeypatch.setattr(module, "_MOST_LATER", 1)
    at = shop(threads=4)
    at.gates = {key: threading.Event() for key in ("a", "b", "later 1", "later 2")}
    at.programs.start(["a", "b"], later=["later 1", "later 2", "later 3"], rare=["rare 1", "rare 2"])
    until(lambda: sorted(at.traced) == ["a", "b"])
    assert not at.programs._workers[2:], "a start is not delayed by what it does not wait for"
    at.programs.begin_later()
    until(lambda: at.traced[2:] == ["later 1"])
    at.programs.hurry(["rare 2", "later 3", "new"])
    for key in ("a", "b"):
        at.gates[key].set()
    at.programs.wait(["a", "b"])
    assert at.traced[3:] == [] and at.programs.num_queued == 6
    at.gates["later 1"].set()
    until(lambda: "later 2" in at.traced)
    assert at.traced[3:7] == ["rare 2", "later 3", "new", "later 2"]  # a rare one may begin concurrently with the last
    assert at.programs.get("rare 1") == "program rare 1"
    at.gates["later 2"].set()
    until(lambda: not at.programs.num_queued)
    assert len(at.programs) == len(set(at.traced)) == len(at.traced) == 8
