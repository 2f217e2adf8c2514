import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.http_client.sse import EventParser, EventTooLongError

STREAM = (
    b': hello\n\ndata: {"a": 1}\n\nevent: x\nid: 7\nretry: 5\ndata:{"b": 2}\n\n'
    b"data: one\ndata: two\n\n: keep-alive\n\ndata\n\ndata: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"one\ntwo", b"", b"[DONE]"]


def read(stream: bytes, *cuts: int) -> list[bytes]:
    parser, events, start = EventParser(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        events += parser.feed(stream[start:cut])
        start = cut
    return events + parser.close()


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_are_the_same_wherever_the_stream_is_cut(line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    assert read(stream) == EVENTS
    for cut in range(len(stream) + 1):
        assert read(stream, cut) == EVENTS
    assert read(stream, *range(len(stream))) == EVENTS


@given(st.lists(st.integers(0, len(STREAM))))
def test_any_cuts_give_the_same_events(cuts: list[int]) -> None:
    assert read(STREAM, *cuts) == EVENTS


@given(st.lists(st.binary(max_size=40)))
def test_no_bytes_break_the_parser(pieces: list[bytes]) -> None:
    parser = EventParser()
    whole = [event for piece in pieces for event in parser.feed(piece)] + parser.close()
    assert whole == read(b"".join(pieces))


def test_a_byte_order_mark_is_no_part_of_the_first_event() -> None:
    stream = b"\xef\xbb\xbfdata: x\n\n"
    assert all(read(stream, cut) == [b"x"] for cut in range(len(stream)))


def test_a_last_event_without_an_empty_line_counts() -> None:
    assert read(b"data: x\n\ndata: y") == [b"x", b"y"]


def test_an_event_without_end_is_refused() -> None:
    for piece in (b"data: 0123456789", b"data: 01234\n"):
        parser = EventParser(max_event_bytes=100)
        with pytest.raises(EventTooLongError):
            for _ in range(30):
                parser.feed(piece)
