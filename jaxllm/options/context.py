"""Which options context parallelism excludes. Does not import JAX."""

from collections.abc import Mapping
from typing import Any

_EXCLUDED = {
    "pipeline_parallel_size": (1, "stages have one row of devices each"),
    "speculative_config": (None, "drafts are verified where each device has all keys"),
}


def context_faults(flat: Mapping[str, Any]) -> list[str]:
    """Describe the options that contradict prefill_context_parallel_size."""
    size = flat["prefill_context_parallel_size"]
    if not isinstance(size, int) or size <= 1:
        return []
    return [
        f"prefill_context_parallel_size is {size} and {name} {flat[name]}, but {reason}; leave one of them out"
        for name, (harmless, reason) in _EXCLUDED.items()
        if flat[name] != harmless
    ]
