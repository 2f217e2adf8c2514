#!/usr/bin/env python3
"""Damages small files of every format that a model, an adapter or an image has, and reads each as the program does.

A reader must return or raise one of the project's errors, within 256 MB of memory and 2 s of CPU time, with a message of at most 1024
characters. Anything else is a finding, which is printed with its number and saved: the same seed makes the same files.

  scripts/fuzz_files.py --files 100000 --seed 1
  scripts/fuzz_files.py --kinds gguf,config --seconds 60
  scripts/fuzz_files.py --seed 1 --only 4711 --output /tmp/findings     read one file again, in this process
"""

import argparse
import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from scripts.fuzzing.judging import Outcome, files_of, judge_all, warm_up, write
from scripts.fuzzing.kinds import KINDS

_BATCH = 200
_MOST_SHOWN = 50


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 without findings."""
    options = _parser().parse_args(arguments)
    if unknown := set(options.kinds) - set(KINDS):
        _parser().error(f"--kinds has {', '.join(sorted(unknown))}, known: {', '.join(KINDS)}")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    start, findings, counts = time.monotonic(), list[Outcome](), Counter[tuple[str, str]]()
    slowest = largest = Outcome(-1, "", "")
    logging.disable(logging.CRITICAL)
    try:
        for outcome in warm_up(folder):
            findings.append(outcome)
            print(f"a valid file, {outcome.kind}: {outcome.what}", file=sys.stderr)
        end = None if options.seconds is None else start + options.seconds
        batches = _batches(range(options.only, options.only + 1) if options.only is not None else range(options.files), end)
        jobs = 0 if options.only is not None else options.jobs
        for outcome in judge_all(options.seed, batches, options.kinds, folder, jobs):
            counts[outcome.kind, outcome.what if not outcome.is_finding else "findings"] += 1
            slowest = max(slowest, outcome, key=lambda each: each.seconds)
            largest = max(largest, outcome, key=lambda each: each.num_bytes)
            if outcome.is_finding:
                findings.append(outcome)
                _report(outcome, options.seed, options.output, is_shown=len(findings) <= _MOST_SHOWN)
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)
    by_kind = {
        kind: {what: counts[kind, what] for what in ("accepted", "refused", "findings")}
        for kind in options.kinds
        if any(counted == kind for counted, _ in counts)
    }
    report = {
        "seed": options.seed,
        "files": sum(counts.values()),
        "kinds": by_kind,
        "findings": len(findings),
        "max_cpu_seconds": round(slowest.seconds, 3),
        "slowest_file": slowest.number,
        "max_added_megabytes": largest.num_bytes >> 20,
        "largest_file": largest.number,
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(report, indent=2))
    return 1 if findings else 0


def _batches(numbers: range, end: float | None) -> Iterator[range]:
    for at in itertools.count(numbers.start, _BATCH):
        if at >= numbers.stop or (end is not None and time.monotonic() > end):
            return
        yield range(at, min(at + _BATCH, numbers.stop))


def _report(outcome: Outcome, seed: int, output: Path | None, *, is_shown: bool) -> None:
    if is_shown:
        print(f"file {outcome.number} of seed {seed}, {outcome.kind}: {outcome.what}", file=sys.stderr)
    if output is not None:
        write(output / f"{outcome.kind}-{seed}-{outcome.number}", files_of(seed, outcome.number, outcome.kind))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=100_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    names = ", ".join(KINDS)
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), metavar="A,B", help=f"of {names}")
    parser.add_argument("--seconds", type=float, help="start nothing more after this time")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="processes at a time; 0: none but this, in which a crash ends all"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER", help="read one file alone, in this process")
    parser.add_argument("--output", type=Path, metavar="DIR", help="save findings there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
