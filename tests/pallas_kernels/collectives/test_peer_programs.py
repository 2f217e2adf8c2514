"""The PTX of the collectives, interpreted on simulated GPUs that drift apart, against NumPy."""

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.collectives import control, exchange, programs, reference
from pallas_kernels.collectives.exchange import COUNTERS, EMPTY, FAILED, HEADER_WORDS, RANK, SILENT, SLOTS, STATE, WAITING
from pallas_kernels.collectives.plans import Plan
from pallas_kernels.collectives.programs import Program
from tests.helpers.ptx_interpreter import Launch, Machine, TrapError

pytestmark = pytest.mark.slow

EPS = 1e-5


@dataclass
class Devices:
    """Simulated GPUs with their workspaces; calls are collected, and run together."""

    size: int
    seed: int = 0
    calls: list[tuple[Program, list[dict[str, int]]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = Machine(self.size, self.seed)
        self.rng = np.random.default_rng(self.seed)
        empty = np.full(exchange.WORKSPACE_BYTES // 4, EMPTY, np.uint32)
        empty[COUNTERS // 4 : SLOTS // 4] = 0
        self.workspaces = [self.machine.place(device, empty) for device in range(self.size)]
        self.set_state(WAITING)
        self.run()

    def set_state(self, state: int) -> None:
        header = np.zeros((self.size, HEADER_WORDS), np.uint32)
        for rank in range(self.size):
            neighbours = [self.workspaces[(rank + i) % self.size] for i in range(self.size)]
            header[rank, : 2 * self.size] = np.array(neighbours, np.uint64).view(np.uint32)
            header[rank, RANK // 4], header[rank, STATE // 4] = rank, state
        self.call(programs.write_header(), header=header)

    def call(self, program: Program | None, **arrays: np.ndarray) -> int:
        """Every array has the devices' parts as its first dimension. Returns the number of the call."""
        assert program is not None
        pointers = []
        for device in range(self.size):
            found = {name: self.machine.place(device, array[device]) for name, array in arrays.items()}
            for name, (shape, dtype) in program.results.items():
                found[name] = self.machine.place(device, np.full(shape, 77, jnp.dtype(dtype)))
            pointers.append(found | {"workspace": self.workspaces[device], "scratch": 0})
        self.calls.append((program, pointers))
        return len(self.calls) - 1

    def run(self) -> None:
        """Collected values, on every device in this order."""
        self.machine.run(
            [
                [
                    Launch(
                        program.text, tuple(pointers[device][name] for name in program.operands), program.ctas, program.threads
                    )
                    for program, pointers in self.calls
                ]
                for device in range(self.size)
            ]
        )
        self.done, self.calls = self.calls, []

    def results(self, call: int, name: str = "out") -> np.ndarray:
        """A result of a call of the last run, of all devices."""
        program, pointers = self.done[call]
        shape, dtype = program.results[name]
        return np.stack([self.machine.words(found[name]).view(jnp.dtype(dtype)).reshape(shape) for found in pointers])

    def normal(self, *shape: int, dtype: str) -> np.ndarray:
        return self.rng.standard_normal((self.size, *shape)).astype(jnp.dtype(dtype))

    def states(self) -> list[int]:
        return [int(self.machine.words(workspace)[STATE // 4]) for workspace in self.workspaces]

    def assert_clean(self) -> None:
        """No word is left in a slot, and channels of all devices have counted the same calls."""
        self.machine.settle()
        for workspace in self.workspaces:
            assert (self.machine.words(workspace)[SLOTS // 4 :] == EMPTY).all()
        counts = [self.machine.words(workspace)[COUNTERS // 4 : SLOTS // 4] for workspace in self.workspaces]
        assert all(np.array_equal(count, counts[0]) for count in counts)
        assert self.states() == [WAITING] * self.size


def same_on_all(results: np.ndarray, expected: np.ndarray) -> None:
    """Equal bits on all devices, equal values to what is expected; of NaN only that it is one."""
    for found in results:
        assert found.tobytes() == results[0].tobytes(), "devices differ"
    np.testing.assert_array_equal(results[0].astype(np.float32), expected.astype(np.float32))


def sums(
    devices: Devices, shape: tuple[int, int], dtype: str, shots: int, *, norm: bool, residual: bool, plan: Plan | None = None
) -> Any:
    """Calls an all-reduce of new data; what is returned checks it after the run. plan: None for that of the shape."""
    x = devices.normal(*shape, dtype=dtype)
    x[0, 0, 0] = -0.0
    arrays = {"x": x}
    if residual:
        arrays["residual"] = np.repeat(devices.normal(*shape, dtype=dtype)[:1], devices.size, 0)
    if norm:
        arrays["weight"] = np.repeat(devices.normal(shape[1], dtype=dtype)[:1], devices.size, 0)
    eps = EPS if norm else None
    if plan is None:
        program = programs.all_reduce(shape, dtype, devices.size, has_residual=residual, eps=eps, num_shots=shots)
    else:
        program = programs.reduction(plan, shots, shape, dtype, devices.size, residual, eps)
    call = devices.call(program, **arrays)

    def check() -> None:
        weight = arrays["weight"][0] if norm else np.ones(shape[1], x.dtype)
        h, y = reference.all_reduce_norm(x, arrays["residual"][0] if residual else None, weight, EPS)
        same_on_all(devices.results(call), h)
        if norm:
            normed = devices.results(call, "normed")
            same_on_all(normed, normed[0])
            near = 2.0**-7 if dtype == "bfloat16" else 2e-6
            np.testing.assert_allclose(normed[0].astype(np.float64), y.astype(np.float64), rtol=near, atol=1e-6)

    return check


CASES = {
    "two devices, one row": (2, (1, 64), "bfloat16", 1),
    "a ragged end": (4, (3, 328), "bfloat16", 1),
    "float32, three devices": (3, (5, 260), "float32", 1),
    "wider than the threads": (2, (2, 1032 * 4), "bfloat16", 1),
    "several rows a CTA": (2, (5, 264), "bfloat16", 1, Plan(128, 2, 33, 1, 3, 1, 165)),
    "a row twice as wide as the threads": (2, (3, 1120), "bfloat16", 1, Plan(128, 2, 140, 2, 2, 1, 420)),
    "two shots": (4, (9, 264), "bfloat16", 2),
    "two shots, fewer rows than devices": (4, (2, 64), "bfloat16", 2),
    "two shots, float32, five devices": (5, (7, 132), "float32", 2),
    "two shots, several wide rows a CTA": (2, (7, 560), "float32", 2, Plan(128, 2, 140, 2, 2, 2, 980)),
}


ALSO_WITHOUT_NORM = (
    "two devices, one row",
    "float32, three devices",
    "several rows a CTA",
    "a row twice as wide as the threads",
    "two shots, fewer rows than devices",
    "two shots, several wide rows a CTA",
)


@pytest.mark.parametrize(("case", "norm"), [*((case, True) for case in CASES), *((case, False) for case in ALSO_WITHOUT_NORM)])
def test_sums_are_those_of_ranks_in_their_order_and_the_same_bits_everywhere(case, norm) -> None:
    size, shape, dtype, shots, *plan = CASES[case]
    devices = Devices(size, seed=len(CASES) + norm)
    planned = plan[0] if plan else None
    checks = [sums(devices, shape, dtype, shots, norm=norm, residual=norm or i > 0, plan=planned) for i in range(3)]
    devices.run()
    for check in checks:
        check()
    devices.assert_clean()


def words_of_any_bits(devices: Devices, count: int) -> np.ndarray:
    words = devices.rng.integers(0, 2**32, (devices.size, count), np.uint32)
    special = np.array([EMPTY, EMPTY - 1, 0, 0xFFFF, 0xFFFF0000, 0x7FC00000, 0x80000000], np.uint32)
    words[:, : len(special)] = special[: words.shape[1]]
    return words


@pytest.mark.parametrize("count", [1, 7, 128, 150])
def test_gathered_words_keep_their_bits(count) -> None:
    devices = Devices(3)
    given = [words_of_any_bits(devices, count) for _ in range(3)]
    for words in given:
        devices.call(programs.all_gather((count,), "uint32", 3), x=words)
    devices.run()
    for call, words in enumerate(given):
        for found in devices.results(call):
            np.testing.assert_array_equal(found, words)
    devices.assert_clean()


@pytest.mark.parametrize("plan", [None, Plan(128, 2, 384, 3, 1, 1, 600)], ids=["one vector a thread", "three"])
def test_slices_go_to_their_devices_and_of_nan_only_the_payload_changes(plan) -> None:
    devices, shape = Devices(4), (4,) if plan is None else (3, 800)
    program = (
        programs.all_to_all((4, *shape), "float32", 4)
        if plan is None
        else programs.exchange_of_slices(plan, (4, *shape), "float32", 4)
    )
    given = []
    for _ in range(2):
        x = devices.normal(4, *shape, dtype="float32")
        x.reshape(4, 4, -1)[1, :, :3] = np.array([EMPTY, 0x7FC00000, EMPTY - 1], np.uint32).view(np.float32)
        x.reshape(4, 4, -1)[2, :, :3] = [-np.inf, np.inf, -0.0]
        given.append(x)
        devices.call(program, x=x)
    devices.run()
    for call, x in enumerate(given):
        found, expected = devices.results(call), reference.all_to_all(x)
        np.testing.assert_array_equal(found, expected)
        bits, nan = (found.view(np.uint32), np.isnan(expected))
        np.testing.assert_array_equal(bits[~nan], np.ascontiguousarray(expected).view(np.uint32)[~nan])
    devices.assert_clean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shots", [1, 2])
def test_the_bits_of_an_empty_slot_can_be_added_up(dtype, shots) -> None:
    devices = Devices(2)
    x = devices.normal(2, 64, dtype=dtype)
    x.view(np.uint32).reshape(2, 2, -1)[1, :, 3] = EMPTY
    call = devices.call(programs.all_reduce((2, 64), dtype, 2, num_shots=shots), x=x)
    devices.run()
    expected = reference.all_reduce(x).astype(np.float32)
    assert np.isnan(expected).sum() == (4 if dtype == "bfloat16" else 2)
    same_on_all(devices.results(call), expected)
    devices.assert_clean()


@pytest.mark.parametrize("seed", range(2))
def test_calls_of_all_kinds_and_shapes_follow_each_other_in_one_workspace(seed) -> None:
    devices = Devices(3, seed)
    checks = []
    for _ in range(8):
        kind = devices.rng.integers(6)
        if kind < 4:
            shape = [(1, 64), (5, 1048), (11, 136)][devices.rng.integers(3)]
            checks.append(sums(devices, shape, "bfloat16", kind % 2 + 1, norm=kind > 1, residual=True))
        elif kind == 4:
            words = words_of_any_bits(devices, 130)
            call = devices.call(programs.all_gather((130,), "uint32", 3), x=words)
            checks.append(lambda call=call, words=words: np.testing.assert_array_equal(devices.results(call)[2], words))
        else:
            x = devices.normal(3, 600, dtype="float32")
            call = devices.call(programs.all_to_all((3, 600), "float32", 3), x=x)
            checks.append(lambda call=call, x=x: np.testing.assert_array_equal(devices.results(call), reference.all_to_all(x)))
    devices.run()
    for check in checks:
        check()
    devices.assert_clean()


def test_silent_calls_leave_no_trace() -> None:
    """Also if one device is still silent when another exchanges already."""
    devices = Devices(2, seed=3)
    before = sums(devices, (3, 64), "bfloat16", 1, norm=True, residual=True)
    devices.set_state(SILENT)
    x = devices.normal(3, 64, dtype="float32")
    quiet = [devices.call(programs.all_reduce((3, 64), "float32", 2, num_shots=shots), x=x) for shots in (1, 2)]
    devices.call(programs.all_gather((7,), "uint32", 2), x=words_of_any_bits(devices, 7))
    state = devices.call(programs.status(), after=x)
    devices.set_state(WAITING)
    after = sums(devices, (3, 64), "bfloat16", 2, norm=True, residual=True)
    state_after = devices.call(programs.status(), after=x)
    devices.run()
    before()
    after()
    np.testing.assert_array_equal(devices.results(quiet[0]), x * 2)  # one shot: the own part in the place of the other's
    assert np.isfinite(devices.results(quiet[1])).all()
    assert devices.results(state).ravel().tolist() == [SILENT] * 2
    assert devices.results(state_after).ravel().tolist() == [WAITING] * 2
    devices.assert_clean()


@pytest.fixture
def short_waits(monkeypatch):
    """A wait is given up after some twenty polls."""
    monkeypatch.setattr(exchange, "POLLS_PER_LOOK", 4)
    monkeypatch.setattr(exchange, "WAIT_SECONDS", 0.2)
    caches = (programs._all_reduce, programs.all_gather, programs.all_to_all)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("shots", [1, 2])
def test_a_wait_is_given_up_and_every_device_hears_of_it(short_waits, shots) -> None:
    devices = Devices(3)
    program = programs.all_reduce((2, 64), "bfloat16", 3, num_shots=shots)
    call = devices.call(program, x=devices.normal(2, 64, dtype="bfloat16"))
    launches = [
        [Launch(program.text, tuple(found[name] for name in program.operands), program.ctas, program.threads)] * (device != 1)
        for device, found in enumerate(devices.calls[call][1])
    ]
    devices.machine.run(launches)
    devices.machine.settle()
    assert devices.states() == [FAILED] * 3
    devices.calls = []
    last = devices.call(programs.status(), after=devices.normal(1, dtype="float32"))
    sums(devices, (2, 64), "bfloat16", 2, norm=False, residual=False)
    devices.run()  # nothing waits any more
    assert devices.results(last).ravel().tolist() == [FAILED] * 3


def test_a_workspace_that_was_copied_ends_the_program() -> None:
    devices = Devices(2)
    devices.workspaces = [devices.machine.place(0, devices.machine.words(devices.workspaces[0])), devices.workspaces[1]]
    devices.call(programs.all_gather((4,), "uint32", 2), x=words_of_any_bits(devices, 4))
    with pytest.raises(TrapError):
        devices.run()


def test_clearing_empties_slots_and_counters_and_nothing_else() -> None:
    machine, end = Machine(1), SLOTS + 3 * 4096
    before = np.arange(1, end // 4 + 9, dtype=np.uint32)
    workspace, out = machine.place(0, before), machine.place(0, np.full(1, 5, np.int32))
    text = control.clear(("workspace", "out"), ctas=2, threads=128, slots=COUNTERS + 2048, end=COUNTERS + 2048 + 2 * 4096)
    machine.run([[Launch(text, (workspace, out), 2, 128)]])
    found = machine.words(workspace)
    first, last = COUNTERS // 4, (COUNTERS + 2048) // 4
    np.testing.assert_array_equal(found[:first], before[:first])
    assert (found[first:last] == 0).all() and (found[last : last + 2048] == EMPTY).all()
    np.testing.assert_array_equal(found[last + 2048 :], before[last + 2048 :])
    assert machine.words(out)[0] == 0
