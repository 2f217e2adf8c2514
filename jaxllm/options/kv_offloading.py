"""Which options exclude keeping blocks of the prefix cache in host memory. Does not import JAX."""

from collections.abc import Mapping
from typing import Any

_EXCLUDED: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, "each stage has blocks of its own layers"),
}


def kv_offloading_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe the options that contradict kv_offloading_size, or what is behind it."""
    size = flat["kv_offloading_size"]
    disk_faults = _disk_faults(flat)
    if not isinstance(size, int | float) or size <= 0:
        return disk_faults + _write_faults(flat)
    given = f"kv_offloading_size is {size}"
    faults = disk_faults + [
        f"{given} and {name} {flat[name]}, but {reason}; leave one of them out"
        for name, (harmless, reason) in _EXCLUDED.items()
        if flat[name] != harmless
    ]
    if flat["nnodes"] != 1 and (flat["data_parallel_size"] == 1 or flat["enable_expert_parallel"]):
        faults.append(f"{given} and nnodes {flat['nnodes']}, but the host memory of one host is used; leave one of them out")
    if flat["enable_prefix_caching"] is False:
        faults.append(f"{given}, but what is kept is found by prefix caching, which is off; leave one of both out")
    if flat["enable_expert_parallel"] and flat["data_parallel_size"] != 1:
        faults.append(f"{given}, but data-parallel ranks of one engine keep blocks on devices alone; leave one of both out")
    return faults


def _write_faults(flat: Mapping[str, Any]) -> list[str]:
    """The fault of writing to host memory where there is none."""
    if flat["kv_offloading_write"] == "cold":
        return []
    return [
        f"kv_offloading_write is {flat['kv_offloading_write']!r}, but blocks are written to host memory, of which there is none; give "
        "kv_offloading_size too, or leave it out"
    ]


def _disk_faults(flat: Mapping[str, Any]) -> list[str]:
    directory, size = flat["kv_offloading_disk"], flat["kv_offloading_disk_size"]
    if directory is None and size is None:
        return []
    if not directory:
        return [
            f"kv_offloading_disk_size is {size}, but kv_offloading_disk names no directory; give one, or leave the size out"
        ]
    faults = []
    if size is None:
        faults.append(
            f"kv_offloading_disk is {directory!r}, but kv_offloading_disk_size does not say how much it may hold; give GiB"
        )
    if not flat["kv_offloading_size"]:
        faults.append(
            f"kv_offloading_disk is {directory!r}, but files are read and written by way of host memory, of which there is none; "
            "give kv_offloading_size too"
        )
    return faults
