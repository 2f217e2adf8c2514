"""Collectives over peer memory between 2 and 4 devices, against NumPy."""

import time
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from pallas_kernels.checking import collectives
from pallas_kernels.collectives import peers_can_access
from scripts.gpu_checks import Outcome, left_out, skip

SIZES = (2, 4)


def check(*, tiny: bool, deadline: float, sizes: Sequence[int] = SIZES) -> Iterator[Outcome]:
    """Every size that the visible devices allow; no case begins after the deadline (`time.perf_counter`). tiny: by XLA."""
    devices = jax.devices()
    for size in sizes:
        name = f"{size} devices"
        if size > len(devices):
            yield skip(name, f"{len(devices)} visible, collectives between {size} were not checked")
            continue
        if not tiny and not peers_can_access(devices[:size]):
            yield skip(name, f"they cannot access each other's memory, collectives between {size} were not checked")
            continue
        mesh = Mesh(np.array(devices[:size]), ("devices",), axis_types=(AxisType.Auto,))
        implementation = "xla" if tiny else "peer"
        for case, fault in collectives.check(mesh, implementation=implementation):
            detail = f"right by {implementation}" if fault is None else fault.text
            yield Outcome(f"{name}: {case}", fault is None, detail)
            if time.perf_counter() > deadline:
                yield left_out(name, "the rest")
                return
