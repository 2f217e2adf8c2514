"""Finds the source code of a model outside this project, because programs depend on it."""

import hashlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from flax import nnx

from jaxllm.errors import ConfigError
from jaxllm.layers.decoder import CausalLM

_KNOWN = {"jaxllm", "pallas_kernels", "jax", "jaxlib", "flax", *sys.stdlib_module_names}
"""Packages whose digest or version is already in the fingerprint, and those of Python itself."""
_INSTALLED = {"site-packages", "dist-packages"}


def describe_source(model: CausalLM) -> str:
    """The module of the model's class, and a digest of the source of all its classes defined outside this project.

    That is the source of the top-level packages of these classes, and of modules that those use and pip did not install.
    Raises ConfigError for a class without source, such as one from a notebook.
    """
    name = f"{type(model).__module__}:{type(model).__qualname__}"
    classes = {cls for _, part in nnx.iter_modules(model) for cls in type(part).__mro__ if _top(cls.__module__) not in _KNOWN}
    for cls in classes:
        try:
            inspect.getsource(cls)
        except (OSError, TypeError, SyntaxError):
            raise ConfigError(
                f"compiled programs of {name} cannot be kept: {cls.__qualname__} has no source file that would tell when it "
                "changes; write the class into a Python file"
            ) from None
    if not classes:
        return name
    digest = hashlib.sha256()
    for relative, file in sorted(_files(_top(cls.__module__) for cls in classes)):
        digest.update(f"{relative}\0".encode())
        digest.update(file.read_bytes())
    return f"{name} ({digest.hexdigest()[:12]})"


def _files(packages: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """The Python files of these top-level packages, and of those that they use, each with a name that is the same everywhere."""
    todo, seen = list(packages), set(_KNOWN)
    while todo:
        package = todo.pop()
        if package in seen:
            continue
        seen.add(package)
        module = sys.modules[package]
        roots = [Path(path) for path in getattr(module, "__path__", ())]
        found = [(root, file) for root in roots for file in root.rglob("*.py") if file.is_file()]  # editors leave broken links
        yield from ((f"{package}/{file.relative_to(root)}", file) for root, file in found)
        if not roots and (source := getattr(module, "__file__", None)) is not None:
            yield package, Path(source)
        if not _is_installed(package):
            todo += [used for used in _used_by(package) if not _is_installed(used)]


def _used_by(package: str) -> set[str]:
    """The top-level packages of all modules, classes and functions that a package's loaded modules name."""
    modules = [module for name, module in list(sys.modules.items()) if _top(name) == package]
    values = [value for module in modules for value in list(vars(module).values())]
    owners = [value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None) for value in values]
    return {_top(owner) for owner in owners if isinstance(owner, str) and _top(owner) in sys.modules}


def _is_installed(package: str) -> bool:
    """Whether a loaded package was installed by pip."""
    module = sys.modules[package]
    paths = [Path(path) for path in (*getattr(module, "__path__", ()), getattr(module, "__file__", None)) if path]
    return not paths or any(_INSTALLED & set(path.parts) for path in paths)


def _top(module: str) -> str:
    return module.partition(".")[0]
