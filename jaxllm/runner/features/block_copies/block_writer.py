"""Kernels between a staging buffer and blocks of the KV cache, on streams of their own: steps that were dispatched later run meanwhile.

They are CUDA C, as programs of XLA run in the order of steps. They write into arrays of JAX, whose addresses stay as each step takes the
caches and returns them in place. The caller sees to it that no step uses the blocks.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxllm.cache_spec import WORD_BYTES
from jaxllm.runner.block_format import BlockFormat
from jaxllm.runner.features.block_copies.cuda_libraries import CudaError, Driver, Runtime, compiled

_SOURCE = """
#if VEC_WORDS == 4
typedef uint4 Vec;
__device__ unsigned weighed(Vec v, unsigned i) { return v.x * (8 * i + 1) + v.y * (8 * i + 3) + v.z * (8 * i + 5) + v.w * (8 * i + 7); }
#else
typedef unsigned Vec;
__device__ unsigned weighed(Vec v, unsigned i) { return v * (2 * i + 1); }
#endif

// A part of a head in one array of the cache: where block 0 has it, the bytes of a block there, where a row has it, and its words.
struct Piece { unsigned long long to; unsigned long long block_bytes; unsigned from; unsigned words; };

// Marks the rows of which a head's checksum is not the given one; block x of the grid is a head, y a row. See block_format.checksums.
extern "C" __global__ void check_rows(const unsigned* rows, unsigned row_words, const unsigned* starts, const unsigned* sums, unsigned* bad)
{
    unsigned first = starts[blockIdx.x], count = (starts[blockIdx.x + 1] - first) / VEC_WORDS;
    const Vec* words = (const Vec*)(rows + (size_t)blockIdx.y * row_words + first);
    unsigned sum = 0;
    #pragma unroll 4
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) sum += weighed(words[i], i);
    for (int offset = 16; offset; offset /= 2) sum += __shfl_down_sync(0xffffffffu, sum, offset);
    __shared__ unsigned of_warps[32];
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned total = 0;
        for (unsigned warp = 0; warp < blockDim.x / 32; warp++) total += of_warps[warp];
        if (total != sums[blockIdx.y * gridDim.x + blockIdx.x]) bad[blockIdx.y] = 1;
    }
}

// Writes each row that is not marked into its block, a head for each block of the grid, and tells the host which were right.
extern "C" __global__ void write_rows(const unsigned* rows, unsigned row_words, const Piece* pieces, const unsigned* first_pieces,
                                      const int* block_ids, const unsigned* bad, unsigned* is_right)
{
    bool is_bad = bad[blockIdx.y];
    if (blockIdx.x == 0 && threadIdx.x == 0 && threadIdx.y == 0) is_right[blockIdx.y] = !is_bad;
    if (is_bad) return;
    const unsigned* row = rows + (size_t)blockIdx.y * row_words;
    size_t block = block_ids[blockIdx.y];
    for (unsigned number = first_pieces[blockIdx.x] + threadIdx.y; number < first_pieces[blockIdx.x + 1]; number += blockDim.y) {
        Piece piece = pieces[number];
        Vec* to = (Vec*)(piece.to + block * piece.block_bytes);
        const Vec* from = (const Vec*)(row + piece.from);
        #pragma unroll 2
        for (unsigned i = threadIdx.x; i < piece.words / VEC_WORDS; i += blockDim.x) to[i] = from[i];
    }
}
"""
_PIECE = np.dtype([("to", np.uint64), ("block_bytes", np.uint64), ("from", np.uint32), ("words", np.uint32)])
_CHECK_THREADS, _WRITE_THREADS = (512, 1, 1), (128, 4, 1)
_NON_BLOCKING, _PINNED, _TO_DEVICE = 1, 3, 1
"""cudaStreamNonBlocking; cudaHostAllocPortable and cudaHostAllocMapped; cudaMemcpyHostToDevice"""


class Layout:
    """Where the heads of a row are, and their parts in the arrays of a cache."""

    def __init__(self, format: BlockFormat):
        starts, first_pieces, of_piece = [0], [0], []
        for run in format.runs:
            for head in range(run.num_heads):
                position = starts[-1]
                for index, words in zip(run.arrays, run.head_words, strict=True):
                    of_piece.append((index, head, run.num_heads, position, words))
                    position += words
                starts.append(position)
                first_pieces.append(len(of_piece))
        assert starts[-1] == format.part_words
        self.starts, self.first_pieces = np.array(starts, np.uint32), np.array(first_pieces, np.uint32)
        self._array, head, num_heads, position, words = np.array(of_piece, np.int64).T
        self._offset, self.pieces = WORD_BYTES * head * words, np.zeros(len(of_piece), _PIECE)
        self.pieces["block_bytes"], self.pieces["from"], self.pieces["words"] = WORD_BYTES * num_heads * words, position, words
        self.vec_words = 1 if np.any(np.concatenate([position, words, self.starts]) % 4) else 4

    def at(self, addresses: Sequence[int]) -> np.ndarray:
        """The pieces, if the arrays have these addresses."""
        found = self.pieces.copy()
        found["to"] = np.array(addresses, np.uint64)[self._array] + self._offset.astype(np.uint64)
        return found


class BlockWriter:
    """Writes rows of staging buffers into the blocks of one device."""

    def __init__(self, runtime: Runtime, format: BlockFormat, ordinal: int, max_rows: int, num_buffers: int):
        """num_buffers: staging buffers that are written at a time. Raises CudaError, or ConfigError if a library is missing."""
        self._runtime, self._ordinal, self._row_words, self._num_heads = runtime, ordinal, format.part_words, format.num_sums
        self._layout = Layout(format)
        self._addresses: tuple[int, ...] = ()
        self.stream = ctypes.c_void_p()
        self._memory: list[ctypes.c_void_p] = []
        self._pinned: list[ctypes.c_void_p] = []
        self._module = ctypes.c_void_p()
        self._driver = Driver()
        runtime.call("cudaSetDevice", ordinal)
        try:
            least, greatest = ctypes.c_int(), ctypes.c_int()
            runtime.call("cudaDeviceGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
            runtime.call("cudaStreamCreateWithPriority", ctypes.byref(self.stream), _NON_BLOCKING, greatest)
            program = compiled(_SOURCE, runtime.architecture(ordinal), {"VEC_WORDS": self._layout.vec_words})
            self._driver.call("cuModuleLoadData", ctypes.byref(self._module), program)
            self._check, self._write = (self._function(name) for name in ("check_rows", "write_rows"))
            tables = [self._layout.starts, self._layout.first_pieces]
            self._starts, self._first_pieces = (self._on_device(table.nbytes) for table in tables)
            self._pieces = self._on_device(self._layout.pieces.nbytes)
            self._bad = [self._on_device(4 * max_rows) for _ in range(num_buffers)]
            self._block_ids = [self._on_host(np.int32, max_rows) for _ in range(num_buffers)]
            self._sums = [self._on_host(np.uint32, max_rows * self._num_heads) for _ in range(num_buffers)]
            self._is_right = [self._on_host(np.uint32, max_rows) for _ in range(num_buffers)]
            for table, to in zip(tables, (self._starts, self._first_pieces), strict=True):
                self._send(to, table)
        except BaseException:
            self.close()
            raise

    def _function(self, name: str) -> ctypes.c_void_p:
        function = ctypes.c_void_p()
        self._driver.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
        return function

    def _on_device(self, size: int) -> ctypes.c_void_p:
        address = ctypes.c_void_p()
        self._runtime.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        self._memory.append(address)
        return address

    def _on_host(self, dtype: Any, count: int) -> np.ndarray:
        """An array that devices read and write too, at its address."""
        address, size = ctypes.c_void_p(), np.dtype(dtype).itemsize * count
        self._runtime.call("cudaHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), _PINNED)
        self._pinned.append(address)
        assert address.value is not None
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address.value), dtype)

    def _send(self, to: ctypes.c_void_p, table: np.ndarray) -> None:
        """Copy a table to the device, behind all that was begun."""
        source, size = ctypes.c_void_p(table.ctypes.data), ctypes.c_size_t(table.nbytes)
        self._runtime.call("cudaMemcpyAsync", to, source, size, _TO_DEVICE, self.stream)
        self._runtime.call("cudaStreamSynchronize", self.stream)

    def begin(
        self,
        buffer: int,
        rows: int,
        arrived: ctypes.c_void_p,
        block_ids: Sequence[int],
        sums_nH: np.ndarray,
        addresses: Sequence[int],
    ) -> Callable[[], np.ndarray]:
        """Begin to write the first rows of a staging buffer into blocks, behind an event. Of this thread's device.

        buffer: number of the staging buffer, which nothing else uses meanwhile; rows: its address. sums_nH: uint32, the checksums that they
        should have; others are not written. addresses: of the caches' arrays. Returns what waits for it: bool [n], which were right.
        Raises CudaError.
        """
        count = len(block_ids)
        self._block_ids[buffer][:count] = block_ids
        self._sums[buffer][: sums_nH.size] = sums_nH.reshape(-1)
        if (now := tuple(addresses)) != self._addresses:
            self._send(self._pieces, self._layout.at(now))
            self._addresses = now
        runtime, bad = self._runtime, self._bad[buffer]
        runtime.begin("cudaStreamWaitEvent", self.stream, arrived, 0)
        runtime.begin("cudaMemsetAsync", bad, 0, ctypes.c_size_t(4 * count), self.stream)
        row = (ctypes.c_void_p(rows), ctypes.c_uint(self._row_words))
        grid = (self._num_heads, count, 1)
        self._driver.launch(self._check, grid, _CHECK_THREADS, self.stream, (*row, self._starts, _at(self._sums[buffer]), bad))
        found = self._is_right[buffer]
        arguments = (*row, self._pieces, self._first_pieces, _at(self._block_ids[buffer]), bad, _at(found))
        self._driver.launch(self._write, grid, _WRITE_THREADS, self.stream, arguments)
        event = ctypes.c_void_p()
        runtime.begin("cudaEventCreateWithFlags", ctypes.byref(event), 2)  # cudaEventDisableTiming
        runtime.begin("cudaEventRecord", event, self.stream)

        def wait() -> np.ndarray:
            runtime.begin("cudaSetDevice", self._ordinal)
            try:
                runtime.call("cudaEventSynchronize", event)
            finally:
                runtime.begin("cudaEventDestroy", event)
            return found[:count] != 0

        return wait

    def synchronize(self) -> None:
        """Wait for all that was begun."""
        self._runtime.call("cudaStreamSynchronize", self.stream)

    def close(self) -> None:
        """Give back what the device and the host have, as far as a device that is lost allows it."""
        calls: list[tuple[str, Any]] = [("cudaSetDevice", self._ordinal)]
        calls += [("cudaFree", address) for address in self._memory] + [("cudaFreeHost", address) for address in self._pinned]
        if self.stream:
            calls.append(("cudaStreamDestroy", self.stream))
        for name, argument in calls:
            try:
                self._runtime.call(name, argument)
            except CudaError:
                continue
        if self._module:
            self._driver.unload(self._module)
        self._memory, self._pinned, self.stream, self._module = [], [], ctypes.c_void_p(), ctypes.c_void_p()


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
