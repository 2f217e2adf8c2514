"""Engines whose drafters have weights give the tokens that they give without drafts, under schedules drawn at random."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest
from tests.helpers import engines, goldens
from tests.helpers.draft_workout import Workout, compare
from tests.speculative import block_diffusion, checkpoints, next_token

pytestmark = pytest.mark.slow

NUM_STEPS = 90
"""Steps of each engine."""
KINDS = ({"temperature": 0.8}, {"temperature": 0.4, "num_speculative_tokens": 1})
"""Parameters of requests. Greedy ones, logprobs and penalties with drafts: tests/end_to_end/test_drafts.py."""


def likely_tokens(count: int) -> np.ndarray:
    """Tokens that the target's answers to the golden's prompts have most often, ascending."""
    counts = Counter(token for result in goldens.golden(checkpoints.TARGET.name).results for token in result.tokens)
    return np.sort([token for token, _ in counts.most_common(count)])


def with_likely_tokens(weights: dict[str, np.ndarray], count: int = 3) -> dict[str, np.ndarray]:
    """A head whose vocabulary are the tokens that are often right."""
    head = {"lm_head.weight": weights["lm_head.weight"][:count], "d2t": likely_tokens(count) - np.arange(count)}
    return {**{name: w for name, w in weights.items() if name != "t2d"}, **head}


def block_head(folder: Path) -> dict:
    weights = with_likely_tokens(block_diffusion.head_tensors(draft_vocab=checkpoints.DRAFT_V))
    plain = {name: value for name, value in block_diffusion.CONFIG.items() if name != "dflash_config"}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": block_diffusion.WINDOW}
    own = {"aux_hidden_state_layer_ids": [0, 1], "mask_token_id": 127, "block_size": 3, "draft_vocab_size": 3}
    return {"method": "dflash", "model": str(checkpoints.write(folder, {**plain, **layers, **own}, weights))}


def requests(rng: random.Random, vocab_size: int) -> list[EngineCoreRequest]:
    """More than there are rows; beginnings are shared."""
    shared = [rng.randrange(3, vocab_size) for _ in range(40)]
    return [
        engines.request(
            str(i),
            shared[: rng.choice([0, 20, 40])] + [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 20))],
            **{"max_tokens": rng.randint(1, 70), "seed": i, **rng.choice(KINDS)},
        )
        for i in range(8)
    ]


def run_at_random(core: EngineCore, vocab_size: int, num_steps: int) -> None:
    """Chunks of prompts, few blocks, cached beginnings, aborts; compare all tokens."""
    workout, rng = Workout(core), random.Random(5)
    wanted = requests(rng, vocab_size)
    expected, done, num_preempted, num_cached = workout.without_drafts(wanted), 0, 0, 0

    def disturb(step: int, answers: dict[str, engines.Answer]) -> None:
        nonlocal done
        done += 1
        running = [name for name, answer in answers.items() if answer.finish_reason is None]
        if running and rng.random() < 0.03:
            name = rng.choice(running)
            core.abort_requests([name])
            found = answers.pop(name)
            assert found.tokens == expected[name].tokens[: len(found.tokens)]

    fewest = core.scheduler.cache_manager.num_blocks_for(core.max_model_len) + 2
    while done < num_steps:
        workout.reschedule(
            max_in_flight=rng.choice([1, 2, 3]),
            num_blocks=rng.choice([None, fewest]) if done else fewest,
            max_num_batched_tokens=rng.choice([17, 24, 48]),
            enable_prefix_caching=not done or rng.random() < 0.7,
        )
        for _ in range(2):
            answers = engines.run(core, rng.sample(wanted, len(wanted)), after_step=disturb)
            for name, answer in answers.items():
                compare(name, answer, expected[name])
            num_preempted += sum(answer.num_preemptions for answer in answers.values())
            num_cached += sum(answer.num_cached_tokens for answer in answers.values())
        core.check_integrity()
    counts = workout.drafts.counts
    assert num_preempted and num_cached
    assert counts.num_accepted_tokens > done // 50 and counts.num_draft_tokens > counts.num_accepted_tokens


def test_a_head_leaves_tokens_as_they_are(tmp_path):
    """Other heads in engines: test_engines_with_weights.py."""
    core = engines.make_core(checkpoints.TARGET.name, speculative_config=block_head(tmp_path / "head"))
    run_at_random(core, checkpoints.V, NUM_STEPS)
    core.shutdown()


def test_modules_in_turn_leave_tokens_as_they_are(tmp_path):
    """Prompts over a vocabulary so small that drafts are right now and then."""
    small = next_token.SPELLINGS["mimo_v2_flash"]
    directory = next_token.write(small, tmp_path, 2, vocab_size=16)
    options = {"method": "mtp", "num_speculative_tokens": 2}
    core = engines.make_core(checkpoints.TARGET.name, model=str(directory), speculative_config=options)
    run_at_random(core, 16, NUM_STEPS)
    core.shutdown()
