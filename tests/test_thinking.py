"""Where a thinking section stands after a prompt, and when its budget forces the end."""

import itertools

import numpy as np
import pytest

from jaxllm.errors import InvalidRequestError
from jaxllm.thinking import ThinkingBudget, ThinkingSection, force_token

START, END, CALLS, TURN = 90, 91, 92, 93
TOKENS = {"<think>": START, "</think>": END, "<|tool_calls_section_begin|>": CALLS, "<|im_start|>": TURN}


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ([TURN, 5], (10, False)),
        ([TURN, 5, START], (10, True)),
        ([TURN, 5, START, 6, 7], (8, True)),
        ([START, *range(20)], (0, True)),
        ([START, 6, END, TURN, START], (10, True)),
        ([START, 6, END, TURN, 5], (10, False)),
        ([START, 6, TURN, 5], (10, False)),
        ([TURN, START, 6, END, 7], None),
        ([TURN, START, 6, END], None),
    ],
    ids=[
        "plain",
        "opened",
        "begun",
        "used up",
        "next turn",
        "earlier turn",
        "left open in an earlier turn",
        "closed",
        "just closed",
    ],
)
def test_a_prompt_may_open_the_section_or_have_it_behind_it(prompt, found):
    budget = ThinkingBudget.of(10, prompt, TOKENS, frozenset({TURN}))
    assert (budget and (budget.num_tokens, budget.is_open)) == found
    if budget is not None:
        assert (budget.start_token_id, budget.end_token_ids) == (START, (END, CALLS))


def test_a_vocabulary_without_such_tokens_is_refused():
    with pytest.raises(InvalidRequestError, match="no tokens that begin and end its thinking .*<think> and </think>"):
        ThinkingBudget.of(10, [1], {"<think>": START}, frozenset())
    mistral = ThinkingBudget.of(10, [1], {"[THINK]": 5, "[/THINK]": 6}, frozenset())
    assert (mistral.start_token_id, mistral.end_token_ids) == (5, (6,))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_masks_are_asked_for_exactly_where_one_of_the_possible_outputs_needs_one(is_open, num_tokens):
    budget = ThinkingBudget(num_tokens, START, (END, CALLS), is_open)

    def after(tokens):
        section = ThinkingSection(budget)
        for token in tokens:
            if section.forced_token_id not in (None, token):
                return None  # no such output
            section.advance(token)
        return section

    outputs = itertools.chain.from_iterable(itertools.product((5, START, END, CALLS), repeat=n) for n in range(3))
    for known in outputs:
        if (section := after(known)) is None:
            continue
        for num_unknown in range(4):
            futures = (after((*known, *rest)) for rest in itertools.product((5, START, END), repeat=num_unknown))
            forced = any(future is not None and future.forced_token_id is not None for future in futures)
            assert section.may_force(num_unknown) == forced, (known, num_unknown)


def test_a_forced_token_is_the_only_one_unless_a_grammar_forbids_it():
    for token in (0, 31, 32, 63):
        mask = np.full(2, -1, np.int32)
        force_token(mask, token)
        assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [token]
    grammar = np.array([0b110, 0], np.int32)
    force_token(grammar, 0)
    assert grammar.tolist() == [0b110, 0]
