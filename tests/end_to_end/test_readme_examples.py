"""The Python examples in the README and docs/PYTHON.md run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = [
    example
    for page in ("README.md", "docs/PYTHON.md")
    for example in re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
]
EXPECTED = ('{"name": "Anna", "age": 31, "city": "Rome"}', "27 + 15 = 42", "stop", "return n % 2 == 0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_every_example_has_an_expectation() -> None:
    assert len(EXAMPLES) == len(EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "expected"), list(zip(EXAMPLES, EXPECTED, strict=False)))
def test_example(
    example: str, expected: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(cache))
    exec(compile(example, "example", "exec"), {"__name__": "__main__"})
    assert expected in capsys.readouterr().out
