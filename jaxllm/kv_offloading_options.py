"""Which options exclude keeping blocks of the prefix cache in host memory. Does not import JAX."""

from collections.abc import Mapping
from typing import Any

_EXCLUDED: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, "each stage has blocks of its own layers"),
    "prefill_context_parallel_size": (1, "devices split the tokens of a block"),
    "nnodes": (1, "the host memory of one host is used"),
}


def kv_offloading_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe the options that contradict kv_offloading_size."""
    size = flat["kv_offloading_size"]
    if not isinstance(size, int | float) or size <= 0:
        return []
    given = f"kv_offloading_size is {size}"
    faults = [
        f"{given} and {name} {flat[name]}, but {reason}; leave one of them out"
        for name, (harmless, reason) in _EXCLUDED.items()
        if flat[name] != harmless
    ]
    if flat["enable_prefix_caching"] is False:
        faults.append(f"{given}, but what is kept is found by prefix caching, which is off; leave one of both out")
    if flat["enable_expert_parallel"] and flat["data_parallel_size"] != 1:
        faults.append(f"{given}, but data-parallel ranks of one engine keep blocks on devices alone; leave one of both out")
    return faults
