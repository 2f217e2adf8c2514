"""The Python examples in the README run as they stand."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
EXPECTED = ("27 + 15 = 42", "length", "return n % 2 == 0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_every_example_has_an_expectation() -> None:
    assert len(EXAMPLES) == len(EXPECTED)


@pytest.mark.parametrize(("example", "expected"), list(zip(EXAMPLES, EXPECTED, strict=False)))
def test_example(
    example: str, expected: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(cache))
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    assert expected in capsys.readouterr().out
