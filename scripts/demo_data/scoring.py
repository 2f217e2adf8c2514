"""The test of the demo model: held-out questions with one right answer, and bits per byte of held-out Python text."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from .dialogue import Dialogue

MAX_ANSWER_TOKENS = 96
WINDOW = 1024


def is_right(dialogue: Dialogue, answer: str) -> bool:
    """Whether an answer is the right one, character for character but for blanks around it."""
    return answer.strip() == dialogue.answer.strip()


def score(questions: Sequence[Dialogue], answers: Sequence[str], show_wrong: int = 12) -> tuple[float, str]:
    """The share of right answers, and a report of it by kind with the first wrong answers."""
    right: dict[str, list[bool]] = defaultdict(list)
    wrong = []
    for dialogue, answer in zip(questions, answers, strict=True):
        right[dialogue.kind].append(is_right(dialogue, answer))
        if not right[dialogue.kind][-1]:
            wrong.append(
                f"  {dialogue.kind}: {dialogue.messages[-2]['content']!r}\n    right {dialogue.answer!r}\n    given {answer!r}"
            )
    lines = [f"  {kind:<14} {sum(marks):>3} of {len(marks)}" for kind, marks in sorted(right.items())]
    total = sum(map(sum, right.values()))
    share = total / len(questions)
    head = f"exact answers: {total} of {len(questions)} = {100 * share:.1f} %"
    return share, "\n".join([head, *lines, *(["wrong answers:", *wrong[:show_wrong]] if wrong and show_wrong else [])])


def text_windows(
    tokenizer: Tokenizer, texts: Sequence[str], end_of_text: int, limit: int | None = None
) -> tuple[list[list[int]], int]:
    """The texts as windows of at most WINDOW tokens, each opened by the end-of-text token, and how many bytes they hold.

    With a limit only the first so many windows, none of a text that does not fit.
    """
    windows: list[list[int]] = []
    num_bytes = 0
    for text in texts:
        ids = tokenizer.encode(text).ids
        pieces = [[end_of_text, *ids[at : at + WINDOW - 1]] for at in range(0, len(ids), WINDOW - 1)]
        if limit is not None and windows and len(windows) + len(pieces) > limit:
            break
        windows += pieces
        num_bytes += len(text.encode())
    return windows, num_bytes


def bits_per_byte(
    windows: Sequence[Sequence[int]], num_bytes: int, log_likelihood: Callable[[Sequence[Sequence[int]]], float]
) -> float:
    """From the summed natural logarithms of the probabilities of all tokens but the first of each window."""
    return -log_likelihood(windows) / math.log(2) / num_bytes
