"""Features of a step plug in by a line: the rest of the runner does not ask for them, and runs without them."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.runner.features import FEATURES
from tests.helpers import goldens

ROOT = Path(__file__).parent.parent.parent
RUNNER = ROOT / "jaxllm" / "runner"
MOST = 19
"""Conditions of the runner that name a feature, outside of `features/`. A new feature has its own there."""
NAMES = re.compile(
    r"adapt|draft|placing|expert_slots|counting|expert_(counts|tokens)|token_split|\bdevices is\b|exchange is|pooling|prompt_logprobs"
    r"|images|rope_delta|\.kind\b|Adapters|Drafts|ExpertSlots|ExpertCounts"
)


def conditions(source: str) -> Iterator[str]:
    """The conditions in a module: in statements, expressions, assertions and comprehensions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield ast.unparse(node.test)
        elif isinstance(node, ast.comprehension):
            yield from map(ast.unparse, node.ifs)
        elif isinstance(node, ast.Match):
            yield ast.unparse(node.subject)


def test_the_runner_hardly_asks_for_features() -> None:
    found = [
        f"{path.relative_to(RUNNER)}: {condition}"
        for path in sorted(RUNNER.rglob("*.py"))
        if "features" not in path.relative_to(RUNNER).parts
        for condition in conditions(path.read_text(encoding="utf-8"))
        if NAMES.search(condition)
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_conditions_of_all_forms_are_found() -> None:
    lines = (
        "if a.adapting: pass",
        "x = 1 if self.drafting is None else 2",
        "assert key.kind == 'pool'",
        "y = [i for i in z if pooling]",
    )
    found = [condition for line in (*lines, "adapted = drafts") for condition in conditions(line)]
    assert len(found) == len(lines) and all(map(NAMES.search, found))


def test_features_are_named_only_where_they_are_registered() -> None:
    folder = RUNNER / "features"
    for path in sorted((ROOT / "jaxllm").rglob("*.py")):
        found = set(re.findall(r"runner\.features\.(\w+)", path.read_text(encoding="utf-8")))
        if path.name == "fault_points.py":
            continue  # it names functions of all packages, as text
        own = {path.relative_to(folder).parts[0].removesuffix(".py")} if path.is_relative_to(folder) else set()
        assert found <= own, f"{path.relative_to(ROOT)} names {found - own}"
    modules = {path.stem for path in folder.iterdir() if not path.name.startswith("__")}
    assert modules == set(FEATURES)


PROGRAM = """
import importlib, pkgutil, jaxllm.runner
from jaxllm.runner.features import FEATURES
assert not set(DELETED) & set(FEATURES)
for module in pkgutil.walk_packages(jaxllm.runner.__path__, "jaxllm.runner."):
    importlib.import_module(module.name)
from jaxllm import LLM, SamplingParams
from jaxllm.errors import ConfigError, InvalidRequestError
options = dict(dtype="float32", max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, warmup="lazy", skip_tokenizer_init=True)
for refused in (
    {"enable_lora": True}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, {"kv_offloading_size": 0.01}
):
    try:
        LLM(MODEL, **options, **refused)
    except ConfigError as error:
        print(error)
llm = LLM(MODEL, **options)
prompt = {"prompt_token_ids": PROMPT}
for refused in (lambda: llm.generate(prompt, SamplingParams(prompt_logprobs=1)), lambda: llm.embed(prompt)):
    try:
        refused()
    except InvalidRequestError as error:
        print(error)
print(*llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4))[0].outputs[0].token_ids)
"""
DELETED = ("drafts", "adapters", "rope_delta", "images", "prompt_logprobs", "pooling", "block_copies")


@pytest.mark.slow
def test_features_can_be_deleted_with_their_lines(tmp_path: Path) -> None:
    for package in ("jaxllm", "pallas_kernels"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    features = tmp_path / "jaxllm" / "runner" / "features"
    for name in DELETED:
        shutil.rmtree(features / name) if (features / name).is_dir() else (features / f"{name}.py").unlink()
    registry = features / "__init__.py"
    lines = registry.read_text(encoding="utf-8").splitlines(keepends=True)
    left = [line for line in lines if line.strip().strip('",') not in DELETED]
    assert len(left) == len(lines) - len(DELETED)
    registry.write_text("".join(left), encoding="utf-8")
    golden = goldens.golden("qwen2")
    result = golden.results[0]
    program = f"MODEL, PROMPT, DELETED = {str(golden.directory)!r}, {list(result.prompt)!r}, {DELETED!r}\n{PROGRAM}"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    *refusals, tokens = done.stdout.splitlines()[-6:]
    assert refusals == [
        "enable_lora is set, but this build has no adapters; leave it out",
        "speculative_config is set, but this build has no drafters; leave it out",
        "kv_offloading_size is set, but this build has no tiers; leave it out",
        "prompt_logprobs is set, but this build has none; leave it out",
        "the request asks for vectors, but this build does not pool; use one that does",
    ]
    assert list(map(int, tokens.split())) == list(result.tokens[:4])
