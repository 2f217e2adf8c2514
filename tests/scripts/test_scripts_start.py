"""Every script of the project finds what it imports; engine options on their command lines."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.measuring.command_line import engine_option

SCRIPTS = Path(__file__).parents[2] / "scripts"
NEED_TORCH = [SCRIPTS / "bench_cpu.py"]
# One process imports what they share once; what is in scripts/ each must find by itself.
HELP = """
import contextlib, io, pathlib, runpy, sys, traceback
scripts, paths, failed = sys.argv[1:], sys.path[1:], False
for script in scripts:
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]
    sys.path[:], sys.argv, code = [str(pathlib.Path(script).parent), *paths], [script, "--help"], None
    with contextlib.redirect_stdout(io.StringIO()) as told:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code
        except Exception:
            traceback.print_exc()
    if code != 0 or not told.getvalue().startswith("usage: "):
        failed = True
        print(script, code, told.getvalue(), file=sys.stderr)
sys.exit(failed)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "scripts",
    [
        pytest.param(sorted(set(SCRIPTS.glob("*.py")) - set(NEED_TORCH)), id="those without torch"),
        pytest.param(NEED_TORCH, id="those with torch", marks=pytest.mark.torch),
    ],
)
def test_every_script_starts(scripts: list[Path]) -> None:
    if scripts == NEED_TORCH:
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", HELP, *scripts], cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


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
