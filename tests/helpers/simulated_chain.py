"""The chain's PTX on a simulated GPU: what its warpgroups do, with NumPy in the place of copies and tensor cores."""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from pallas_kernels.product_chain import finish, waiting
from pallas_kernels.product_chain.finish import CHUNK, FOUR
from pallas_kernels.product_chain.mosaic import residual_name, results_of
from pallas_kernels.product_chain.plan import BLOCK, HALF, STEP, Chain
from pallas_kernels.product_chain.streams import CONSUMERS, input_name
from pallas_kernels.product_chain.waiting import THREADS, Counters
from tests.helpers.ptx_interpreter import Launch, Machine
from tests.helpers.ptx_translation import translate


class SimulatedChain:
    """Kernels of a chain, one after the other on one device and with the same counters."""

    def __init__(self, plan: Chain, arrays: Mapping[str, np.ndarray], num_ctas: int, seed: int):
        self.plan, self.arrays, self.num_ctas = plan, arrays, num_ctas
        self.machine = Machine(1, seed)
        self.results = {name: each for i in range(len(plan.products)) for name, each in results_of(plan, i).items()}
        given = {name: array for name, array in arrays.items() if not name.startswith("weight")}
        self.addresses = {name: self.machine.place(0, array) for name, array in given.items()}
        self.addresses |= {
            name: self.machine.place(0, np.full(each.shape, np.nan, each.dtype)) for name, each in self.results.items()
        }
        self.addresses |= {"workspace": self.machine.place(0, np.zeros(Counters(plan).num_words, np.int32)), "scratch": 0}
        self.ready = dict.fromkeys(range(num_ctas), 0)
        self.sums: dict[tuple[int, int], np.ndarray] = {}

    def run(self) -> dict[str, np.ndarray]:
        """The results by name, NaN where nothing was written."""
        self.ready, self.sums = dict.fromkeys(range(self.num_ctas), 0), {}
        self.machine.run([[Launch(self.thread, (), self.num_ctas, THREADS * (CONSUMERS + 1))]])
        return {name: self.read(name, each.shape, each.dtype) for name, each in self.results.items()}

    @property
    def counters(self) -> np.ndarray:
        return self.machine.words(self.addresses["workspace"])

    def read(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return self.machine.words(self.addresses[name]).view(np.dtype(dtype)).reshape(shape).copy()

    def thread(self, thread: int, machine: Any, shared: Any, device: int, cta: int, _: object) -> Iterator[Any]:
        where = thread, machine, shared, device, cta
        workspace = (self.addresses["workspace"],)
        if thread >= CONSUMERS * THREADS:
            for index in range(1, len(self.plan.products)):
                yield from translate(waiting.await_product(("workspace",), self.plan, index - 1))(*where, workspace)
                self.ready[cta] = index
            if len(self.plan.products) > 1:
                yield from translate(waiting.leave(("workspace",), self.plan, self.num_ctas))(*where, workspace)
            return
        for index, product in enumerate(self.plan.products):
            for unit in range(cta, product.num_units, self.num_ctas):
                while self.ready[cta] < index:
                    yield None
                yield from self.finished(index, unit, where)

    def finished(self, index: int, unit: int, where: tuple[Any, ...]) -> Iterator[Any]:
        names = {
            "out": f"out{index}",
            "parts": f"parts{index}",
            "residual": residual_name(self.plan, index),
            "squares": f"own_squares{index - 1}",
            **{name: f"{name}{index}" for name in ("norm_weight", "normed", "own_squares")},
        }
        operands = finish.finish_operands(self.plan.products[index])
        values = self.values(index, unit, where[0])
        text = finish.finish(("unit", *operands, *(f"sum{i}" for i in range(len(values)))), self.plan, index)
        pointers = [self.addresses[names.get(name, name)] for name in operands]
        yield from translate(text)(*where, (unit, *pointers, *values))

    def values(self, index: int, unit: int, thread: int) -> list[int]:
        """Bits of a thread's sums, in the order of the layout WGMMA."""
        if (index, unit) not in self.sums:
            self.sums[index, unit] = self.product(index, unit)
        warp, group, pair = thread % THREADS // 32, thread % 32 // 4, thread % 4
        output = thread // THREADS * HALF + 16 * warp + group
        found = [
            sums[output + 8 * (four // 2), CHUNK * chunk + 2 * pair + four % 2]
            for sums in self.sums[index, unit]
            for chunk in range(self.plan.padded_rows // CHUNK)
            for four in range(FOUR)
        ]
        return [int(bits) for bits in np.array(found, np.float32).view(np.uint32)]

    def product(self, index: int, unit: int) -> np.ndarray:
        """float32 [sums of an output, BLOCK, rows] of what is in memory now."""
        product, plan = self.plan.products[index], self.plan
        block, part = divmod(unit, product.num_parts)
        inputs = slice(part * product.num_steps * STEP, (part + 1) * product.num_steps * STEP)
        outputs = slice(block * BLOCK, (block + 1) * BLOCK)
        x = self.read(input_name(plan, index), (plan.num_rows, product.num_inputs), ml_dtypes.bfloat16)[:, inputs]
        weight = self.arrays[f"weight{index}"].reshape(product.num_inputs, product.num_sums, -1)[inputs, :, outputs]
        sums = np.einsum("tk,kcn->cnt", x.astype(np.float32), weight.astype(np.float32))
        return np.pad(sums, ((0, 0), (0, 0), (0, plan.padded_rows - plan.num_rows)))
