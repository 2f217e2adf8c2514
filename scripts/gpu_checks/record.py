"""The results of a run of `check_gpu.py`, and its record: `pallas_kernels/verified.json`, one record per kind of device.

A record: {"date", "commit", "versions": {name: version}, "parts": {part: {"passed", "failed", "skipped", "seconds",
"date", "commit", "note"}}, "ops": {op: digest of its source}}. A part that is run alone later replaces its own entry only,
and one that was skipped replaces none; nor does the part kernels with some of the groups of cases, which a record of a run names
in "groups". An op's digest is present exactly if the last run of its cases ran all of them and none failed.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pallas_kernels import verified
from scripts.gpu_checks import Outcome
from scripts.gpu_checks.jobs import Hello
from scripts.gpu_checks.pages import page_name, render_page, write_pages

ROOT = Path(__file__).resolve().parent.parent.parent
OPS_OF_CASES = {
    "attention": "paged_attention",
    "choice": "expert_choice",
    "delta": "gated_delta",
    "delta_decode": "delta_decode",
    "experts": "grouped_matmul",
    "gated": "gated_matmul",
    "latent": "mla_attention",
    "lora": "lora",
    "quantize": "quantize",
    "quantized": "quantized_matmul",
    "rope": "rope_cache_write",
    "router": "router_scores",
    "sampling": "sampling",
    "segments": "segment_attention",
    "space": "state_space",
    "wide": "wide_attention",
}
"""The op whose source a group of kernel cases (scripts/kernels) verifies."""
OPS_OF_PARTS = {"kernels": tuple(OPS_OF_CASES.values()), "collectives": ("collectives",)}
"""The ops whose sources a part verifies."""
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax")


@dataclasses.dataclass
class Run:
    """The outcomes of a run by part."""

    commit: str | None = None
    """None: taken from git."""
    ops: tuple[str, ...] = tuple(OPS_OF_CASES)
    """The groups of cases that the part kernels ran."""
    hello: Hello | None = None
    outcomes: dict[str, list[Outcome]] = dataclasses.field(default_factory=dict)
    digests: dict[str, str] = dataclasses.field(default_factory=lambda: {op: verified.source_digest(op) for op in verified.OPS})
    """Digests of the sources when the run began."""
    earlier_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """That parts took in earlier runs, whose outcomes are among these."""
    _begun: float = dataclasses.field(default_factory=time.perf_counter)
    _spans: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def meet(self, hello: Hello) -> None:
        """Note the device."""
        self.hello = hello

    @property
    def device(self) -> str | None:
        """The device and the version of JAX, in a line; None before it is known."""
        if self.hello is None:
            return None
        number = f"{self.hello.num_devices} x " * (self.hello.num_devices > 1)
        return f"jax {importlib.metadata.version('jax')} {number}{self.hello.device_kind}"

    def begin(self, part: str) -> None:
        """A part, or the first of its processes, begins."""
        now = time.perf_counter()
        self._spans.setdefault(part, (now, now))

    def end(self, part: str) -> None:
        """A part, or one of its processes, has ended."""
        now = time.perf_counter()
        self._spans[part] = (self._spans.get(part, (now, now))[0], now)

    def add(self, part: str, outcome: Outcome) -> None:
        self.outcomes.setdefault(part, []).append(outcome)

    @property
    def failed(self) -> list[str]:
        """The names of what failed."""
        return [outcome.name for outcomes in self.outcomes.values() for outcome in outcomes if outcome.failed]

    def summary(self) -> str:
        """All parts in a line."""
        parts = []
        for part, outcomes in self.outcomes.items():
            num_skipped = sum(outcome.skipped for outcome in outcomes)
            skipped = f" ({num_skipped} skipped)" * (num_skipped > 0)
            passed = sum(outcome.passed for outcome in outcomes)
            parts.append(f"{part} {passed} of {len(outcomes) - num_skipped}{skipped} in {self._seconds(part):.0f} s")
        return f"{'; '.join(parts)}; {time.perf_counter() - self._begun:.0f} s in all"

    def record(self) -> dict[str, Any]:
        """The record of this run."""
        commit = self.commit or current_commit()
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        parts = {}
        for part, outcomes in self.outcomes.items():
            skipped = [outcome for outcome in outcomes if outcome.skipped]
            parts[part] = {
                "passed": sum(outcome.passed for outcome in outcomes),
                "failed": sum(outcome.failed for outcome in outcomes),
                "skipped": len(skipped),
                "seconds": round(self._seconds(part)),
                "date": today,
                "commit": commit,
                "note": "; ".join(dict.fromkeys(outcome.detail for outcome in skipped)),
            }
        found: dict[str, Any] = {"date": today, "commit": commit, "versions": versions(), "parts": parts}
        if set(self.ops) < set(OPS_OF_CASES):
            found["groups"] = sorted(self.ops)
        ops = verified_ops(self.outcomes.get("kernels", ()), self.ops)
        among_devices = self.outcomes.get("collectives", ())
        if any(outcome.passed for outcome in among_devices) and not any(outcome.failed for outcome in among_devices):
            ops = [*ops, *OPS_OF_PARTS["collectives"]]
        found["ops"] = {op: self.digests[op] for op in sorted(ops)}
        return found

    def _seconds(self, part: str) -> float:
        begun, ended = self._spans.get(part, (0.0, 0.0))
        return self.earlier_seconds.get(part, 0.0) + ended - begun


def verified_ops(outcomes: Iterable[Outcome], groups: Iterable[str]) -> list[str]:
    """The ops of these groups of cases all of whose outcomes passed. What belongs to no group, such as a crash, spoils all."""
    passed: dict[str, bool] = {}
    for outcome in outcomes:
        group = outcome.name.split(":")[0]
        if group not in OPS_OF_CASES:
            if outcome.failed:
                return []
            continue
        passed[group] = passed.get(group, True) and outcome.passed
    return sorted(OPS_OF_CASES[group] for group in groups if passed.get(group, False))


def merge(records: Mapping[str, Any], device_kind: str, new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a new record of a device into the records. Its parts replace those of the same name, unless all of a part was
    skipped, and its ops those that such a part verifies. Of kernels in some groups only the groups' ops are replaced.
    """
    groups = new.get("groups")
    new = {name: value for name, value in new.items() if name != "groups"}
    old = records.get(device_kind, {})
    parts, ops = dict(old.get("parts", {})), dict(old.get("ops", {}))
    for name, part in new["parts"].items():
        if not (part["passed"] or part["failed"] or name not in parts):
            continue
        is_whole = name != "kernels" or groups is None
        if is_whole or name not in parts:
            parts[name] = part
        replaced = OPS_OF_PARTS.get(name, ()) if is_whole else [OPS_OF_CASES[group] for group in groups]
        ops = {op: digest for op, digest in ops.items() if op not in replaced}
    together = {**old, **new, "parts": parts, "ops": dict(sorted((ops | new["ops"]).items()))}
    if "carried" in old:
        together["carried"] = {op: found for op, found in old["carried"].items() if op not in new["ops"]}
    return {**records, device_kind: together}


def write(run: Run, directory: str | None) -> list[Path]:
    """Write the record into the repository, or into a directory. Returns the written files."""
    if run.hello is None or run.hello.backend != "gpu":
        raise SystemExit("nothing is recorded: no GPU was checked")
    kind = run.hello.device_kind
    if directory is None:
        records = merge(verified.records(), kind, run.record())
        save(records, verified.RECORDS)
        return [verified.RECORDS, *write_pages(records)]
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    save({kind: run.record()}, folder / verified.RECORDS.name)
    page = folder / page_name(kind)
    page.write_text(render_page(kind, merge({}, kind, run.record())[kind]), encoding="utf-8")
    return [folder / verified.RECORDS.name, page]


def save(records: Mapping[str, Any], path: Path) -> None:
    """The records as JSON, in a stable order."""
    path.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def current_commit() -> str:
    """The commit, with "+changes" if files differ from it; "unknown" where git does not say."""
    try:
        commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
        return commit + "+changes" * bool(_output("git", "-C", str(ROOT), "status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of the packages that make the device's programs."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        found["driver"] = "unknown"
    return found


def gpu() -> tuple[str, float] | None:
    """Name and GiB of the first GPU; None without one."""
    try:
        name, mib = (
            _output("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
            .splitlines()[0]
            .rsplit(",", 1)
        )
        return name.strip(), float(mib) / 1024
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None


def num_gpus() -> int:
    """GPUs that are visible to JAX."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(_output("nvidia-smi", "-L").splitlines()) if visible is None else len(visible.split(","))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
