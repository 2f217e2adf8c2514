"""Requests for an engine on several hosts, and its host 0 as a process: python -m tests.helpers.host_scenario DIRECTORY OPTIONS"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.errors import EngineDeadError
from jaxllm.request import Grammar
from jaxllm.request_options import RequestOptions
from tests.helpers import engines, goldens

NAME = "llama_gqa"
OPTIONS: dict[str, Any] = {
    **engines.SMALL,
    "model": str(goldens.golden(NAME).directory),
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 8,
    "num_gpu_blocks_override": 40,
}
PROMPTS = [result.prompt for result in goldens.golden(NAME).results[:6]]
ADAPTERS = ("adapter", "other")
"""More than slots."""


def options(directory: Path) -> dict[str, Any]:
    """Options of an engine with the tokenizer of a directory."""
    return {**OPTIONS, "tokenizer": str(directory)}


def answers(core: EngineCore, directory: Path) -> list[list[int]]:
    """Token ids of requests at the same time: greedy, seeded, by a grammar and by adapters; the same again after sleep."""
    for adapter in ADAPTERS:
        number = core.add_adapter(adapter, str(directory / adapter))
        while core.adapter_state(number).state == "loading":
            core.step()
            time.sleep(0.01)
    found = []
    for level in (0, 1):
        if level:
            core.sleep(level)
            core.wake_up()
        requests = [engines.request(f"{level}-{i}", prompt, max_tokens=8) for i, prompt in enumerate(PROMPTS)]
        requests[1] = engines.request(f"{level}-1", PROMPTS[1], max_tokens=8, temperature=1.0, seed=7)
        requests[2] = replace(requests[2], grammar=Grammar("start: /[a-c]{20}/"))
        for i in (3, 4, 5):
            requests[i] = replace(requests[i], options=RequestOptions(adapter=ADAPTERS[i % 2]))
        done = engines.run(core, requests)
        found += [done[request.request_id].tokens for request in requests]
    return found


def tell(value: Any) -> None:
    """Print it in a line that begins with "> ", at once: Ray and Gloo print too, also in the middle of what is written in parts."""
    sys.stdout.write(f"\n> {json.dumps(value)}\n")
    sys.stdout.flush()


def go_on(core: EngineCore, prompt: list[int]) -> None:
    """Print tokens, generate until the engine dies, and print how."""
    num_compiled = core.num_compiled_after_warmup  # what came before may have come before its programs
    try:
        for number in range(1_000_000):
            done = engines.run(core, [engines.request(str(number), prompt, max_tokens=8)])
            if not number:
                assert core.num_compiled_after_warmup == num_compiled
                tell(done["0"].tokens)
    except EngineDeadError as error:
        tell({"error": str(error), "at": time.time()})


def main() -> None:
    """Print the answers where there are adapters; with "on" or without adapters go on then."""
    directory, more, is_last = Path(sys.argv[1]), json.loads(sys.argv[2]), "on" not in sys.argv[3:]
    core = EngineCore(EngineConfig.from_options(**{**options(directory), **more}))
    if core.adapters is not None:
        tell(answers(core, directory))
        if is_last:
            core.shutdown()
            return
    go_on(core, PROMPTS[0])


if __name__ == "__main__":
    main()
