"""Times steps in which the same requests go on."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.acceptance import Acceptance
from jaxllm.llm_engine import LLMEngine
from jaxllm.lora_request import LoRARequest
from jaxllm.scaling.runs import SETTLING_STEPS, end_all, greedy


@dataclass(frozen=True)
class Steps:
    """A stretch of steps of the same requests, from the results of one to those of the last."""

    seconds: float
    num_steps: int
    num_tokens: int
    drafts: Acceptance

    @property
    def ms_per_step(self) -> float:
        return 1e3 * self.seconds / self.num_steps

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def time_steps(
    engine: LLMEngine,
    prompts: Sequence[dict[str, list[int]]],
    num_steps: int,
    max_tokens: int,
    adapters: Sequence[LoRARequest | None] = (),
) -> Steps:
    """Time steps that compute no prompt. adapters: of the requests, if they have any. Raises SystemExit if a request ends before them."""
    for i, prompt in enumerate(prompts):
        engine.add_request(f"steps {i}", prompt, greedy(max_tokens), lora_request=adapters[i] if adapters else None)
    have_token: set[str] = set()

    def step() -> int:
        """The number of tokens that it wrote."""
        news = engine.core.step()
        engine.take(news)
        have_token.update(item.request_id for item in news if item.new_token_ids)
        return sum(len(item.new_token_ids) for item in news)

    try:
        while len(have_token) < len(prompts) and engine.has_unfinished_requests():
            step()
        for _ in range(SETTLING_STEPS):
            step()
        before, began = Acceptance.of(engine.core.stats()), time.perf_counter()
        num_tokens = sum(step() for _ in range(num_steps))
        seconds = time.perf_counter() - began
        drafts = Acceptance.of(engine.core.stats()) - before
        if engine.get_num_unfinished_requests() < len(prompts):
            sys.exit(
                f"{len(prompts)} requests do not run at once for {num_steps} steps; lower --prompt-len or raise max_model_len"
            )
        return Steps(seconds, num_steps, num_tokens, drafts)
    finally:
        end_all(engine)
