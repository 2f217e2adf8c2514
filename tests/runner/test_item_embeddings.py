"""Where the tokens of items find their embeddings, whatever encoded them."""

import pytest

from jaxllm.request import PromptItem
from jaxllm.runner.item_embeddings import embedding_of_tokens, slab_rows


def test_embeddings_lie_in_pages():
    assert slab_rows([3, 1], 4, 6).tolist() == [12, 13, 14, 15, 4, 5]
    with pytest.raises(AssertionError, match="9 embeddings in 2 pages"):
        slab_rows([3, 1], 4, 9)


def test_tokens_between_embeddings_keep_their_own():
    assert embedding_of_tokens(PromptItem("image", b"a", 2, 6)).tolist() == [0, 1, 2, 3, 4, 5]
    item = PromptItem("image", b"a", 2, 6, embedding_runs=((0, 2), (3, 2)))
    assert embedding_of_tokens(item).tolist() == [0, 1, -1, 2, 3, -1]
