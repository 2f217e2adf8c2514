"""Parses server-sent events from arbitrary pieces of bytes. Does not interpret their data."""

MAX_EVENT_BYTES = 64 * 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLongError(ValueError):
    """An event exceeds the maximum length."""


class EventParser:
    """Takes bytes and returns the `data` of every complete event. Skips comments (keep-alives) and other fields."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._num_data_bytes = 0
        self._is_start = True

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that end in this piece, in order. Raises EventTooLongError."""
        if self._rest:
            piece = self._rest + piece
        if self._is_start:
            if len(piece) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(piece):
                self._rest = piece
                return []
            self._is_start = False
            piece = piece.removeprefix(_BYTE_ORDER_MARK)
        held = b""
        if b"\r" in piece:
            if piece.endswith(b"\r"):  # its "\n" may still arrive
                piece, held = piece[:-1], b"\r"
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = piece.split(b"\n")
        self._rest = lines.pop() + held
        events: list[bytes] = []
        for line in lines:
            self._read(line, events)
        if len(self._rest) + self._num_data_bytes > self._max_event_bytes:
            raise EventTooLongError(f"an event of the server is longer than {self._max_event_bytes} bytes")
        return events

    def close(self) -> list[bytes]:
        """The last event, if the stream ended without the empty line that completes it."""
        events: list[bytes] = []
        rest, self._rest = self._rest, b""
        self._read(rest.removesuffix(b"\r"), events)
        self._read(b"", events)
        return events

    def _read(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
                self._num_data_bytes = 0
        elif line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data.append(value)
            self._num_data_bytes += len(value)
        elif line == b"data":
            self._data.append(b"")
