import io

import pytest

from jaxllm import worker_pipe


def test_messages_are_read_as_they_were_written_and_then_no_more() -> None:
    pipe = io.BytesIO()
    for body in (b"", b"one", b"x" * 100_000):
        worker_pipe.write(pipe, body)
    pipe.seek(0)
    assert [worker_pipe.read(pipe) for _ in range(4)] == [b"", b"one", b"x" * 100_000, None]


def test_a_message_that_breaks_off_is_none() -> None:
    pipe = io.BytesIO()
    worker_pipe.write(pipe, b"one")
    whole = pipe.getvalue()
    assert worker_pipe.is_whole(whole) and not any(worker_pipe.is_whole(whole[:size]) for size in range(len(whole)))
    assert all(worker_pipe.read(io.BytesIO(whole[:size])) is None for size in range(len(whole)))


def test_an_impossible_length_is_refused() -> None:
    with pytest.raises(ValueError, match="4294967295 bytes"):
        worker_pipe.read(io.BytesIO(b"\xff\xff\xff\xff"))
