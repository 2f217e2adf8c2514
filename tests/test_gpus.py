"""GPU driver queries, with stand-ins for the driver's libraries: the machine needs no GPU."""

import ctypes
import os
import shutil
import uuid
from dataclasses import dataclass, field

import pytest

from jaxllm import LLM, gpus
from jaxllm.cli.main import main
from jaxllm.errors import ConfigError, OutOfMemoryError
from jaxllm.parallel.mesh import make_mesh
from jaxllm.parallel.topology import Topology
from jaxllm.runner import memory
from tests.helpers import goldens

GIB = 1 << 30


@dataclass
class Machine:
    """GPUs of 100 GiB, of which programs can have 99; NVML counts all, CUDA those that are visible, in the order given."""

    free_gibibytes: list[float]
    visible: list[int] | None = None
    mig: bool = False
    num_open: int = field(default=0, init=False)

    @property
    def order(self) -> list[int]:
        return list(range(len(self.free_gibibytes))) if self.visible is None else self.visible

    def library(self, name: str) -> object:
        return {"libcuda.so.1": Cuda(self), "libnvidia-ml.so.1": Nvml(self)}[name]


def set_value(pointer, value) -> int:
    pointer._obj.value = value
    return 0


@dataclass
class Cuda:
    machine: Machine

    def cuInit(self, flags):  # noqa: N802
        return 0 if self.machine.order else 100

    def cuDeviceGetCount(self, count):  # noqa: N802
        return set_value(count, len(self.machine.order))

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        return set_value(device, ordinal) if ordinal < len(self.machine.order) else 101

    def cuDeviceTotalMem_v2(self, size, device):  # noqa: N802
        return set_value(size, 99 * GIB)

    def cuDeviceGetUuid_v2(self, identity, device):  # noqa: N802
        identity._obj[:] = uuid.UUID(int=self.machine.order[device.value]).bytes
        return 0


@dataclass
class Nvml:
    machine: Machine

    def nvmlInit_v2(self):  # noqa: N802
        self.machine.num_open += 1
        return 0

    def nvmlShutdown(self):  # noqa: N802
        self.machine.num_open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        return set_value(count, len(self.machine.free_gibibytes))

    def nvmlDeviceGetHandleByUUID(self, text, handle):  # noqa: N802
        kind, _, rest = text.decode().partition("-")
        if (kind == "MIG") != self.machine.mig:
            return 6
        return set_value(handle, uuid.UUID(rest).int + 1)

    def nvmlDeviceGetMemoryInfo(self, handle, info):  # noqa: N802
        info._obj.total, info._obj.free = 100 * GIB, int(self.machine.free_gibibytes[handle.value - 1] * GIB)
        return 0

    def nvmlDeviceGetIndex(self, handle, index):  # noqa: N802
        return set_value(index, handle.value - 1)

    def nvmlDeviceGetName(self, handle, name, length):  # noqa: N802
        name.value = b"Toy"
        return 0


@pytest.fixture
def machine(monkeypatch):
    """Makes this process one before JAX's start on such a machine."""

    def make(*free_gibibytes: float, visible: list[int] | None = None, **options) -> Machine:
        made = Machine(list(free_gibibytes), visible, **options)
        monkeypatch.setattr(gpus, "_library", made.library)
        monkeypatch.setattr(memory, "_will_start_on_gpus", lambda: True)
        monkeypatch.setattr(memory, "PATIENCE_SECONDS", 0.0)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, visible)))
        return made

    for name in (
        "CUDA_VISIBLE_DEVICES",
        "XLA_CLIENT_MEM_FRACTION",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "XLA_PYTHON_CLIENT_ALLOCATOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
    return make


def start(fraction: float = 0.92, size: int = 1) -> str | None:
    """The engine's steps before JAX finds its devices. The fraction of each that JAX will take."""
    memory.reserve_device_memory(fraction, Topology(size))
    memory.check_free_memory(Topology(size))
    return os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")


def test_gpus_come_in_the_order_of_cuda_with_the_memory_that_nvml_says(machine) -> None:
    made = machine(10, 20, 30, 40, visible=[3, 1])
    assert [(gpu.index, gpu.free_bytes // GIB) for gpu in gpus.visible_gpus()] == [(3, 40), (1, 20)]
    assert str(gpus.visible_gpus()[0]) == "GPU 3 (Toy)" and gpus.visible_gpus()[0].total_bytes == 99 * GIB
    assert made.num_open == 0


def test_a_slice_of_a_gpu_is_found_by_its_own_name(machine) -> None:
    machine(10, mig=True)
    assert len(gpus.visible_gpus()) == 1


@pytest.mark.parametrize("missing", ["libcuda.so.1", "libnvidia-ml.so.1"])
def test_nothing_is_known_or_refused_without_the_libraries(machine, monkeypatch, missing) -> None:
    made = machine(1, 1, visible=[0])
    monkeypatch.setattr(gpus, "_library", lambda name: None if name == missing else made.library(name))
    assert gpus.visible_gpus() == ()
    start()


def test_free_gpus_are_taken(machine) -> None:
    machine(99, 98.5)
    assert start() == start(size=2) == "0.920"  # the first one counts


def test_a_busy_gpu_is_named_with_its_numbers_and_the_ways_out(machine) -> None:
    machine(99, 50, 99, 99)
    with pytest.raises(OutOfMemoryError) as caught:
        start(size=2)
    assert str(caught.value) == (
        "GPU 1 (Toy) has 50.00 GiB of 99.00 GiB free; 91.09 GiB are needed there (--gpu-memory-utilization, JAX takes 0.905 of each "
        "GPU when it starts): end what holds the rest (nvidia-smi lists programs), use --gpu-memory-utilization 0.5 or less, or choose "
        "free GPUs: CUDA_VISIBLE_DEVICES=0,2"
    )


def test_a_program_that_is_ending_is_waited_for(machine, monkeypatch) -> None:
    made = machine(1)
    monkeypatch.setattr(memory, "PATIENCE_SECONDS", 3.0)
    monkeypatch.setattr(memory.time, "sleep", lambda seconds: made.free_gibibytes.__setitem__(0, 99))
    memory.reserve_device_memory(0.92)
    memory.check_free_memory()
    assert made.free_gibibytes == [99]


def test_a_busy_gpu_that_is_not_used_is_let_be(machine) -> None:
    machine(99, 50)
    assert start() == "0.920"


@pytest.mark.parametrize("arguments", [["generate", "x"], ["bench", "latency"]])
def test_commands_say_it_in_one_line(machine, capsys, arguments) -> None:
    machine(99, 50)
    assert main([*arguments, "--tensor-parallel-size", "2", "--quiet"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_engine_refuses_before_it_reads_weights(machine, tmp_path) -> None:
    machine(1)
    shutil.copy(goldens.FOLDER / "llama_gqa" / "config.json", tmp_path)
    with pytest.raises(OutOfMemoryError, match="GPU 0 .* has 1.00 GiB of 99.00 GiB free"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_a_smaller_share_is_taken_beside_another_program(machine) -> None:
    machine(50)
    assert start(0.4) == "0.400"


def test_several_busy_gpus_are_all_named_and_none_is_promised(machine) -> None:
    machine(5, 3, 99, visible=[1, 0])
    with pytest.raises(
        OutOfMemoryError, match=r"GPU 1 .* has 3.00 GiB .* free; GPU 0 .* has 5.00 GiB .* or choose others with"
    ) as caught:
        start(size=2)
    assert "--gpu-memory-utilization 0." not in str(caught.value)


def test_a_full_gpu_that_is_not_used_keeps_jax_from_starting(machine) -> None:
    machine(99, 0.25)
    with pytest.raises(OutOfMemoryError, match=r"GPU 1 .*the engine does not use it.*free GPUs: CUDA_VISIBLE_DEVICES=0$"):
        start()


@pytest.mark.parametrize(
    ("name", "value"), [("XLA_PYTHON_CLIENT_PREALLOCATE", "false"), ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")]
)
def test_memory_that_is_taken_as_needed_is_not_asked_for(machine, monkeypatch, name, value) -> None:
    machine(5)
    monkeypatch.setenv(name, value)
    assert start() == "0.920"


@pytest.mark.parametrize("name", ["XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"])
def test_what_the_environment_says_of_jax_counts(machine, monkeypatch, name) -> None:
    machine(30)
    monkeypatch.setenv(name, "0.25")
    start()
    monkeypatch.setenv(name, "0.35")
    with pytest.raises(OutOfMemoryError, match="34.65 GiB are needed"):
        start()


def test_jax_that_has_started_or_does_not_use_gpus_is_not_checked(monkeypatch) -> None:
    import jax

    jax.devices()
    assert not memory._will_start_on_gpus()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not memory._will_start_on_gpus()


@pytest.mark.parametrize(
    ("visible", "hint"),
    [([0], r"leave it out, or show it more \(CUDA_VISIBLE_DEVICES=0 hides 3 of 4 GPUs\)$"), (None, "leave it out$")],
)
def test_gpus_that_are_hidden_are_mentioned_where_too_few_are_found(machine, visible, hint) -> None:
    machine(9, 9, 9, 9, visible=visible)

    class Device:
        platform, device_kind = "gpu", "Toy"

    with pytest.raises(ConfigError, match=hint):
        make_mesh(2, [Device()])


def test_gpus_that_jax_does_not_use_are_not_called_hidden(machine) -> None:
    machine(9, 9, visible=[0])
    assert gpus.hidden_gpus(0) is None
    machine(9, 9, visible=[])
    assert gpus.hidden_gpus(0) == "CUDA_VISIBLE_DEVICES= hides 2 of 2 GPUs"


def test_a_missing_library_is_no_error() -> None:
    assert gpus._library("libno-such-library.so.1") is None
    assert ctypes.sizeof(gpus._Memory) == 24
