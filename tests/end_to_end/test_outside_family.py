"""Families from outside the tree: a package with entry points, and model_class."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxllm.loaders import safetensors
from scripts.saving import write_safetensors
from tests.helpers import goldens

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
OPTIONS = {
    "skip_tokenizer_init": True,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 2,
    "compilation_cache": False,
    "warmup": "lazy",  # an idle engine process would compile what nothing here needs
}

GENERATE = """
import json, sys
from jaxllm import LLM, SamplingParams
request = json.load(sys.stdin)
told = []
for options in request["engines"]:
    llm = LLM(**options)
    params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": request["prompt"]}], params, use_tqdm=False)
    scores = [row[token].logprob for token, row in zip(request["prompt"][1:], output.prompt_logprobs[1:])]
    told.append({"tokens": list(output.outputs[0].token_ids), "logprobs": scores})
print(json.dumps(told))
"""

IN_ANOTHER_PROCESS = """
import asyncio, json, sys
from jaxllm import SamplingParams
from jaxllm.async_llm import AsyncLLM
from jaxllm.config import EngineConfig
from jaxllm.engine.client import EngineClient
from jaxllm.engine.launch import socket_directory, start_engine
from jaxllm.engine.messages import EngineStart
request = json.load(sys.stdin)

async def generate(directory, process):
    llm = await AsyncLLM.connect(EngineClient(directory, process.pid, index=0))
    params = SamplingParams(temperature=0, max_tokens=request["max_tokens"])
    async for output in llm.generate({"prompt_token_ids": request["prompt"]}, params, "r"):
        pass
    return list(output.outputs[0].token_ids)

with socket_directory() as directory:
    process = start_engine(EngineStart(EngineConfig.from_options(**request["engines"][0]), str(directory)))
    print(json.dumps([{"tokens": asyncio.run(generate(directory, process))}]))
    process.kill()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The directory into which the example package was installed."""
    work = tmp_path_factory.mktemp("installed")
    source = work / "source"
    subprocess.run(["cp", "-r", ROOT / "docs" / "example_family", source], check=True)
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    target = work / "target"
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", target, source], check=True, timeout=120)
    return target


def write_model(directory: Path, architecture: str, **tensors: np.ndarray) -> Path:
    """Qwen 3's golden under another architecture, with further tensors."""
    source = goldens.FOLDER / "qwen3"
    directory.mkdir()
    raw = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "architectures": [architecture], "model_type": "example"}))
    checkpoint = safetensors.Checkpoint(source)
    found = {name: np.asarray(checkpoint.tensor(name)) for name in checkpoint.entries}
    write_safetensors(directory / "model.safetensors", {**found, **tensors})
    return directory


def run(script: str, installed: Path, *engines: dict) -> list[dict]:
    """Output of a process that finds the package for the golden's first prompt."""
    result = goldens.golden("qwen3").results[0]
    request = {"engines": [{**OPTIONS, **options} for options in engines], "prompt": result.prompt, "max_tokens": 8}
    paths = os.pathsep.join([str(installed), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(request),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def test_an_installed_package_adds_families(installed, tmp_path):
    golden = goldens.golden("qwen3")
    known = write_model(tmp_path / "example", "ExampleForCausalLM")
    factor = np.full(64, 2, np.float32)
    scaled = write_model(tmp_path / "scaled", "ScaledForCausalLM", **{"model.factor.weight": factor})
    example, by_class = run(GENERATE, installed, {"model": str(known)}, {"model": str(scaled)})
    prompt = golden.results[0].prompt
    for told, scale in ((example, 1), (by_class, 2)):
        assert told["tokens"] == golden.results[0].tokens[:8]  # the factor is the same for all logits
        expected = log_softmax(scale * golden.first_prompt_logits, axis=-1)[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(told["logprobs"], expected, atol=1e-4)


def test_model_class_names_a_family(installed, tmp_path):
    model = write_model(tmp_path / "unnamed", "NobodyKnowsForCausalLM")
    [told] = run(IN_ANOTHER_PROCESS, installed, {"model": str(model), "model_class": "example_family.example:read"})
    assert told["tokens"] == goldens.golden("qwen3").results[0].tokens[:8]
