"""`jaxllm compile` writes what a new process starts from: nothing is traced or compiled, and the tokens are the same."""

import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from jaxllm.cli.main import main
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.errors import ConfigError
from tests.helpers import engines, goldens

pytestmark = pytest.mark.slow

NAME = "llama_gqa"
SIZE = 2
"""Devices, so that programs have collectives."""
START = """
import json, sys
import jax
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.runner.step_programs import StepPrograms
from tests.helpers import engines, goldens

def forbidden(self, key):
    raise AssertionError(f"{key} was traced")

StepPrograms.lower = forbidden
compiled = []
listen = lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
jax.monitoring.register_event_duration_secs_listener(listen)
prompt = goldens.golden("llama_gqa").results[4].prompt
kinds = [{}, {"temperature": 0.7, "seed": 5}, {"logprobs": 2, "repetition_penalty": 1.2}, {"prompt_logprobs": 2}]
for warmup in ("lazy", "all"):
    options = {"model": str(goldens.golden("llama_gqa").directory), "warmup": warmup, **json.loads(sys.argv[1])}
    core = EngineCore(EngineConfig.from_options(**options))
    programs = core.runner.programs
    num_loaded = programs.num_loaded
    requests = [engines.request(str(i), prompt, max_tokens=12, **kind) for i, kind in enumerate(kinds)]
    answers = engines.run(core, requests)
    print(json.dumps({
        "tokens": [answers[str(i)].tokens for i in range(len(kinds))], "num_loaded_at_start": num_loaded,
        "num_compiled": programs.num_compiled + len(compiled), "num_loaded": programs.num_loaded,
        "late": core.num_compiled_after_warmup,
    }))
    core.shutdown()
"""


OPTIONS = {**engines.SMALL, "tensor_parallel_size": SIZE, "num_gpu_blocks_override": 29}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("compiled") / "artifact"
    flags = []
    for name, value in OPTIONS.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags += [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    with redirect_stdout(io.StringIO()) as out:
        assert main(["compile", str(goldens.golden(NAME).directory), "--output", str(directory), *flags]) == 0
    assert out.getvalue().startswith("19 programs")
    return directory


def test_a_new_process_starts_from_it_without_tracing_or_compiling(artifact):
    """And with lazy warm-up loads only what is needed."""
    options = json.dumps({**OPTIONS, "compiled_artifact": str(artifact)})
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", START, options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lazy, started = map(json.loads, done.stdout.splitlines())
    assert lazy["num_compiled"] == 0 and lazy["num_loaded_at_start"] < lazy["num_loaded"] < 19
    assert (started["num_compiled"], started["num_loaded"], started["late"]) == (0, 19, 0)
    for each in (lazy, started):
        assert each["tokens"][0] == goldens.golden(NAME).results[4].tokens[:12]
        assert all(len(tokens) == 12 for tokens in each["tokens"])


def engine(directory: Path, **options) -> EngineCore:
    model = str(goldens.golden(NAME).directory)
    return EngineCore(EngineConfig.from_options(model=model, **{**OPTIONS, "compiled_artifact": str(directory), **options}))


def test_an_engine_that_differs_is_told_everything_in_which_it_does(artifact, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--of_another_machine")
    with pytest.raises(ConfigError) as caught:
        engine(artifact, max_num_seqs=3, max_logprobs=5)
    text = str(caught.value)
    assert "max_num_seqs is 3, the artifact has 4" in text and "max_logprobs is 5, the artifact has 20" in text
    assert "XLA_FLAGS is" in text and "jaxllm compile" in text


def test_a_cache_that_does_not_fit_here_is_refused(artifact, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(artifact, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["compiled_for"]["num_gpu_blocks"] = 10**9
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="num_gpu_blocks is 29, the artifact has 1000000000.*no more blocks fit here"):
        engine(copy, num_gpu_blocks_override=None)


def test_compile_writes_into_no_directory_that_holds_something(artifact):
    assert main(["compile", str(goldens.golden(NAME).directory), "--output", str(artifact), "-q"]) == 1
