"""A program that exits with running requests ends quietly with its own exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OPTIONS = """
options = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 1}}
options |= {"max_num_seqs": 2, "max_num_batched_tokens": 32, "warmup": "lazy"}
"""
LEAVES_AN_LLM = """
import sys
from jaxllm import LLM, SamplingParams
llm = LLM("demo", use_progress_bar=False, **options)
running = llm.generate_iter("def f(x):", SamplingParams(max_tokens=1000, ignore_eos=True))
for _ in range(3):
    next(running)
sys.exit(3)
"""
LEAVES_AN_ASYNC_LLM = """
import asyncio, sys
from jaxllm import AsyncLLM, SamplingParams
engine = AsyncLLM.from_options(model="demo", **options)
async def main():
    async for _ in engine.generate("def f(x):", SamplingParams(max_tokens=1000, ignore_eos=True), request_id="1"):
        sys.exit(3)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both programs need the same compiled programs; the first run has none."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("program", [LEAVES_AN_LLM, LEAVES_AN_ASYNC_LLM], ids=["LLM", "AsyncLLM"])
def test_exit_with_steps_in_flight(program: str, cache: Path) -> None:
    environment = os.environ | {"JAXLLM_CACHE_DIR": str(cache), "JAX_NUM_CPU_DEVICES": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OPTIONS + program], cwd=ROOT, env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 3, done.stderr.decode()
    assert b"terminate" not in done.stderr and b"Error" not in done.stderr
