"""Tokens by rank, learnt from a text, and the rule by which bytes are merged to them, computed plainly as the library tiktoken does."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxllm.text.byte_letters import BYTES

TEXTS = (
    "The quick fox's den, it's 1234567 m\r\n\r\n  away 😀",
    "天気がいい中文abc中文",
    "aaaaaaaaaaaaaab bbbbab",
    " \n\t x",
    "ÄÖüß\x00\x7f",
    "",
)
LEARNT = " ".join(TEXTS) * 3 + "the then there aaab baaa aabaab xxxx xxx"


def ranks() -> dict[bytes, int]:
    """The single bytes in another order, then tokens learnt from a text."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    learner.train_from_iterator(LEARNT.split(" "), trainers.BpeTrainer(vocab_size=120, min_frequency=2, show_progress=False))
    learnt = [bytes(BYTES[letter] for letter in token) for token in learner.get_vocab() if len(token) > 1]
    order = random.Random(1).sample(range(256), 256)
    return {
        token: rank
        for rank, token in enumerate([*(bytes([byte]) for byte in order), *sorted(learnt, key=lambda t: (len(t), t))])
    }


def merged(part: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The pair of neighbours that make the token of the lowest rank is merged, the first of equal ones, until there is none."""
    if part in ranks:
        return [ranks[part]]
    pieces = [bytes([byte]) for byte in part]
    while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in ranks]:
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [ranks[piece] for piece in pieces]
