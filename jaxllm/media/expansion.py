"""Puts into a prompt the tokens that stand for its images, videos and clips of audio."""

import itertools
from collections.abc import Mapping, Sequence

from jaxllm.errors import InvalidRequestError
from jaxllm.media.media import ProcessedMedia
from jaxllm.request import PromptItem

_WHAT = {"image": "image", "video": "time step of a video", "audio": "clip of audio"}
"""Names of what a placeholder stands for, by its kind."""


def expand(
    ids_of: Mapping[str, int], token_ids: list[int], processed: Sequence[ProcessedMedia], *, has_positions: bool = False
) -> tuple[list[int], tuple[PromptItem, ...]]:
    """Token ids with as many placeholders as each image, clip of audio and time step of a video has tokens, and the items at them.

    The prompt has one placeholder for each, or all of them already. Items of a kind come in their order. Raises InvalidRequestError if it
    has another number. ids_of: the placeholder of each kind. has_positions: whether tokens turn by their places in an item's grid.
    """
    queues = [_Queue(token_ids, kind, token_id, processed) for kind, token_id in ids_of.items()]
    waiting = [queue for queue in queues if queue.media]
    expanded: list[int] = []
    items: list[PromptItem] = []
    end = 0  # of what was copied from the prompt
    while waiting:
        queue = min(waiting, key=lambda queue: queue.find(end))
        media, start, is_expanded = queue.take(end)
        ids = media.token_ids
        expanded += token_ids[end:start]
        end = start + (len(ids) if is_expanded else 1)
        items.append(_item(media, len(expanded), has_positions=has_positions))
        expanded += ids
        waiting = [queue for queue in waiting if queue.media]
    if not items:
        return token_ids, ()
    return expanded + token_ids[end:], tuple(items)


def embedding_runs(token_ids: Sequence[int], image_id: int) -> tuple[tuple[int, int], ...]:
    """(offset, count) of each run of this token; empty: all are this token."""
    runs = []
    offset = 0
    for is_image, run in itertools.groupby(token_ids, lambda token_id: token_id == image_id):
        count = len(list(run))
        if is_image:
            runs.append((offset, count))
        offset += count
    return () if runs == [(0, len(token_ids))] else tuple(runs)


class _Queue:
    """The items of one kind that are not placed yet."""

    def __init__(self, token_ids: list[int], kind: str, token_id: int, processed: Sequence[ProcessedMedia]):
        self._token_ids, self._kind, self._token_id = token_ids, kind, token_id
        self.media = [item for media in processed if media.kind == kind for item in media.items]
        self._number, self._found = 0, -1
        found, wanted = token_ids.count(token_id), [media.num_embeddings for media in self.media]
        self._may_be_expanded = found == sum(wanted)
        self._are_single = found == len(self.media)
        if not self._are_single and not self._may_be_expanded:
            what = _WHAT[kind]
            all_of_them = f", or {sum(wanted)}, as many as their embeddings ({_listed(wanted)})" if wanted else ""
            raise InvalidRequestError(
                f"the prompt has {found} {kind} placeholder(s) (token {token_id}) and {len(self.media)} {what}(s); it must have one "
                f"placeholder for each {what}{all_of_them}",
                "prompt",
            )

    def find(self, end: int) -> int:
        """Where the next placeholder is, behind what was copied."""
        if self._found < end:
            self._found = self._token_ids.index(self._token_id, end)
        return self._found

    def take(self, end: int) -> tuple[ProcessedMedia, int, bool]:
        """The next item, where it starts behind what was copied, and whether all its tokens are there already."""
        media = self.media.pop(0)
        self._number += 1
        ids, start = list(media.token_ids), self.find(end)
        first = start - ids.index(self._token_id)  # the family's own tokens may come before the first placeholder
        is_expanded = self._may_be_expanded and first >= end and self._token_ids[first : first + len(ids)] == ids
        if not is_expanded and not self._are_single:
            raise InvalidRequestError(
                f"the prompt has {self._kind} placeholders at token {start}, but not the {len(ids)} tokens that stand for {self._kind} "
                f"{self._number}, of {media.num_embeddings} embeddings; put one placeholder (token {self._token_id}) for each",
                "prompt",
            )
        return media, first if is_expanded else start, is_expanded


def _item(media: ProcessedMedia, position: int, *, has_positions: bool) -> PromptItem:
    return PromptItem(
        kind=media.kind,
        content_hash=media.content_hash,
        position=position,
        num_tokens=media.num_tokens,
        payload=media.payload,
        grid=media.grid if has_positions else None,
        embedding_runs=media.embedding_runs,
    )


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:8])) + (", …" if len(counts) > 8 else "")
