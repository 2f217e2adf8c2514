"""Requests of all kinds for a prefill and two decode engines, whose answers are compared with those of one engine."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.http_client.client import ServerClient
from scripts.rehearsing.streams import WHOLE, Stream

THRESHOLD = 128
"""--prefill-threshold: tokens of a prompt that is computed by a prefill engine."""
LONG_TEXT, SHORT_TEXT = 30, 2
"""Sentences of a prompt above and of one below the threshold: about 1000 and 70 tokens."""
_SENTENCE = "Once upon a time there was a little cat who liked to play in the garden with her friend the dog. "
_FIRST_LEAVES_SECONDS = 0.5
_AT_A_TIME = 8


@dataclass
class Answer(Stream):
    """One request whose text is kept."""

    text: str = ""

    def take(self, event: bytes) -> None:
        super().take(event)
        self.text += "".join(choice["text"] for choice in json.loads(event)["choices"])


def mixed(count: int, num_tokens: int, name: str) -> list[Answer]:
    """Requests of which every second has a long prompt, every second pair is streamed, and two of eight, one of them with a long
    prompt, are left by their clients one after the other. No two prompts begin alike.

    name: with what the prompts begin.
    """
    answers = []
    for number in range(count):
        prompt = f"{name} {number}: {_SENTENCE * (SHORT_TEXT if number % 2 else LONG_TEXT)}"
        body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": number % 4 < 2}
        leaves = _FIRST_LEAVES_SECONDS + number / 16 if number % 8 in (0, 7) else None
        answers.append(Answer(body, leaves))
    return answers


async def differences(url: str, answers: Sequence[Answer]) -> list[str]:
    """Answers, whole or cut off, that are not what one engine says alone. Raises ServerError."""
    places = asyncio.Semaphore(_AT_A_TIME)
    async with ServerClient(url, timeout_seconds=60) as client:

        async def difference(answer: Answer) -> str:
            # Prompt logprobs have one engine compute the whole prompt.
            async with places:
                alone = await client.post_json("/v1/completions", {**answer.body, "stream": False, "prompt_logprobs": 0})
            expected = alone["choices"][0]["text"]
            is_right = answer.text == expected if answer.outcome == WHOLE else expected.startswith(answer.text)
            return "" if is_right else f"{answer.text!r} in place of {expected!r} ({answer.outcome})"

        return [found for found in await asyncio.gather(*map(difference, answers)) if found]
