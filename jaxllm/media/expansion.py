"""Puts into a prompt the tokens that stand for its images."""

import itertools
from collections.abc import Sequence

from jaxllm.errors import InvalidRequestError
from jaxllm.media.families.family import Family
from jaxllm.media.media import ProcessedMedia
from jaxllm.request import PromptItem


def expand(
    family: Family, token_ids: list[int], processed: Sequence[ProcessedMedia]
) -> tuple[list[int], tuple[PromptItem, ...]]:
    """Token ids with as many placeholders as each image has tokens, and the items at them.

    The prompt has one placeholder for each image, or all of them already. Raises InvalidRequestError if it has another number.
    """
    image_id = family.vision.image_token_id
    found, wanted = token_ids.count(image_id), [media.num_embeddings for media in processed]
    if not processed and not found:
        return token_ids, ()
    may_be_expanded = found == sum(wanted)
    if found != len(processed) and not may_be_expanded:
        all_of_them = f", or {sum(wanted)}, as many as their embeddings ({_listed(wanted)})" if wanted else ""
        raise InvalidRequestError(
            f"the prompt has {found} image placeholder(s) (token {image_id}) and {len(processed)} image(s); it must have one placeholder "
            f"for each image{all_of_them}",
            "prompt",
        )
    expanded: list[int] = []
    items = []
    end = 0  # of what was copied from the prompt
    for number, media in enumerate(processed):
        start = token_ids.index(image_id, end)
        ids = list(media.token_ids)
        before = ids.index(image_id)
        is_expanded = may_be_expanded and start >= before and token_ids[start - before : start - before + len(ids)] == ids
        start -= before if is_expanded else 0
        if not is_expanded and found != len(processed):
            raise InvalidRequestError(
                f"the prompt has image placeholders at token {start}, but not the {len(ids)} tokens that stand for image {number + 1}, of "
                f"{media.num_embeddings} embeddings; put one placeholder (token {image_id}) for each image",
                "prompt",
            )
        expanded += token_ids[end:start]
        end = start + (len(ids) if is_expanded else 1)
        items.append(_item(family, media, len(expanded)))
        expanded += ids
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


def _item(family: Family, media: ProcessedMedia, position: int) -> PromptItem:
    return PromptItem(
        kind=media.kind,
        content_hash=media.content_hash,
        position=position,
        num_tokens=media.num_tokens,
        payload=media.payload,
        grid=media.grid if family.has_positions else None,
        embedding_runs=media.embedding_runs,
    )


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:8])) + (", …" if len(counts) > 8 else "")
