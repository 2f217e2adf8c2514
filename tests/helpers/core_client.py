"""A client of an engine's core that sends the same prompts again and again."""

import random
from collections.abc import Sequence
from typing import Any

from jaxllm.engine.core import EngineCore
from jaxllm.outputs import EngineCoreOutput
from jaxllm.request import EngineCoreRequest
from jaxllm.request_options import RequestOptions
from jaxllm.sampling_params import SamplingParams


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of several blocks, some with a common beginning."""
    rng = random.Random(seed)
    begin = [rng.randrange(60) for _ in range(40)]
    lengths = [rng.choice([20, 50, 64, 95]) for _ in range(count)]
    return [(begin * (i % 3 == 0) + [rng.randrange(60) for _ in range(n)])[:95] for i, n in enumerate(lengths)]


class Client:
    """Sends the same prompts again and again."""

    def __init__(self, core: EngineCore, prompts: Sequence[list[int]], **options: Any):
        self.core, self.prompts, self.options = core, prompts, options
        self.num_sent = 0
        self.received: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}
        """Tokens of prompts that were found, on the devices or the host."""

    def send(self, **options: Any) -> list[str]:
        """Queue all prompts."""
        ids = []
        for prompt in self.prompts:
            self.num_sent += 1
            ids.append(f"r{self.num_sent}")
            self.core.add_request(
                EngineCoreRequest(
                    request_id=ids[-1],
                    prompt_token_ids=prompt,
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=8),
                    eos_token_ids=(),
                    arrival_time=float(self.num_sent),
                    options=RequestOptions(**{**self.options, **options}),
                )
            )
            self.received[ids[-1]] = []
        return ids

    def take(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for output in outputs:
            self.received[output.request_id] += output.new_token_ids
            self.num_cached[output.request_id] = output.num_cached_tokens

    def run(self, **options: Any) -> list[list[int]]:
        """The tokens of all prompts."""
        ids = self.send(**options)
        while self.core.has_unfinished_requests():
            self.take(self.core.step())
        self.core.scheduler.check_integrity()
        return [self.received[name] for name in ids]
