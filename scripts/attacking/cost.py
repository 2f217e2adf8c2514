"""What the checks of requests cost: the CPU time of the API server for a small chat request, on two checkouts in turn."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

_REQUESTS = 4000


def measure(tree: Path) -> float:
    """Microseconds of CPU for a request, by the checkout's own benchmark."""
    script = tree / "scripts" / "bench_front.py"
    words = [sys.executable, str(script), "--requests", str(_REQUESTS), "--streams", "1", "--seconds", "0.1", "--json"]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree, timeout=300, check=True
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["microseconds_per_request"])


def compare_cost(before: Path, after: Path, rounds: int) -> int:
    """Print both times and their ratio. Returns 0; the spread says what the ratio is worth."""
    found: dict[Path, list[float]] = {before: [], after: []}
    for number in range(rounds):
        for tree in (before, after) if number % 2 == 0 else (after, before):
            found[tree].append(measure(tree))
        ratio = found[after][-1] / found[before][-1]
        print(f"round {number + 1}: {found[before][-1]:.1f} µs, {found[after][-1]:.1f} µs, ratio {ratio:.3f}", flush=True)
    ratios = sorted(second / first for first, second in zip(found[before], found[after], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(
        f"median {statistics.median(found[before]):.1f} µs and {statistics.median(found[after]):.1f} µs a request, least "
        f"{min(found[before]):.1f} and {min(found[after]):.1f} µs; ratio of the rounds: median {statistics.median(ratios):.3f}, "
        f"half of them {low:.3f} to {high:.3f}; ratio of the least {min(found[after]) / min(found[before]):.3f}"
    )
    return 0
