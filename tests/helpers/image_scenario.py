"""Prompts with images for an engine on several hosts; its host 0 is python -m tests.helpers.image_scenario DIRECTORY OPTIONS"""

from pathlib import Path
from typing import Any

from jaxllm.engine.core import EngineCore
from tests.helpers import engines
from tests.helpers.picture_requests import golden_requests
from tests.helpers.stage_scenario import print_answers

NAME = "qwen3_vl_moe"


def options(directory: Path) -> dict[str, Any]:
    """Options of an engine of the golden's checkpoint, in `directory`/model."""
    sizes = {"max_num_batched_tokens": 16, "token_buckets": (16,), "mm_max_patches": 256}  # prompts come in chunks
    return {**engines.SMALL, "dtype": "float32", "model": str(directory / "model"), **sizes}


def answers(core: EngineCore) -> list[list[list[int]]]:
    """The tokens of each prompt: all at once; again with what is cached; after sleep; and one alone, beside which ranks are idle."""
    vision = core.model_config.vision
    assert vision is not None
    requests = golden_requests(NAME, vision)
    found = [engines.run(core, requests), engines.run(core, requests)]
    core.sleep(1)
    core.wake_up()
    found += [engines.run(core, requests), engines.run(core, requests[:1])]
    core.check_integrity()
    return [[answer.tokens for answer in run.values()] for run in found]


if __name__ == "__main__":
    print_answers(options, answers)
