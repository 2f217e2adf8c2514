"""Carries the verification of ops over to a source that makes the same kernels: see `lowered`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.gpu_checks.lowered import header
from scripts.gpu_checks.record import OPS_OF_CASES

PLAIN = ("xla", "reference")
"""Implementations that have no kernels: tests on a CPU compare them with NumPy."""


def carry(records: Mapping[str, Any], before: Path, now: Path) -> dict[str, Any]:
    """The records with the digests of the sources as they stand for all ops of `now` whose cases have the same kernels as `before`.

    Raises SystemExit if a kernel differs, or if `before` is not of the verified sources and the same version of JAX.
    """
    (old_header, old), (new_header, new) = _read(before), _read(now)
    device_kind = new_header["device"]
    record = records[device_kind]
    if old_header["device"] != device_kind:
        raise SystemExit(f"{before} is of an {old_header['device']}, {now} of an {device_kind}")
    carried_ops = sorted({OPS_OF_CASES[name.split(":")[0]] for name in new})
    if any(new_header["ops"][op] != header()["ops"][op] for op in carried_ops):
        raise SystemExit(f"{now} is not of these sources")
    if not old_header["jax"] == new_header["jax"] == record["versions"]["jax"]:
        raise SystemExit(
            f"JAX {old_header['jax']} and {new_header['jax']}, but the device was checked with {record['versions']['jax']}"
        )
    carried, ops = dict(record.get("carried", {})), dict(record["ops"])
    for op in carried_ops:
        if old_header["ops"][op] != record["ops"].get(op):
            raise SystemExit(f"{before} is not of the source of {op} that was verified")
        group = [name for name in old if OPS_OF_CASES[name.split(":")[0]] == op]
        if differing := [name for name in group if new.get(name) != old[name]]:
            raise SystemExit(
                f"{len(differing)} of {len(group)} programs of {op} differ, such as {differing[0]}: check them on a device"
            )
        ops[op] = new_header["ops"][op]
        first = carried.get(op, {})
        if first.get("now") != record["ops"][op]:
            first = {"verified": record["ops"][op], "new": 0}
        verified_as, num_new = first["verified"], first["new"]
        num_new += sum(OPS_OF_CASES[name.split(":")[0]] == op and name not in old for name in new)
        carried[op] = {"verified": verified_as, "now": ops[op], "programs": len(group), "new": num_new}
    return {**records, device_kind: {**record, "ops": ops, "carried": carried}}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The header of a file, and its programs with kernels by case and variant."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return lines[0], {name: program for name, program in lines[1:] if name.rsplit(": ", 1)[1] not in PLAIN}
