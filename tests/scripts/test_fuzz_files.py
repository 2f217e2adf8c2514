import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts import fuzz_files
from scripts.fuzzing import judging
from scripts.fuzzing.kinds import KINDS, Kind


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict, str]:
    code = fuzz_files.main(arguments)
    captured = capsys.readouterr()
    return code, json.loads(captured.out), captured.err


def test_damaged_files_of_every_kind_are_accepted_or_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAXLLM_CACHE_DIR", "")  # readers of GGUF files set it; the value of before comes back
    code, report, told = report_of(capsys, "--files", "204", "--seed", "11", "--jobs", "0")
    assert (code, report["findings"]) == (0, 0), told
    assert report["files"] == 204 and report["kinds"].keys() == KINDS.keys()
    for counts in report["kinds"].values():
        assert counts["refused"] > 0 and counts["accepted"] + counts["refused"] == 12


def crash(directory: Path) -> None:
    content = (directory / "file").read_bytes()
    if content == b"3":
        os.kill(os.getpid(), signal.SIGSEGV)
    if content == b"5":
        raise KeyError("bare")
    if content == b"7":
        judging_memory.append(b"x" * (300 << 20))


judging_memory: list[bytes] = []


def test_a_crash_ends_one_file_and_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numbers: Mapping[str, Kind] = {"planted": Kind(lambda rng: {"file": b"%d" % next(made)}, crash, lambda: iter(()))}
    made = iter(range(1000))
    for module in (fuzz_files, judging):
        monkeypatch.setattr(module, "KINDS", numbers)
    monkeypatch.setattr(judging, "files_of", lambda seed, number, kind: {"file": b"%d" % number})
    monkeypatch.setattr(fuzz_files, "files_of", lambda seed, number, kind: {"file": b"%d" % number})
    code, report, told = report_of(capsys, "--files", "10", "--jobs", "1", "--kinds", "planted", "--output", str(tmp_path))
    assert (code, report["files"], report["kinds"]) == (1, 10, {"planted": {"accepted": 7, "refused": 0, "findings": 3}})
    assert "file 3 of seed 0, planted: ended by SIGSEGV" in told and "file 5 of seed 0, planted: KeyError: 'bare'" in told
    assert "file 7 of seed 0, planted: 3" in told and (tmp_path / "planted-0-3" / "file").read_bytes() == b"3"
