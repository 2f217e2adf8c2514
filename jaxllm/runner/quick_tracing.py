"""Traces programs sooner: without what JAX does anew for each operation of a kernel, and without garbage collections."""

import contextlib
import functools
import gc
import importlib
import sys
import threading
from collections.abc import Iterator

_TRITON_OPS = "jaxlib.mlir.dialects.tt"
"""The module that MLIR's bindings look for with every operation of a Triton kernel. jaxlib has these in another one."""


def spare_lookups() -> None:
    """Give JAX an answer at once to two questions that it asks for each operation of a kernel: which module has Triton's operations (four
    searches of the import path that find nothing), and what version `ptxas` has (a process). May be called again."""
    with contextlib.suppress(ImportError):
        sys.modules.setdefault(_TRITON_OPS, importlib.import_module("jaxlib.triton.dialect"))
    with contextlib.suppress(ImportError, AttributeError):
        mosaic = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
        if not hasattr(mosaic._get_ptxas_isa_version, "cache_clear"):
            mosaic._get_ptxas_isa_version = functools.cache(mosaic._get_ptxas_isa_version)


_lock = threading.Lock()
_num_traces = 0
_resumes = False
"""Whether the collector was on before the first of these."""


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Within, the garbage collector is off, for all threads: a trace makes a million objects, which hold hardly a cycle, and each full
    collection meanwhile takes 0.2 s."""
    global _num_traces, _resumes
    with _lock:
        if _num_traces == 0:
            _resumes = gc.isenabled()
            gc.disable()
        _num_traces += 1
    try:
        yield
    finally:
        with _lock:
            _num_traces -= 1
            if _num_traces == 0 and _resumes:
                gc.enable()
