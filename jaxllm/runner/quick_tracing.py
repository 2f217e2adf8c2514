"""Traces programs sooner: without what JAX does anew for each operation of a kernel."""

import contextlib
import functools
import importlib
import sys

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
