"""Dialogues and documents as rows of tokens.

A stored token is its id and two flags: that it starts a document, and that it is trained on.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from .chat_tokenizer import TURN_END, TURN_START, render_dialogue
from .dialogue import Dialogue
from .tasks import training_dialogues

TOKEN_MASK, STARTS, TRAINED = 0x1FFF, 0x4000, 0x8000
_CHUNK = 2000


def flag_dialogues(dialogues: Sequence[np.ndarray], turn_start: int, turn_end: int, assistant: int) -> list[np.ndarray]:
    """Adds the flags: a dialogue starts at its first token; trained are the assistant's words and the end of its turn."""
    lengths = np.array([len(ids) for ids in dialogues])
    flat = np.concatenate(dialogues).astype(np.uint16)
    opens = (
        np.flatnonzero((flat[:-2] == turn_start) & (flat[1:-1] == assistant)) + 3
    )  # past the start, the role and the newline
    ends = np.flatnonzero(flat == turn_end)
    closes = ends[np.searchsorted(ends, opens)] + 1
    edges = np.zeros(len(flat) + 1, np.int32)
    np.add.at(edges, opens, 1)
    np.add.at(edges, closes, -1)
    flat[np.cumsum(edges[:-1]) > 0] |= TRAINED
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    flat[starts] |= STARTS
    return np.split(flat, np.cumsum(lengths)[:-1])


def pack_rows(documents: Sequence[np.ndarray], row_length: int, open_rows: int = 32) -> np.ndarray:
    """Put each whole document into the first open row with enough space.

    The rest of a row is zeros, each a separate document that is not trained on.
    """
    rows: list[list[np.ndarray]] = []
    used: list[int] = []
    first_open = 0
    for document in documents:
        document = document[:row_length]
        first_open = max(first_open, len(rows) - open_rows)
        for place in range(first_open, len(rows)):
            if used[place] + len(document) <= row_length:
                break
        else:
            place = len(rows)
            rows.append([])
            used.append(0)
        rows[place].append(document)
        used[place] += len(document)
    packed = np.full((len(rows), row_length), STARTS, np.uint16)
    for place, row in enumerate(rows):
        packed[place, : used[place]] = np.concatenate(row)
    return packed


def dialogue_rows(
    tokenizer_file: Path,
    seed: int,
    count: int,
    short: int,
    long: int,
    rewrite: Callable[[Dialogue], Dialogue] = lambda dialogue: dialogue,
) -> tuple[np.ndarray, np.ndarray]:
    """Generates `count` dialogues and packs them, rewritten: those that fit into short rows, the others into long rows."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    turn_start, turn_end = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
    assistant = tokenizer.encode("assistant").ids[0]
    groups: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    texts: list[str] = []

    def flush() -> None:
        encoded = [np.array(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch_fast(texts)]
        for document in flag_dialogues(encoded, turn_start, turn_end, assistant):
            groups[len(document) > short].append(document)
        texts.clear()

    for dialogue in training_dialogues(seed, count):
        texts.append(render_dialogue(rewrite(dialogue)))
        if len(texts) == _CHUNK:
            flush()
    if texts:
        flush()
    empty = np.zeros(0, np.uint16)
    return pack_rows(groups[0] or [empty], short), pack_rows(groups[1] or [empty], long)


def document_stream(tokenizer: Tokenizer, documents: Sequence[str], end_of_text: int) -> np.ndarray:
    """All documents one after the other, each opened and closed by the end-of-text token and trained on whole."""
    pieces = []
    for encoding in tokenizer.encode_batch_fast(list(documents)):
        ids = np.array([end_of_text, *encoding.ids, end_of_text], np.uint16) | np.uint16(TRAINED)
        ids[0] = end_of_text | STARTS
        pieces.append(ids)
    return np.concatenate(pieces)
