"""Every script of the project finds what it imports."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEED_TORCH = ("bench_cpu.py",)
SCRIPTS = [
    pytest.param(path, id=path.name, marks=pytest.mark.torch if path.name in NEED_TORCH else ())
    for path in sorted((ROOT / "scripts").glob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_starts(script: Path) -> None:
    if script.name in NEED_TORCH:
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")
