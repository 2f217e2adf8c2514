"""Processes of tests do not outlive them."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.ending_with_parent import python
from tests.helpers.serve_processes import is_alive
from tests.helpers.waiting import wait_until

ROOT = Path(__file__).parents[1]
PARENT = """
import subprocess, time
from tests.helpers.ending_with_parent import python
child = subprocess.Popen(python("-c", "import time; print('runs', flush=True); time.sleep(600)"), stdout=subprocess.PIPE)
print(child.pid, child.stdout.readline().decode(), flush=True)
time.sleep(600)
"""


def test_a_process_ends_when_a_signal_ends_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        assert parent.stdout is not None
        pid, word = parent.stdout.readline().split()
        assert word == "runs" and is_alive(int(pid))
        parent.kill()
    wait_until(lambda: not is_alive(int(pid)), "it outlived its parent")


def test_it_is_the_process_that_was_asked_for() -> None:
    code = "import sys; print(sys.argv[1:], sys.flags.isolated, 'site' in sys.modules)"
    assert subprocess.check_output(python("-c", code, "a b"), text=True) == "['a b'] 0 True\n"
