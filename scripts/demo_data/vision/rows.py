"""Dialogues with pictures as rows of fixed sizes: tokens with their positions, and patches, each kind packed on its own.

A stored token is its id and the flags of `packing`. A picture's patches stand in merge order: the four patches of an embedding
follow each other.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ..chat_tokenizer import TURN_END, TURN_START, render_dialogue
from ..packing import STARTS, TOKEN_MASK, flag_dialogues
from .dialogues import PictureDialogue, training_dialogue
from .model_files import IMAGE_PAD_ID
from .scenes import CELL

PATCH = CELL // 2
MERGED = 4
"""Patches in an embedding."""
_GIVE_UP = 40
"""A batch is full once so many dialogues did not fit."""
_AT_ONCE = 64
"""How many dialogues are made at a time."""


class Batch(NamedTuple):
    """R rows of T tokens, V rows of P patches."""

    tokens_RT: np.ndarray
    """uint16, with flags."""
    positions_R3T: np.ndarray
    """int16: time, row and column, as M-RoPE counts."""
    source_RT: np.ndarray
    """int32: which of the V * P / 4 embeddings stands here; -1: none, a token."""
    patches_VPC: np.ndarray
    """uint8, C = 3 * 16 * 16 in the order channel, row, column."""
    places_VP4: np.ndarray
    """int16: row and column in the picture, and its height and width, in patches."""
    segment_VP: np.ndarray
    """int16: which picture of the row; -1: padding."""


@dataclass(frozen=True)
class BatchShape:
    """Sizes of a batch."""

    rows: int
    tokens: int
    picture_rows: int
    patches: int

    @property
    def arrays(self) -> tuple[tuple[tuple[int, ...], type[np.generic]], ...]:
        """Shape and type of each array."""
        text, patches = (self.rows, self.tokens), (self.picture_rows, self.patches)
        return (
            (text, np.uint16),
            ((self.rows, 3, self.tokens), np.int16),
            (text, np.int32),
            ((*patches, 3 * PATCH**2), np.uint8),
            ((*patches, 4), np.int16),
            (patches, np.int16),
        )

    @property
    def num_bytes(self) -> int:
        """Of all arrays."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.arrays)

    def batch(self, memory: memoryview | bytearray) -> Batch:
        """A batch in this memory."""
        arrays, offset = [], 0
        for shape, dtype in self.arrays:
            arrays.append(np.ndarray(shape, dtype, memory, offset))
            offset += arrays[-1].nbytes
        return Batch(*arrays)

    def empty(self) -> Batch:
        """A batch of its own memory."""
        return self.batch(bytearray(self.num_bytes))


class Document(NamedTuple):
    """A dialogue that is ready to be packed."""

    tokens: np.ndarray
    """uint16, with flags."""
    pictures: tuple[np.ndarray, ...]
    """Pixels."""


def to_patches(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Patches [N, 3 * 16 * 16] of a picture in merge order, and row, column, height and width of each [N, 4]."""
    height, width, _ = pixels.shape
    rows, columns = height // PATCH, width // PATCH
    cells = pixels.reshape(rows // 2, 2, PATCH, columns // 2, 2, PATCH, 3)
    patches = cells.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3 * PATCH**2)
    raster = np.arange(rows * columns).reshape(rows // 2, 2, columns // 2, 2).transpose(0, 2, 1, 3).reshape(-1)
    places = np.empty((rows * columns, 4), np.int16)
    places[:, 0], places[:, 1] = np.divmod(raster, columns)
    places[:, 2:] = rows, columns
    return patches, places


def mrope_positions(ids: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """Time, row and column [3, T] of the tokens of a prompt with pictures of these heights and widths, in embeddings.

    Text advances all three. A picture at position s has time s, rows and columns from s; what follows goes on behind the largest.
    """
    positions = np.empty((3, len(ids)), np.int16)
    at = now = 0
    pads = np.flatnonzero(ids == IMAGE_PAD_ID)
    for height, width in grids:
        start = int(pads[0])
        pads = pads[height * width :]
        positions[:, at:start] = now + np.arange(start - at)
        now += start - at
        at = start + height * width
        positions[0, start:at] = now
        positions[1, start:at] = now + np.repeat(np.arange(height), width)
        positions[2, start:at] = now + np.tile(np.arange(width), height)
        now += max(height, width)
    positions[:, at:] = now + np.arange(len(ids) - at)
    return positions


class Documents:
    """Turns dialogues into documents."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._start, self._end = tokenizer.token_to_id(TURN_START), tokenizer.token_to_id(TURN_END)
        self._assistant = tokenizer.encode("assistant").ids[0]

    def of(self, dialogues: Sequence[PictureDialogue], rng: random.Random) -> list[Document]:
        """Whole dialogues, with flags."""
        texts = [render_dialogue(made.dialogue) for made in dialogues]
        encoded = [np.array(encoding.ids, np.uint16) for encoding in self._tokenizer.encode_batch_fast(texts)]
        flagged = flag_dialogues(encoded, self._start, self._end, self._assistant)
        drawn = (tuple(scene.draw(rng) for scene in made.scenes) for made in dialogues)
        return [self._expand(tokens, pictures) for tokens, pictures in zip(flagged, drawn, strict=True)]

    def of_prompt(self, prompt: str, pictures: tuple[np.ndarray, ...]) -> Document:
        """A rendered dialogue up to where an answer begins."""
        tokens = np.array(self._tokenizer.encode(prompt).ids, np.uint16)
        tokens[0] |= STARTS
        return self._expand(tokens, pictures)

    @staticmethod
    def _expand(tokens: np.ndarray, pictures: tuple[np.ndarray, ...]) -> Document:
        """Repeats the placeholder of each picture for each of its embeddings."""
        repeats = np.ones(len(tokens), np.int64)
        repeats[(tokens & TOKEN_MASK) == IMAGE_PAD_ID] = [pixels.shape[0] * pixels.shape[1] // CELL**2 for pixels in pictures]
        return Document(np.repeat(tokens, repeats), pictures)


class Packer:
    """Fills a batch."""

    def __init__(self, shape: BatchShape, batch: Batch):
        self._shape = shape
        self._batch = batch
        self._used_R = np.zeros(shape.rows, np.int32)
        self._used_V = np.zeros(shape.picture_rows, np.int32)
        self._pictures_V = np.zeros(shape.picture_rows, np.int16)
        batch.tokens_RT[:] = STARTS
        batch.positions_R3T[:] = 0
        batch.source_RT[:] = -1
        batch.patches_VPC[:] = 0
        batch.places_VP4[:] = 0
        batch.segment_VP[:] = -1

    @property
    def filled(self) -> tuple[float, float]:
        """Shares of tokens and of patches that are not padding."""
        shape = self._shape
        return (
            float(self._used_R.sum()) / (shape.rows * shape.tokens),
            float(self._used_V.sum()) / (shape.picture_rows * shape.patches),
        )

    def add(self, document: Document) -> bool:
        """Puts a document where the least is left over; False: it does not fit."""
        shape = self._shape
        row = _best_fit(self._used_R, len(document.tokens), shape.tokens)
        used_V, picture_rows = self._used_V.copy(), []
        for pixels in document.pictures:
            size = pixels.shape[0] * pixels.shape[1] // PATCH**2
            place = _best_fit(used_V, size, shape.patches)
            if place is None:
                return False
            picture_rows.append(place)
            used_V[place] += size
        if row is None:
            return False
        self.put(document, row, picture_rows)
        return True

    def put(self, document: Document, row: int, picture_rows: Sequence[int]) -> None:
        """Puts a document and its pictures into these rows, where there is room for them."""
        batch, shape = self._batch, self._shape
        start = int(self._used_R[row])
        where = slice(start, start + len(document.tokens))
        ids = document.tokens & TOKEN_MASK
        sources = []
        for pixels, place in zip(document.pictures, picture_rows, strict=True):
            patches, places = to_patches(pixels)
            at = int(self._used_V[place])
            to = slice(at, at + len(patches))
            batch.patches_VPC[place, to] = patches
            batch.places_VP4[place, to] = places
            batch.segment_VP[place, to] = self._pictures_V[place]
            self._pictures_V[place] += 1
            self._used_V[place] += len(patches)
            sources.append((place * shape.patches + at) // MERGED + np.arange(len(patches) // MERGED))
        grids = [(pixels.shape[0] // CELL, pixels.shape[1] // CELL) for pixels in document.pictures]
        batch.tokens_RT[row, where] = document.tokens
        batch.positions_R3T[row, :, where] = mrope_positions(ids, grids)
        if sources:
            batch.source_RT[row, where][ids == IMAGE_PAD_ID] = np.concatenate(sources)
        self._used_R[row] += len(document.tokens)


def _best_fit(used: np.ndarray, size: int, limit: int) -> int | None:
    """The fullest row that still has room; None: there is none."""
    place = int(np.argmax(np.where(used + size <= limit, used, -1)))
    return place if used[place] + size <= limit else None


class BatchMaker:
    """Fills batches with training dialogues; those that did not fit begin the next batch."""

    def __init__(self, tokenizer: Tokenizer, shape: BatchShape, seed: int | str):
        self._documents = Documents(tokenizer)
        self._shape = shape
        self._rng = random.Random(seed)
        self._left: list[Document] = []

    def fill(self, batch: Batch) -> tuple[float, float]:
        """Overwrites all arrays. Returns the shares of tokens and of patches that are not padding."""
        packer = Packer(self._shape, batch)
        waiting, self._left = self._left, []
        misses = 0
        while misses < _GIVE_UP:
            if not waiting:
                dialogues = [training_dialogue(self._rng) for _ in range(_AT_ONCE)]
                waiting = [document for document in self._documents.of(dialogues, self._rng) if self._fits_alone(document)]
                continue
            document = waiting.pop()
            if not packer.add(document):
                misses += 1
                self._left.append(document)
        self._left += waiting
        return packer.filled

    def _fits_alone(self, document: Document) -> bool:
        patches = sum(pixels.shape[0] * pixels.shape[1] for pixels in document.pictures) // PATCH**2
        return len(document.tokens) <= self._shape.tokens and patches <= self._shape.patches
