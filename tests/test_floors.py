"""Import order of the packages: imports go to lower levels only, and packages without JAX never reach it.

Reads the source without importing it.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

FLOORS = {
    "jaxllm": 0,  # plain types: every module directly in jaxllm/ that is not named below
    "jaxllm.options": 0,
    "jaxllm.vllm_compat": 0,
    "jaxllm.gguf_files": 0,
    "jaxllm.model_parts": 0,
    "jaxllm.scheduler": 1,
    "jaxllm.media": 1,
    "jaxllm.media.options": 0,
    "jaxllm.text": 1,
    "jaxllm.structured": 1,
    "jaxllm.metrics": 1,
    "jaxllm.expert_load": 1,
    "jaxllm.http_client": 1,
    "jaxllm.layers.source": 0,
    "jaxllm.parallel": 1,
    "jaxllm.parallel.topology": 1,
    "jaxllm.pipeline.split": 1,
    "jaxllm.data_parallel": 1,
    "pallas_kernels": 1,
    "jaxllm.layers": 2,
    "jaxllm.quantization": 1,
    "jaxllm.quantization.formats": 1,
    "jaxllm.context": 2,
    "jaxllm.models": 1,
    "jaxllm.routing": 1,
    "jaxllm.sampling": 3,
    "jaxllm.loaders": 3,
    "jaxllm.runner": 5,
    "jaxllm.pipeline": 5,
    "jaxllm.engine": 6,
    "jaxllm.replicas": 6,
    "jaxllm.speculative": 6,
    "jaxllm.lora": 6,
    "jaxllm.vision": 6,
    "jaxllm.audio": 6,
    "jaxllm.kv_tiers": 6,
    "jaxllm.kv_events": 6,
    "jaxllm.hosts": 6,
    "jaxllm.llm": 7,
    "jaxllm.llm_engine": 7,
    "jaxllm.async_llm": 7,
    "jaxllm.request_processor": 7,
    "jaxllm.engine_plan": 7,
    "jaxllm.beam_search": 7,
    "jaxllm.pooling_calls": 7,
    "server": 8,
    "jaxllm.measuring": 8,
    "jaxllm.scaling": 8,
    "jaxllm.cli": 9,
    "jaxllm.__main__": 10,
}
"""Level of each package; a module belongs to its longest prefix here."""

SIBLINGS = {
    ("jaxllm", "jaxllm.options"),
    ("jaxllm.options", "jaxllm"),
    ("jaxllm", "jaxllm.vllm_compat"),
    ("jaxllm.vllm_compat", "jaxllm"),
    ("jaxllm.vllm_compat", "jaxllm.options"),
    ("jaxllm.options", "jaxllm.media.options"),
    ("jaxllm", "jaxllm.gguf_files"),
    ("jaxllm.gguf_files", "jaxllm"),
    ("jaxllm", "jaxllm.model_parts"),
    ("jaxllm", "jaxllm.media.options"),
    ("jaxllm.media.options", "jaxllm"),
    ("jaxllm.text", "jaxllm.media"),
    ("jaxllm.routing", "jaxllm.scheduler"),
    ("jaxllm.data_parallel", "jaxllm.routing"),
    ("jaxllm.data_parallel", "jaxllm.scheduler"),
    ("jaxllm.replicas", "jaxllm.engine"),
    ("jaxllm.replicas", "jaxllm.hosts"),
    ("jaxllm.structured", "jaxllm.text"),
    ("jaxllm.text", "jaxllm.metrics"),
    ("jaxllm", "jaxllm.layers.source"),
    ("jaxllm.models", "jaxllm.quantization.formats"),
    ("jaxllm.quantization.formats", "jaxllm.quantization"),
    ("jaxllm.quantization.formats", "pallas_kernels"),
    ("jaxllm.quantization", "jaxllm.parallel"),
    ("jaxllm.quantization", "pallas_kernels"),
    ("jaxllm.context", "jaxllm.layers"),
    ("jaxllm.parallel", "pallas_kernels"),
    ("jaxllm.parallel", "jaxllm.parallel.topology"),
    ("jaxllm.pipeline", "jaxllm.runner"),
    ("jaxllm.hosts", "jaxllm.engine"),
    ("jaxllm.llm", "jaxllm.llm_engine"),
    ("jaxllm.llm", "jaxllm.beam_search"),
    ("jaxllm.llm", "jaxllm.pooling_calls"),
    ("jaxllm.async_llm", "jaxllm.llm_engine"),
    ("jaxllm.async_llm", "jaxllm.beam_search"),
    ("jaxllm.async_llm", "jaxllm.request_processor"),
    ("jaxllm.llm_engine", "jaxllm.request_processor"),
    ("jaxllm.engine_plan", "jaxllm.request_processor"),
    ("jaxllm.scaling", "jaxllm.measuring"),
}
"""Allowed (importer, imported) pairs on the same level; imports within one of these packages are free."""

WITHOUT_JAX = {
    "jaxllm",
    "jaxllm.gguf_files",
    "jaxllm.http_client",
    "jaxllm.model_parts",
    "jaxllm.models",
    "jaxllm.layers.source",
    "jaxllm.parallel.topology",
    "jaxllm.quantization.formats",
    "jaxllm.pipeline.split",
    "jaxllm.context.refused",
    "jaxllm.data_parallel",
    "jaxllm.routing",
    "jaxllm.replicas",
    "jaxllm.scheduler",
    "jaxllm.media",
    "jaxllm.text",
    "jaxllm.structured",
    "jaxllm.metrics",
    "jaxllm.expert_load",
    "jaxllm.kv_tiers",
    "jaxllm.kv_events",
    "jaxllm.vision",
}
WITHOUT_JAX_WHEN_IMPORTED = {"jaxllm.quantization.formats"}
"""Packages whose functions may import JAX when they are called: what reads a config.json and what computes is one class."""
REGISTERED = {
    "jaxllm.context": "",
    "jaxllm.expert_load": "",
    "jaxllm.kv_events": "",
    "jaxllm.hosts": "jaxllm.replicas.hosts",
    "jaxllm.data_parallel": "",
    "jaxllm.lora": "",
    "jaxllm.pipeline": "",
    "jaxllm.speculative": "",
    "jaxllm.vision": "",
}
"""Packages that `engine/features.py` or `engine/parallel_backends.py` names in an entry, each with the package that builds on it."""
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "pallas_kernels"}
PROJECT = ("jaxllm", "pallas_kernels", "server")


def modules() -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    found = {}
    for package in PROJECT:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "data" not in parts:
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """The longest prefix of a module that has a level."""
    parts = module.split(".")
    return next(room for end in range(len(parts), 0, -1) if (room := ".".join(parts[:end])) in FLOORS)


def nodes(tree: ast.AST, *, in_functions: bool) -> Iterator[ast.AST]:
    """All parts of a file, or those outside of functions."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        if in_functions or not isinstance(child, ast.FunctionDef):
            yield from nodes(child, in_functions=in_functions)


def imports_of(module: str, path: Path, known: dict[str, Path], *, in_functions: bool = True) -> Iterator[str]:
    """The modules that a file imports, wherever in it, those for the type checker too."""
    for node in nodes(ast.parse(path.read_text(encoding="utf-8")), in_functions=in_functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively in line {node.lineno}; say the whole name"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else str(node.module)


MODULES = modules()


@functools.cache
def all_imports() -> dict[str, list[str]]:
    """Imports of each module. Parsing takes longer than the tests, so it waits for the first."""
    return {module: sorted(set(imports_of(module, path, MODULES))) for module, path in MODULES.items()}


def imports_without_calls(module: str) -> list[str]:
    """The imports that meet JAX where none is allowed."""
    if room_of(module) not in WITHOUT_JAX_WHEN_IMPORTED:
        return all_imports()[module]
    return list(imports_of(module, MODULES[module], MODULES, in_functions=False))


def project_imports(module: str) -> list[str]:
    return [name for name in all_imports()[module] if name.split(".")[0] in PROJECT]


def test_every_folder_has_a_floor() -> None:
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py" and name.count(".") == 1}
    homeless = {name for name in folders if name.startswith("jaxllm.")} - set(FLOORS)
    assert not homeless, f"give {homeless} a floor in FLOORS and in docs/ARCHITECTURE.md"


@pytest.mark.parametrize("room", FLOORS)
def test_imports_go_downward(room: str) -> None:
    faults = []
    for module in MODULES:
        for imported in project_imports(module) if room_of(module) == room else ():
            other = room_of(imported)
            sideways = FLOORS[other] == FLOORS[room] and other != room and (room, other) not in SIBLINGS
            if FLOORS[other] > FLOORS[room] or sideways:
                faults.append(f"{module} (floor {FLOORS[room]}) imports {imported} (floor {FLOORS[other]})")
    assert not faults


@pytest.mark.parametrize(("package", "above"), REGISTERED.items())
def test_what_is_registered_by_a_line_can_be_deleted_with_it(package: str, above: str) -> None:
    def is_inside(module: str) -> bool:
        return module == package or module.startswith(f"{package}.")

    importers = {module for module in MODULES if not is_inside(module) for name in project_imports(module) if is_inside(name)}
    assert not [module for module in importers if not above or not module.startswith(above)]


def test_kernels_are_usable_without_the_engine() -> None:
    for module in MODULES:
        if room_of(module) == "pallas_kernels":
            assert not [name for name in project_imports(module) if name.split(".")[0] in ("jaxllm", "server")], module


def test_only_the_command_line_imports_the_server() -> None:
    importers = {module for module in MODULES for name in project_imports(module) if name.split(".")[0] == "server"}
    assert {room_of(module) for module in importers} <= {"jaxllm.cli", "server"}


@pytest.mark.parametrize("room", sorted(WITHOUT_JAX))
def test_the_host_wing_never_meets_jax(room: str) -> None:
    todo = [(module, module) for module in MODULES if room_of(module) == room]
    reached = {module for module, _ in todo}
    while todo:
        current, way = todo.pop()
        for name in imports_without_calls(current):
            assert name.split(".")[0] not in JAX, f"{way} → {name}"
            if name in MODULES and name not in reached:
                reached.add(name)
                todo.append((name, f"{way} → {name}"))
