"""Which ops were verified on which kinds of device: the records of `scripts/check_gpu.py`, and whether their sources still hold."""

import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

OPS = (
    "collectives",
    "delta_decode",
    "expert_choice",
    "gated_delta",
    "gated_matmul",
    "grouped_matmul",
    "lora",
    "mla_attention",
    "paged_attention",
    "quantize",
    "quantized_matmul",
    "rope_cache_write",
    "router_scores",
    "sampling",
    "segment_attention",
    "state_space",
    "wide_attention",
)
_USES = {
    "gated_matmul": ("grouped_matmul/activation.py", "quantize/values.py"),
    "grouped_matmul": ("quantized_matmul",),
    "lora": ("grouped_matmul",),
    "mla_attention": ("cache_write", "paged_attention", "rope_cache_write"),
    "paged_attention": ("cache_write",),
    "rope_cache_write": ("cache_write",),
    "wide_attention": ("cache_write", "paged_attention"),
}
"""Ops whose implementations call those of other folders, or of a file there."""
RECORDS = Path(__file__).parent / "verified.json"
"""{device kind: record}; a record's "ops" gives the digest of each op's source that passed every check."""
_ROOT = Path(__file__).parent
_NO_KERNELS = ("__init__.py", "verified.py")


@functools.cache
def source_digest(op: str) -> str:
    """A digest of all that an op's kernels are made of: its folder, those it uses, and the shared modules that any of these name."""
    digest = hashlib.sha256()
    shared = [path for path in _ROOT.glob("*.py") if path.name not in _NO_KERNELS]
    parts = [_ROOT / part for part in (op, *_USES.get(op, ()))]
    found = [path for part in parts for path in ([part] if part.is_file() else part.rglob("*.py"))]
    for path in found:  # to which it adds
        words = set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
        found += [each for each in shared if each.stem in words and each not in found]
    for path in sorted(found):
        digest.update(f"{path.relative_to(_ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def records() -> dict[str, dict[str, Any]]:
    """The newest record of each kind of device."""
    return json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else {}


def was_verified(device_kind: str, op: str) -> bool:
    """Whether some source of the op, of this time or an earlier one, passed every check on this kind of device."""
    return op in records().get(device_kind, {}).get("ops", {})


def is_verified(device_kind: str, op: str, *, carried: bool = True) -> bool:
    """Whether the op's source as it stands passed every check on this kind of device; or, if `carried`, one that made the same kernels of
    all cases of that time, whatever newer cases do, which have not run."""
    record, now = records().get(device_kind, {}), source_digest(op)
    found = record.get("carried", {}).get(op, {})
    has_new = found.get("now") == now and found["new"] > 0
    return record.get("ops", {}).get(op) == now and (carried or not has_new)
