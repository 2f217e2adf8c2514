"""Requests for a pipeline, and its host 0 as a process: python -m tests.helpers.stage_scenario DIRECTORY OPTIONS"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest, Grammar
from jaxllm.scheduler_output import TokenLogprobs
from tests.helpers import engines, goldens
from tests.helpers.host_scenario import go_on, tell

NAME = "gemma3"
"""Four layers, in two groups."""
OPTIONS: dict[str, Any] = {
    **engines.SMALL,
    "model": str(goldens.golden(NAME).directory),
    "max_num_batched_tokens": 32,  # prompts come in chunks
    "token_buckets": (32,),
    "num_gpu_blocks_override": 24,  # and requests are preempted
}
PROMPTS = [result.prompt for result in goldens.golden(NAME).results]
SEEDED = {"temperature": 1.0, "seed": 7}


def options(directory: Path) -> dict[str, Any]:
    """Options of an engine with the tokenizer of a directory."""
    return {**OPTIONS, "tokenizer": str(directory)}


def requests(run: int) -> list[EngineCoreRequest]:
    """Requests of every kind, more than run at a time."""
    grammar = engines.request(f"{run} grammar", PROMPTS[2], max_tokens=16, **SEEDED)
    return [
        engines.request(f"{run} greedy", PROMPTS[0], max_tokens=24),
        engines.request(f"{run} logprobs", PROMPTS[1], max_tokens=24, logprobs=2, **SEEDED),
        replace(grammar, grammar=Grammar("start: /[a-c]{20}/")),
        engines.request(f"{run} penalties", PROMPTS[3], max_tokens=24, presence_penalty=0.5, **SEEDED),
        engines.request(f"{run} prompt", (PROMPTS[0] * 9)[:60], max_tokens=8, prompt_logprobs=1),
        engines.pooling_request(f"{run} vector", PROMPTS[1]),
    ]


def answers(core: EngineCore) -> dict[str, Any]:
    """To requests of every kind, again with cached prefixes, and again after sleep in the midst of others."""
    found: dict[str, Any] = {}
    for run in range(3):
        if run == 2:
            for request in requests(-1)[1:4]:
                core.add_request(request)
            for _ in range(6):
                core.step()
            core.sleep(1)
            core.wake_up()
            core.step()
        done = engines.run(core, requests(run))
        found |= {name: [*answer.tokens, *numbers(answer)] for name, answer in done.items()}
        core.check_integrity()
    found["preempted"] = core.stats().num_preemptions > 0
    return found


def numbers(answer: engines.Answer) -> list[float]:
    """All numbers of an answer."""
    found = (answer.token_logprobs if answer.logprobs else None, answer.prompt_logprobs)
    parts: list[TokenLogprobs] = [part for part in found if part is not None]
    arrays = [np.ravel(values) for part in parts for values in (part.token_ids, part.logprobs)]
    return [*(float(x) for array in arrays for x in array), *([] if answer.pooled is None else answer.pooled.ravel().tolist())]


def print_answers(options: Callable[[Path], dict[str, Any]], answers: Callable[[EngineCore], Any]) -> None:
    """Print the answers of an engine that the command line asks for; with "on" go on then."""
    directory, more = Path(sys.argv[1]), json.loads(sys.argv[2])
    core = EngineCore(EngineConfig.from_options(**{**options(directory), **more}))
    tell(answers(core))
    if "on" in sys.argv[3:]:
        go_on(core, PROMPTS[0])
    else:
        core.shutdown()


if __name__ == "__main__":
    print_answers(options, answers)
