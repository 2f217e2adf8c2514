from pathlib import Path

import numpy as np
import pytest

from jaxllm.outputs import Logprob
from jaxllm.scheduler_output import TokenLogprobs
from jaxllm.text.logprobs import FlatLogprobs, positions, token_text
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers.fake_engine_core import fake_logprobs
from tests.helpers.tiny_tokenizers import write_tokenizer


def test_a_row_is_the_token_and_the_likeliest_by_rank() -> None:
    assert positions(fake_logprobs([7], 2, 100), 2, [], None) == [
        {7: Logprob(-0.5, 2), 8: Logprob(pytest.approx(-0.1), 1), 9: Logprob(pytest.approx(-0.2), 2)}
    ]
    assert positions(fake_logprobs([7], 2, 100), 0, [], None) == [{7: Logprob(-0.5, 2)}]
    assert len(positions(fake_logprobs([7], 9, 100), -1, [], None)[0] or {}) == 10
    assert [e.rank for e in (positions(fake_logprobs([7], 2, 100), 2, [], None, ranked=False)[0] or {}).values()] == [
        2,
        None,
        None,
    ]


def test_a_sampled_token_among_the_likeliest_is_named_once_with_its_rank() -> None:
    tokens = TokenLogprobs(np.array([[5, 6, 5]]), np.array([[-0.7, -0.6, -0.7]], np.float32), np.array([2]))
    found = positions(tokens, 2, [], None)[0]
    assert found is not None and list(found) == [5, 6] and found[5].rank == 2 and found[6].rank == 1


def test_a_token_that_could_not_be_drawn_is_named_only_if_the_request_names_it() -> None:
    tokens = TokenLogprobs(np.array([[5, 6, 5, 0]]), np.array([[-0.7, -0.6, -0.7, -np.inf]], np.float32), np.array([2]))
    assert [list(positions(tokens, 3, [], None, ranked=ranked)[0] or {}) for ranked in (True, False)] == [[5, 6], [5, 6, 0]]


def test_a_character_of_several_tokens_shows_at_its_last(tmp_path: Path) -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = load_tokenizer(write_tokenizer(tmp_path, kind))
        ids = tokenizer.encode("fox ✓ fox", add_special_tokens=False)
        texts = [token_text(tokenizer, id, ids[:place]) for place, id in enumerate(ids)]
        assert "".join(texts).strip() == "fox ✓ fox" and "✓" in texts


def test_flat_logprobs_read_like_a_list() -> None:
    rows = [None, {1: Logprob(-0.5, 1, "a"), 2: Logprob(-0.7, 2, "b")}, {3: Logprob(-0.1, 1, None)}]
    flat = FlatLogprobs()
    flat.extend(rows)
    assert len(flat) == 3 and flat[1:] == rows[1:] and flat[-1] == rows[-1]
    assert [position or None for position in flat] == rows
