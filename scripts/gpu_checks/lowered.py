"""The programs of an op's check cases as they are lowered for a GPU, without one: whether another source makes the same ones.

python scripts/gpu_checks/lowered.py attention               a line of JSON for each case and variant of the sources in the working
                                                             directory; DEVICE_KIND="NVIDIA H100 80GB HBM3" for another GPU
"""

import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

BYTECODE = b"ML\xefR"
"""How a kernel in a program begins: MLIR's bytecode."""
DEVICE_KIND, NUM_CORES = os.environ.get("DEVICE_KIND", "NVIDIA H200"), 132
"""Platform that programs are lowered for. The kinds with a record have as many cores."""
CONFIG = "mhlo.backend_config"
COUNTED = "mosaic_gpu.dump_basename"
"""A name that counts the kernels lowered so far."""
HASH = "kernel_hash"
"""Attribute for the hash of a kernel's bytecode, in which the lines of the source are."""


def programs(names: list[str]) -> Iterator[tuple[str, str]]:
    """Each case and variant of some ops of `scripts.kernels`, with a digest of its program."""
    import jax

    jax.devices()
    # Cases are made for the platform that computes them. No program runs here.
    jax.default_backend = lambda: "gpu"
    from jax.sharding import AbstractDevice, AbstractMesh

    from pallas_kernels.paged_attention import mosaic_decode
    from scripts.kernels import cases

    mosaic_decode.device_kind = lambda: DEVICE_KIND
    device = AbstractDevice(device_kind=DEVICE_KIND, num_cores=NUM_CORES, platform="gpu")
    mesh = AbstractMesh((1,), ("all",), abstract_device=device)
    for name, case in cases("check", names, tiny=False):
        carry, constants = jax.eval_shape(case.make)
        for variant, function in case.variants.items():
            jax.clear_caches()  # names in a program depend on what was traced before
            with jax.sharding.use_abstract_mesh(mesh):
                lowered = jax.jit(function).trace(carry, *constants).lower(lowering_platforms=("cuda",))
            yield f"{name}: {case.name}: {variant}", digest(lowered.compiler_ir())


def digest(module: Any) -> str:
    """Digest of a program with its kernels, without the lines of the source that they come from. Changes the program."""
    from jax._src.lib.mlir import ir

    def strip(operation: Any) -> Any:
        if CONFIG in operation.attributes and isinstance(operation.attributes[CONFIG], ir.DictAttr):
            with operation.context:
                kept = {named.name: _stripped(named.attr) for named in operation.attributes[CONFIG] if named.name != HASH}
                operation.attributes[CONFIG] = ir.DictAttr.get(kept)
        return ir.WalkResult.ADVANCE

    module.operation.walk(strip)
    return hashlib.sha256(module.operation.get_asm(enable_debug_info=False).encode()).hexdigest()[:16]


def _stripped(attribute: Any) -> Any:
    """A kernel as text."""
    from jax._src.interpreters.mlir import make_ir_context
    from jax._src.lib import mosaic_gpu_dialect, triton
    from jax._src.lib.mlir import ir

    if not isinstance(attribute, ir.StringAttr) or not attribute.value_bytes.startswith(BYTECODE):
        return attribute
    with make_ir_context() as context:
        triton.dialect.register_dialect(context)
        mosaic_gpu_dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        text = ir.Module.parse(attribute.value_bytes).operation.get_asm(enable_debug_info=False, print_generic_op_form=True)
    return ir.StringAttr.get(re.sub(f'{COUNTED} = "[^"]*"', "", text))


def header() -> dict[str, Any]:
    """Versions and sources of the programs."""
    from pallas_kernels import verified

    return {
        "device": DEVICE_KIND,
        "jax": importlib.metadata.version("jax"),
        "ops": {op: verified.source_digest(op) for op in verified.OPS},
    }


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, os.getcwd())
    print(json.dumps(header()), flush=True)
    for each in programs(sys.argv[1:]):
        print(json.dumps(each), flush=True)
