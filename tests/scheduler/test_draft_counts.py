from jaxllm.scheduler.draft_counts import DraftCounts


def test_drafts_are_counted_by_position() -> None:
    counts = DraftCounts(3)
    assert counts.accepted_per_position == (0, 0, 0) and counts.num_accepted_tokens == 0
    for num_drafts, num_accepted in ((3, 3), (3, 1), (0, 0), (2, 2), (1, 0)):
        counts.note(num_drafts, num_accepted)
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (4, 9, 6)
    assert counts.accepted_per_position == (3, 2, 1)
