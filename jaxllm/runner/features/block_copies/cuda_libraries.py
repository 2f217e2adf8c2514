"""Libraries of CUDA, by ctypes: the runtime, the driver and the compiler of kernels at run time, as JAX's packages bring them."""

import ctypes
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError

_MAJOR, _MINOR = 75, 76
"""cudaDevAttrComputeCapabilityMajor and …Minor"""


class CudaError(RuntimeError):
    """A call of CUDA's runtime, driver or compiler failed."""


class Runtime:
    """CUDA's runtime, the library that JAX has loaded if it is in sight."""

    def __init__(self) -> None:
        self._waiting, self._library = load_runtime()
        self._library.cudaGetErrorName.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call that may take long, while other threads run Python. Raises CudaError unless it succeeds."""
        self._check(name, getattr(self._waiting, name)(*arguments))

    def begin(self, name: str, *arguments: Any) -> None:
        """Make a call that returns within microseconds: to give Python up for it, and get it back from other threads, would take longer.
        Raises CudaError unless it succeeds."""
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code:
            raise CudaError(f"{name} failed: {self._library.cudaGetErrorName(code).decode()}")

    def architecture(self, ordinal: int) -> str:
        """The architecture of a device, e.g. sm_90."""
        found = []
        for attribute in (_MAJOR, _MINOR):
            value = ctypes.c_int()
            self.call("cudaDeviceGetAttribute", ctypes.byref(value), attribute, ordinal)
            found.append(value.value)
        return "sm_{}{}".format(*found)


class Driver:
    """CUDA's driver, for kernels of one's own."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                f"kv_offloading_size is set, but libcuda.so.1, NVIDIA's driver, cannot be used ({error})"
            ) from error

    def call(self, name: str, *arguments: Any) -> None:
        """Raises CudaError unless it succeeds."""
        if code := getattr(self._library, name)(*arguments):
            raise CudaError(f"{name} failed: error {code}")

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int, int],
        threads: tuple[int, int, int],
        stream: ctypes.c_void_p,
        arguments: Sequence[Any],
    ) -> None:
        """Start a kernel on this thread's device. arguments: ctypes values. Raises CudaError."""
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self.call("cuLaunchKernel", function, *grid, *threads, 0, stream, pointers, None)

    def unload(self, module: ctypes.c_void_p) -> None:
        """Unload kernels from this thread's device, as far as one that is lost allows it."""
        self._library.cuModuleUnload(module)


def load_runtime() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """CUDA's runtime, whose calls give Python up or keep it. Raises ConfigError if there is none."""
    path = _found("libcudart", "CUDA's runtime")
    return ctypes.CDLL(path), ctypes.PyDLL(path)


def compiled(source: str, architecture: str, macros: Mapping[str, int]) -> bytes:
    """Compile CUDA C for devices of an architecture. Raises CudaError, or ConfigError if there is no compiler."""
    compiler = ctypes.CDLL(_found("libnvrtc", "CUDA's compiler of kernels"))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: Any) -> int:
        return int(getattr(compiler, name)(*arguments))

    if code := call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None):
        raise CudaError(f"nvrtcCreateProgram failed: error {code}")
    try:
        options = [
            f"--gpu-architecture={architecture}".encode(),
            *(f"-D{name}={value}".encode() for name, value in macros.items()),
        ]
        if code := call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options)):
            call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            call("nvrtcGetProgramLog", program, log)
            raise CudaError(f"nvrtcCompileProgram failed: error {code}: {log.value.decode(errors='replace').strip()}")
        if code := call("nvrtcGetCUBINSize", program, ctypes.byref(size)):
            raise CudaError(f"nvrtcGetCUBINSize failed: error {code}")
        found = ctypes.create_string_buffer(size.value)
        if code := call("nvrtcGetCUBIN", program, found):
            raise CudaError(f"nvrtcGetCUBIN failed: error {code}")
        return found.raw
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


def _found(name: str, what: str) -> str:
    """The path of a library of CUDA. Raises ConfigError if there is none."""
    for path in dict.fromkeys((*_loaded(name), *_installed(name), *(f"{name}.so{end}" for end in (".13", ".12", "")))):
        try:
            ctypes.CDLL(path)
        except OSError:
            continue
        return path
    raise ConfigError(f"kv_offloading_size is set, but {name}, {what}, is not found; install jaxllm[cuda12] or jaxllm[cuda13]")


def _loaded(name: str) -> list[str]:
    """Paths of a library that this process has mapped."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [path for line in lines if f"/{name}.so" in (path := line.partition("/")[1] + line.partition("/")[2])]


def _installed(name: str) -> Iterator[str]:
    """Paths of a library in packages of NVIDIA."""
    for root in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        yield from map(str, sorted(Path(root, "nvidia").glob(f"**/{name}.so.*")))
