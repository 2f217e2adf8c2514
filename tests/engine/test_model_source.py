"""Programs of models from outside are kept with the source that they were compiled from."""

import importlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.compile import compile_artifact
from jaxllm.engine.prepare import Prepared
from jaxllm.errors import ConfigError
from jaxllm.models import llama, registry
from jaxllm.progress import SILENT
from jaxllm.start_times import StartTimes
from tests.helpers import engines, goldens

DIRECTORY = goldens.golden("llama_gqa").directory
MODEL = """
from jaxllm.layers.decoder import CausalLM
from {package}.layers import scaled
import {helper}

class Mine(CausalLM):
    pass
"""
FAMILY = """
from dataclasses import replace
from jaxllm.models import llama

def read(c):
    return replace(llama.read(c), model_class="{model_class}")
"""
_number = itertools.count()


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a package of a model and a module that it uses, registered in place of Llama."""
    number = next(_number)  # modules are imported once in a process
    package, helper = f"outside_{number}", f"helper_{number}"
    files = {
        "package/__init__.py": "",
        "package/model.py": MODEL.format(package=package, helper=helper),
        "package/family.py": FAMILY.format(model_class=f"{package}.model:Mine"),
        "package/layers.py": "def scaled(x): return x",
        "package/not_imported.py": "",
        "helper.py": "def twice(x): return x * 2",
        "unrelated.py": "",
    }
    for name, text in files.items():
        path = tmp_path / name.replace("package", package).replace("helper", helper)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.setitem(registry.FAMILIES, "LlamaForCausalLM", ("llama", f"{package}.family:read"))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith((package, helper))]:
        del sys.modules[name]


def prepared(**options) -> Prepared:
    config = EngineConfig.from_options(model=str(DIRECTORY), **{**engines.SMALL, **options})
    return Prepared.of(config, DIRECTORY, (), StartTimes())


@pytest.mark.parametrize(
    ("pattern", "matters"),
    [("*/model.py", True), ("*/layers.py", True), ("*/not_imported.py", True), ("helper*.py", True), ("unrelated.py", False)],
)
def test_a_changed_source_is_another_engine(outside: Path, pattern: str, matters: bool) -> None:
    engine = prepared()
    before = engine.fingerprint()
    assert before["model class"].startswith("outside_") and ".model:Mine (" in before["model class"]
    [file] = outside.glob(pattern)
    file.with_name(".#lock.py").symlink_to("nowhere")
    file.write_text(file.read_text() + "\n# changed\n")
    after = engine.fingerprint()
    assert {name for name in before if before[name] != after[name]} == ({"model class"} if matters else set())


def test_a_model_of_this_project_needs_no_digest() -> None:
    assert prepared().fingerprint()["model class"] == "jaxllm.layers.decoder:CausalLM"


def test_a_class_without_source_is_compiled_anew_by_each_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that was typed into a REPL or a notebook."""
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path / "cache"))
    typed: dict[str, object] = {"__name__": "__main__"}
    exec("from jaxllm.layers.decoder import CausalLM\nclass Typed(CausalLM): pass", typed)
    monkeypatch.setattr(sys.modules["__main__"], "Typed", typed["Typed"], raising=False)
    monkeypatch.setattr(llama, "read", lambda c, read=llama.read: replace(read(c), model_class="__main__:Typed"))
    assert prepared(compilation_cache=True).runner.store is None
    assert "Typed has no source file" in caplog.text
    config = EngineConfig.from_options(model=str(DIRECTORY), **engines.SMALL)
    with pytest.raises(ConfigError, match="Typed has no source file"):
        compile_artifact(config, DIRECTORY, tmp_path / "artifact", SILENT)
    assert not (tmp_path / "artifact").exists()
