import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import changed_tests

FILES = {
    "jaxllm/queue/fair.py": "",
    "jaxllm/queue/plain.py": "",
    "jaxllm/queue/page.html": "",
    "jaxllm/alone.py": "",
    "kernels/top/fast.py": "",
    "docs/LIMITS.md": "",
    "tests/conftest.py": "",
    "tests/helpers/queues.py": "from jaxllm.queue.plain import Plain",
    "tests/queue/test_fair.py": "",
    "tests/queue/test_fair_when_full.py": "",
    "tests/queue/test_fairness.py": "from tests.helpers import queues",
    "tests/test_limits.py": "import jaxllm.queue.fair\nPAGE = 'docs/LIMITS.md'",
    "tests/kernels/test_top.py": "",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In which everything is committed."""
    root = tmp_path_factory.mktemp("repository")
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    git(root, "init -q -b main --template=")
    git(root, "add .")
    git(root, "commit -qm all")
    git(root, "switch -qc branch")
    return root


@pytest.fixture
def root(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may change."""
    shutil.copytree(repository, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    return tmp_path


def git(root: Path, command: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command.split()], cwd=root, check=True)


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("jaxllm/queue/fair.py", "tests/queue/test_fair.py tests/queue/test_fair_when_full.py tests/test_limits.py"),
        ("jaxllm/queue/plain.py", "tests/queue"),
        ("jaxllm/queue/page.html", "tests/queue"),
        ("jaxllm/queue/new.py", "tests/queue"),
        ("jaxllm/alone.py", "no tests"),
        ("kernels/top/fast.py", "tests/kernels/test_top.py"),
        ("docs/LIMITS.md", "tests/test_limits.py"),
        ("tests/helpers/queues.py", "tests/queue/test_fairness.py"),
        ("tests/queue/test_fairness.py", "tests/queue/test_fairness.py"),
        ("tests/queue/test_new.py", "tests/queue/test_new.py"),
        ("tests/conftest.py", "tests"),
    ],
)
def test_the_tests_of_a_change_run_and_are_shown(root, monkeypatch, capsys, changed, tests):
    (root / changed).write_text("VALUE = 1")
    ran: list[list[str]] = []
    monkeypatch.setattr(changed_tests.subprocess, "call", lambda command, cwd: ran.append(command[3:]) or 7)
    code = changed_tests.main(["-q", "-k", "queue"])
    told = capsys.readouterr().out
    assert f"1 files differ from {changed_tests.merge_base(root)}\n  {changed}: {tests}\n" in told
    if tests == "no tests":
        assert (code, ran) == (0, []) and "no test mirrors a changed file: nothing runs" in told
    else:
        assert (code, ran) == (7, [["-q", "-k", "queue", *tests.split()]])


def test_commits_of_a_branch_are_changes_and_another_base_may_be_named(root, monkeypatch, capsys):
    monkeypatch.setattr(changed_tests.subprocess, "call", lambda command, cwd: 0)
    (root / "tests/queue/test_fair.py").unlink()
    git(root, "commit -qam less")
    changed_tests.main([])
    assert "  tests/queue/test_fair.py: no tests\n" in capsys.readouterr().out
    changed_tests.main(["--base", "HEAD"])
    assert "0 files differ from HEAD\n" in capsys.readouterr().out
    assert changed_tests.main(["--base", "none"]) == 2
    assert "git cannot compare with none: " in capsys.readouterr().out
