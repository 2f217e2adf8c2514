import functools
import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.sampling_params import SamplingParams
from jaxllm.text.detokenizer import Detokenizer, text_stream
from jaxllm.text.tokenizer import SlowTokenizer, Tokenizer, load_tokenizer
from tests.helpers.tiny_tokenizers import EOS, PLAIN, write_tokenizer

TEXTS = st.lists(
    st.sampled_from([" ", "  ", "\n", "fox", " The", "sea shells", "don't", "é", "中", "文字", "😀", "🎉🎉", "�", "x", "1+1"]),
    max_size=12,
).map("".join)
FALLBACKS = ["byte_fallback", "unigram"]


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return load_tokenizer(write_tokenizer(Path(directory), kind))


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> list[str]:
    stream = text_stream(tokenizer, prompt, skip_special_tokens=skip)
    return [*map(stream.push, output), stream.flush()]


def expected(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool = True) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize("kind", ["byte_level", *FALLBACKS, "words"])
@given(prompt=TEXTS, output=TEXTS, skip=st.booleans())
@settings(max_examples=100)
def test_text_token_by_token_equals_the_whole(kind: str, prompt: str, output: str, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(output, add_special_tokens=False)
    pieces = streamed(tokenizer, prompt_ids, ids, skip=skip)
    assert "".join(pieces) == expected(tokenizer, prompt_ids, ids, skip=skip)
    if "�" not in output:
        assert not any("�" in piece for piece in pieces)


def is_cut(tail: bytes) -> bool:
    """Whether these bytes begin a character and nothing else."""
    try:
        tail.decode()
    except UnicodeDecodeError as error:
        return error.start == 0 and error.reason == "unexpected end of data"
    return False


@given(data=st.data())
@settings(max_examples=200)
def test_any_tokens_of_a_byte_level_tokenizer_equal_the_whole_up_to_a_cut_character(data: st.DataObject) -> None:
    tokenizer = tokenizer_of("byte_level")
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=30)
    prompt, output, skip = tokenizer.encode(data.draw(TEXTS)), data.draw(any_ids), data.draw(st.booleans())
    skipped = tokenizer.all_special_ids if skip else ()
    written = b"".join(tokenizer.token_bytes(id) for id in output if id not in skipped)
    whole = expected(tokenizer, prompt, output, skip=skip)
    if any(is_cut(written[-length:]) for length in (1, 2, 3)):
        whole = whole[:-1]
    assert "".join(streamed(tokenizer, prompt, output, skip=skip)) == whole


@pytest.mark.parametrize("kind", [*FALLBACKS, "words"])
@given(data=st.data())
@settings(max_examples=100)
def test_no_word_is_lost_whatever_the_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    text = "".join(streamed(tokenizer, tokenizer.encode("fox"), ids))
    at = 0
    for id in ids:
        word = tokenizer.convert_id_to_token(id)
        if word is not None and word.isalpha():
            assert word in text[at:]
            at = text.index(word, at) + len(word)


def test_a_slow_tokenizer_streams_too() -> None:
    from transformers import ByT5Tokenizer

    tokenizer = SlowTokenizer(ByT5Tokenizer())
    ids = tokenizer.encode("Grüße 😀!", add_special_tokens=False)
    pieces = streamed(tokenizer, tokenizer.encode("a", add_special_tokens=False), ids)
    assert "".join(pieces) == "Grüße 😀!" and not any("�" in piece for piece in pieces)


def test_broken_bytes_do_not_hold_text_back_for_ever() -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizer_of(kind)
        byte = tokenizer.convert_token_to_id("é"[0] if kind == "byte_level" else "<0xE4>")
        assert byte is not None
        pieces = streamed(tokenizer, tokenizer.encode("fox"), [byte] * 40)
        assert len("".join(pieces[:-1])) >= 24


@pytest.mark.parametrize("kind", ["byte_level", *FALLBACKS, "slow"])
@pytest.mark.parametrize("num_cut", [1, 2, 3])
def test_a_text_cut_inside_a_character_ends_before_it(kind: str, num_cut: int) -> None:
    from transformers import ByT5Tokenizer

    tokenizer = SlowTokenizer(ByT5Tokenizer()) if kind == "slow" else tokenizer_of(kind)
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("fox", add_special_tokens=False), SamplingParams())
    shown = []
    for id in ids[: len(ids) - num_cut]:
        detokenizer.push(id)
        shown.append(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == shown[-1] and detokenizer.text.strip() == "a"


def test_a_replacement_character_that_the_model_writes_stays() -> None:
    for kind in ("byte_level", *FALLBACKS):
        tokenizer = tokenizer_of(kind)
        ids = tokenizer.encode("a�", add_special_tokens=False)
        assert "".join(streamed(tokenizer, tokenizer.encode("fox"), ids)).strip() == "a�"


@pytest.mark.parametrize("kind", ["byte_level", *FALLBACKS])
@given(text=TEXTS.map(lambda text: text.replace("�", "✓")), data=st.data())
@settings(max_examples=100)
def test_a_prompt_may_end_anywhere_in_a_character(kind: str, text: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=data.draw(st.booleans()))
    cut = data.draw(st.integers(0, len(ids)))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    beginnings = (tokenizer.decode(ids[:end], skip_special_tokens=True).rstrip("�") for end in range(cut + 1))
    rest = whole[max(len(beginning) for beginning in beginnings if whole.startswith(beginning)) :]
    assert "".join(streamed(tokenizer, ids[:cut], ids[cut:])) == rest
    stop = data.draw(st.sampled_from(["文", "😀", "🎉🎉", "fox", " ", "é中", "shells don"]))
    detokenizer = Detokenizer(tokenizer, ids[:cut], SamplingParams(stop=stop))
    found = next((found for id in ids[cut:] if (found := detokenizer.push(id)) is not None), None) or detokenizer.finish()
    assert (detokenizer.text, found) == ((rest[: rest.find(stop)], stop) if stop in rest else (rest, None))


@pytest.mark.parametrize("kind", FALLBACKS)
def test_characters_after_broken_bytes_are_whole(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("fox 文字😀 The 中", add_special_tokens=False)
    start = next(place for place, id in enumerate(ids) if tokenizer.decode([id]) == "�")
    broken = tokenizer.convert_token_to_id("<0x96>")
    assert broken is not None
    assert "".join(streamed(tokenizer, ids[:start], [broken, *ids[start:]])) == "�文字😀 The 中"
    assert "".join(streamed(tokenizer, [*ids[:start], broken], ids[start:])).lstrip("�") == "文字😀 The 中"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = tokenizer_of("words")
    fox, added = tokenizer.convert_token_to_id("fox"), tokenizer.convert_token_to_id(PLAIN)
    assert fox is not None and added is not None

    def text(**options: bool) -> str:
        stream = text_stream(tokenizer, [fox], skip_special_tokens=False, **options)
        return "".join(map(stream.push, [added, added, fox])) + stream.flush()

    assert text() == f" {PLAIN} {PLAIN} fox"
    assert text(spaces_between_special_tokens=False) == f" {PLAIN}{PLAIN} fox"


# Stop strings


def run_text(text: str, **options: object) -> tuple[list[str], str | None]:
    """The visible text after each token and at the end, and the stop string found, for a text in single bytes."""
    tokenizer = tokenizer_of("byte_level")
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("x"), SamplingParams(**options))  # type: ignore[arg-type]
    visible = []
    for byte in text.encode():
        id = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == bytes([byte]))
        stop = detokenizer.push(id)
        visible.append(detokenizer.text)
        if stop is not None:
            return visible, stop
    stop = detokenizer.finish()
    return [*visible, detokenizer.text], stop


def test_text_ends_before_a_stop_string() -> None:
    visible, stop = run_text("hello STOP more", stop="STOP")
    assert (visible[-1], stop) == ("hello ", "STOP")
    assert not any("S" in text for text in visible)


def test_text_ends_after_a_stop_string_that_is_included() -> None:
    visible, stop = run_text("hello STOP more", stop=["STOP"], include_stop_str_in_output=True)
    assert (visible[-1], stop) == ("hello STOP", "STOP")
    assert visible[6] == "hello S"


def test_the_stop_string_that_ends_first_wins_and_then_the_first_listed() -> None:
    assert run_text("abcdef", stop=["abcde", "cd"])[1] == "cd"
    assert run_text("abcdef", stop=["bcd", "cd"]) == (["a", "a", "a", "a"], "bcd")
    assert run_text("abcdef", stop=["cd", "bcd"])[1] == "cd"


def test_a_beginning_of_a_stop_string_is_shown_when_it_leads_nowhere() -> None:
    visible, stop = run_text("a<en<end", stop="<end>")
    assert stop is None and visible == ["a", "a", "a", "a", "a<en", "a<en", "a<en", "a<en", "a<en<end"]


def test_stop_strings_are_not_heeded_before_min_tokens() -> None:
    assert run_text("stop stop x", stop="stop", min_tokens=4)[0][-1] == "stop "
    assert run_text("stop stop x", stop="stop", min_tokens=3)[0][-1] == ""
    visible, stop = run_text("stop stop x", stop="stop", min_tokens=9, max_tokens=20)
    assert (visible[-1], stop) == ("stop stop x", None)


@given(
    text=st.text("abc", max_size=25),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
@settings(max_examples=200)
def test_stop_strings_agree_with_a_search_of_the_whole_text(text: str, stops: list[str], include: bool) -> None:
    ends = [(text.find(stop) + len(stop), place) for place, stop in enumerate(stops) if stop in text]
    visible, stop = run_text(text, stop=stops, include_stop_str_in_output=include)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(visible)), "shown text was taken back"
    if not ends:
        assert stop is None and visible[-1] == text
    else:
        end, place = min(ends)
        assert stop == stops[place]
        assert visible[-1] == (text[:end] if include else text[: end - len(stop)])


def test_the_text_of_a_stop_token_is_left_out() -> None:
    tokenizer = tokenizer_of("byte_level")
    eos = tokenizer.convert_token_to_id(EOS)
    assert eos is not None
    for include, text in ((False, "fox"), (True, f"fox{EOS}")):
        params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
        detokenizer = Detokenizer(tokenizer, [1], params)
        for id in tokenizer.encode("fox", add_special_tokens=False):
            detokenizer.push(id)
        detokenizer.push_stop_token(eos)
        detokenizer.finish()
        assert detokenizer.text == text


def test_without_detokenization_there_is_no_text() -> None:
    tokenizer = tokenizer_of("byte_level")
    for one, params in ((None, SamplingParams()), (tokenizer, SamplingParams(detokenize=False))):
        detokenizer = Detokenizer(one, [1], params)
        assert detokenizer.push(70) is None and detokenizer.finish() is None and detokenizer.text == ""
