"""Times steps in which the same requests go on."""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.acceptance import Acceptance
from jaxllm.errors import ConfigError
from jaxllm.llm_engine import LLMEngine
from jaxllm.lora_request import LoRARequest
from jaxllm.measuring.runs import decoding, greedy


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
    params = [greedy(max_tokens)] * len(prompts)
    try:
        with decoding(engine, prompts, params, adapters) as step:
            before, began = Acceptance.of(engine.core.stats()), time.perf_counter()
            num_tokens = sum(len(output.new_token_ids) for _ in range(num_steps) for output in step())
            seconds = time.perf_counter() - began
            drafts = Acceptance.of(engine.core.stats()) - before
            if engine.get_num_unfinished_requests() == len(prompts):
                return Steps(seconds, num_steps, num_tokens, drafts)
    except ConfigError:
        pass
    sys.exit(f"{len(prompts)} requests do not run at once for {num_steps} steps; lower --prompt-len or raise max_model_len")
