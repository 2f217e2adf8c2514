"""Cases for timing and checking kernels: a file per op.

`bench_kernels.py` times its `speed_cases`, `check_gpu.py` runs its `check_cases`.
To add an op: a file with both functions, each giving a list of `Case`, and a line in OPS.
"""

import importlib
from collections.abc import Iterable

from pallas_kernels.checking.case import Case

__all__ = ["OPS", "Case", "cases"]

OPS = {
    "attention": "scripts.kernels.attention",
    "choice": "scripts.kernels.expert_choice",
    "delta": "scripts.kernels.gated_delta",
    "delta_decode": "scripts.kernels.delta_decode",
    "experts": "scripts.kernels.grouped_matmul",
    "gated": "scripts.kernels.gated_matmul",
    "latent": "scripts.kernels.mla_attention",
    "lora": "scripts.kernels.lora",
    "quantize": "scripts.kernels.quantize",
    "quantized": "scripts.kernels.quantized_matmul",
    "rope": "scripts.kernels.rope_cache_write",
    "router": "scripts.kernels.router_scores",
    "sampling": "scripts.kernels.sampling",
    "segments": "scripts.kernels.segment_attention",
    "space": "scripts.kernels.state_space",
    "wide": "scripts.kernels.wide_attention",
}
"""Each module has speed_cases(tiny, tune) and check_cases(tiny)."""


def cases(kind: str, names: Iterable[str], **options: bool) -> list[tuple[str, Case]]:
    """The `speed` or `check` cases of some ops, each with its op's name."""
    found = []
    for name in names:
        if name not in OPS:
            raise SystemExit(f"no op {name!r}; there are {', '.join(OPS)}")
        module = importlib.import_module(OPS[name])
        found += [(name, case) for case in getattr(module, f"{kind}_cases")(**options)]
    return found
