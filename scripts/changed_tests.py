"""Runs the tests of what changed since a base: scripts/test --changed [--base COMMIT] [pytest arguments]

Changed are the files that differ from the merge base with main, or from COMMIT, in the working tree, new files included. A test file
is its own test. The tests of a module are those named after it, or else those of its package, and those that import it. The tests of
another file are those that name it, or else those of its package. What was chosen is printed first, and so is a change without tests.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
BRANCHES = ("main", "origin/main")


def main(arguments: Sequence[str]) -> int:
    """Choose the tests, show them and run pytest on them. Returns its exit code, or 0 if there is nothing to run."""
    parser = argparse.ArgumentParser(prog="scripts/test --changed", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--base", metavar="COMMIT", help="compare with this commit (default: the merge base with main)")
    args, passed_on = parser.parse_known_args(arguments)
    try:
        base = args.base or merge_base(ROOT)
        changed = changed_files(ROOT, base)
    except subprocess.CalledProcessError as error:
        print(f"git cannot compare with {args.base or 'HEAD'}: {error.stderr.strip()}; name another commit by --base")
        return 2
    tests = Tests(ROOT)
    chosen = {path: tests.of(path) for path in changed}
    print(f"{len(changed)} files differ from {base}")
    for path, files in chosen.items():
        print(f"  {path}: {' '.join(files) or 'no tests'}")
    selected = without_nested({file for files in chosen.values() for file in files})
    if not selected:
        print("no test mirrors a changed file: nothing runs (scripts/test runs all)")
        return 0
    return subprocess.call([sys.executable, "-m", "pytest", *passed_on, *selected], cwd=ROOT)


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def merge_base(root: Path) -> str:
    """The commit at which the present branch left main; HEAD in a repository without a main."""
    for branch in BRANCHES:
        try:
            return git(root, "merge-base", "HEAD", branch).strip()
        except subprocess.CalledProcessError:
            continue
    return "HEAD"


def changed_files(root: Path, base: str) -> list[str]:
    """Files of the working tree that differ from a commit, deleted and untracked ones included."""
    tracked = git(root, "diff", "--name-only", "--no-renames", "-z", base)
    untracked = git(root, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({path for path in (tracked + untracked).split("\0") if path})


def without_nested(paths: Iterable[str]) -> list[str]:
    """Without what a folder among them contains."""
    paths = set(paths)
    return sorted(path for path in paths if not any(str(parent) in paths for parent in PurePosixPath(path).parents))


class Tests:
    """The test files of a checkout, and what each of them imports."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sources = {
            file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in (root / "tests").rglob("*.py")
        }
        self._imports = {path: set(imported(source)) for path, source in self._sources.items()}

    def of(self, path: str) -> list[str]:
        """The test files and folders that mirror a file, in order."""
        pure = PurePosixPath(path)
        if pure.suffix != ".py":
            name = pure.name if pure.suffix else path  # the names of those without a suffix are words
            return sorted(test for test in self._test_files() if name in self._sources[test]) or self._of_package(pure)
        if pure.parts[0] == "tests":
            return self._of_tests_file(pure)
        return without_nested({*(self._named_after(pure) or self._of_package(pure)), *self._importing(pure)})

    def _of_tests_file(self, path: PurePosixPath) -> list[str]:
        if path.name.startswith("test_"):
            return [str(path)] if (self._root / path).exists() else []
        if path.name == "conftest.py":
            return [str(path.parent)]
        return sorted(self._importing(path))

    def _named_after(self, path: PurePosixPath) -> set[str]:
        """tests/a/test_b.py and tests/a/test_b_….py for a/b.py, and tests/test_a.py, too, for a folder a that has no folder of tests."""
        mirror = mirror_of(path)
        while len(mirror.parts) > 1:
            found = {
                test
                for test in self._test_files()
                if PurePosixPath(test).parent == mirror.parent
                and f"{PurePosixPath(test).stem}_".startswith(f"test_{mirror.stem}_")
            }
            if found or (self._root / mirror.parent).is_dir():
                return found
            mirror = mirror.parent
        return set()

    def _importing(self, path: PurePosixPath) -> set[str]:
        """Test files that import a module or what is in it, by themselves or through a helper of the tests."""
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        helpers = {
            ".".join(PurePosixPath(test).with_suffix("").parts) for test in self._sources if module in self._imports[test]
        }
        wanted = {module} | (helpers if path.parts[0] == "tests" else set())
        return {test for test in self._test_files() if wanted & self._imports[test]}

    def _of_package(self, path: PurePosixPath) -> list[str]:
        """The nearest folder of tests that mirrors the module's package; none for a module outside of packages."""
        for parent in mirror_of(path).parents:
            if len(parent.parts) > 1 and (self._root / parent).is_dir():
                return [str(parent)]
        return []

    def _test_files(self) -> Iterator[str]:
        return (path for path in self._sources if PurePosixPath(path).name.startswith("test_"))


def mirror_of(path: PurePosixPath) -> PurePosixPath:
    """Where tests/ mirrors a source file: packages of jaxllm, and the other folders of the repository, are folders of tests."""
    return PurePosixPath("tests", *(path.parts[1:] if path.parts[0] == "jaxllm" else path.parts))


def imported(source: str) -> Iterator[str]:
    """The modules that a file imports, and for `from a import b` also a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
