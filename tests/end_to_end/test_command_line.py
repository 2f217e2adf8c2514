"""The `jaxllm` command with the demo model in a separate process, as a user runs it."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import ending_with_parent

ROOT = Path(__file__).parents[2]
SMALL = ("--max-num-seqs", "3", "--max-num-batched-tokens", "32")
TINY = ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 1}', "--warmup", "lazy")
CODE = "import sys; from jaxllm.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compilation cache for all, so that only the first process compiles."""
    return tmp_path_factory.mktemp("cache")


def start(cache: Path, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAXLLM_")}
    environment |= {"JAXLLM_CACHE_DIR": str(cache), "JAX_NUM_CPU_DEVICES": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        ending_with_parent.python("-c", CODE, *arguments),
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(cache: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(cache, arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out.decode(), err.decode()


def run_and_interrupt(cache: Path, *arguments: str, after_lines: int) -> tuple[int, str, str]:
    """Press Ctrl-C as soon as stdout has this many lines."""
    process = start(cache, arguments)
    assert process.stdout is not None
    begun = b"".join(process.stdout.readline() for _ in range(after_lines))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return process.returncode, (begun + out).decode(), err.decode()


def test_generate_writes_text_to_stdout_and_the_rest_to_stderr(cache: Path) -> None:
    code, out, err = run(cache, "generate", "def is_even(number):", "--max-tokens", "30", *SMALL)
    assert code == 0
    assert "return" in out
    lines = [line for line in err.splitlines() if not line.startswith(("compiling", "loading programs"))]
    assert lines[0].startswith("memory plan for ")
    plan = next(place for place, line in enumerate(lines) if line.startswith("  KV cache"))
    assert lines[plan + 1].startswith("loading weights: 15.6 MiB")
    assert lines[plan + 2].startswith("engine ready in ")
    assert re.fullmatch(r"8 prompt tokens, 30 output tokens, time to first token .* tokens/s", lines[plan + 3])
    assert len(lines) == plan + 4


@pytest.mark.slow
def test_ctrl_c_in_a_batch_prints_what_was_finished(cache: Path, tmp_path: Path) -> None:
    """Other moments: tests/cli/test_generate.py."""
    path = tmp_path / "p.jsonl"
    lengths = [40, 1900, 4]  # the first line comes long after the last prompt was finished
    path.write_text("".join(json.dumps({"prompt": "def f(x):", "max_tokens": n, "ignore_eos": True}) + "\n" for n in lengths))
    code, out, err = run_and_interrupt(cache, "generate", "--file", str(path), "--json", *SMALL, *TINY, after_lines=1)
    assert code == 130
    printed = [json.loads(line) for line in out.splitlines()]
    assert [entry["index"] for entry in printed] == [0, 2]
    assert [len(entry["outputs"][0]["token_ids"]) for entry in printed] == [40, 4]
    assert err.splitlines()[-1] == "interrupted: 2 of 3 prompts were finished"
    assert "Traceback" not in err


def test_what_is_wrong_is_one_line(cache: Path) -> None:
    """Others: tests/cli, tests/test_hub.py, test_bad_input.py."""
    found, out, err = run(cache, "generate", "x", "--max-tokes", "3")
    assert (found, out) == (2, "")
    assert "unknown option '--max-tokes'; did you mean '--max-tokens'?" in err
    faults = [line for line in err.splitlines() if "error: " in line]
    assert len(faults) == 1
    assert "Traceback" not in err
