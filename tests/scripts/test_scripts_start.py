"""Every script of the project finds what it imports; engine options on their command lines."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.measuring.engine_option import engine_option

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


def test_engine_options_are_json_or_text() -> None:
    given = ("load_format=dummy", "max_num_seqs=8", "decode_buckets=[1, 8]", "async_scheduling=false", "model=a=b")
    assert dict(map(engine_option, given)) == {
        "load_format": "dummy",
        "max_num_seqs": 8,
        "decode_buckets": [1, 8],
        "async_scheduling": False,
        "model": "a=b",
    }
    with pytest.raises(argparse.ArgumentTypeError, match="'8' is not name=value"):
        engine_option("8")
