import pytest

from jaxllm.whole_numbers import whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5k", 1500), ("2G", 2 * 2**30), ("1m", 10**6), ("-1", -1), ("1_000", 1000)],
)
def test_numbers_may_have_suffixes(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "4kb", "0x10", "1e3", "nan"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        whole_number(text)
