"""Mosaic kernels whose CTAs have warpgroups that compute, the consumers, and behind them one that copies for them, the producer."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _compat

PRODUCER_REGISTERS = 40
"""Registers of a thread of the producer."""


def consumer_registers(num_consumers: int) -> int:
    """Registers that a consumer may ask for: those its threads begin with, and its share of those that the producer gives back. It
    waits forever for more."""
    at_start = (1 << 16) // (128 * (num_consumers + 1)) // 8 * 8
    return (at_start + (at_start - PRODUCER_REGISTERS) // num_consumers) // 8 * 8


def run(num_consumers: int, consume: Callable[[Any], None], produce: Callable[[], None]) -> None:
    """The body of a kernel with the thread axis "wg": consume(index) in each consumer, produce() in the producer."""
    plgpu, wg = _compat.mosaic(), lax.axis_index("wg")

    @pl.when(wg < num_consumers)
    def _():
        plgpu.set_max_registers(consumer_registers(num_consumers), action="increase")
        consume(wg)

    @pl.when(wg == num_consumers)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce()
