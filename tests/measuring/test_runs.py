"""The row of decodes alone: only decode steps are timed."""

from collections.abc import Iterator

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.llm import LLM
from jaxllm.measuring.runs import SETTLING_STEPS, greedy, random_prompts, time_decodes
from scripts.measuring.rows import Row
from tests.helpers import engines

NUM_STEPS, PROMPT = 6, 40


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    core = engines.make_core(
        "llama_gqa", max_num_seqs=4, max_num_batched_tokens=48, token_buckets=(48,), enable_prefix_caching=False
    )
    llm = LLM.from_config(core.config, core=core)
    yield llm
    llm.shutdown()


def timed(llm: LLM, num_rows: int, max_tokens: int):
    prompts = random_prompts([PROMPT] * num_rows, llm.llm_engine.model_config.vocab_size, seed=0)
    found = time_decodes(llm.llm_engine, prompts, [greedy(max_tokens)] * num_rows, num_steps=NUM_STEPS)
    llm.llm_engine.check_integrity()
    return found


@pytest.mark.slow
def test_every_step_decodes_all_rows_after_the_last_prompt(llm: LLM) -> None:
    found = timed(llm, 4, 60)
    assert found.note is None and found.seconds > 0
    # The last prompt was followed by the settling steps, the first one also by those of the others' prompts.
    assert len(found.contexts) == 4 and found.contexts == sorted(found.contexts, reverse=True)
    assert found.contexts[-1] == PROMPT + SETTLING_STEPS and found.contexts[0] > found.contexts[-1]
    assert found.num_steps == NUM_STEPS
    assert found.mean_context == sum(found.contexts) / 4 + (NUM_STEPS - 1) / 2


@pytest.mark.parametrize(("num_rows", "max_tokens"), [(5, 60), (4, 5)])
def test_rows_that_do_not_run_together_are_refused(llm: LLM, num_rows: int, max_tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot run {num_rows} requests at once for so long"):
        timed(llm, num_rows, max_tokens)


def test_a_row_that_ends_meanwhile_is_told(llm: LLM) -> None:
    found = timed(llm, 1, 1 + SETTLING_STEPS + 3)
    assert found.note == "3 of 6 steps were not decodes of all 1 rows"
    row = Row("decode 1", "ms", 2.0, 1.0, note=found.note)
    assert row.cells()[0] == "decode 1, ms (3 of 6 steps were not decodes of all 1 rows)"


def test_prompts_are_the_agreed_random_tokens() -> None:
    rng = np.random.default_rng(0)
    expected = [rng.integers(0, 744, length).tolist() for length in (4, 6)]
    assert [prompt["prompt_token_ids"] for prompt in random_prompts([4, 6], 1000, seed=0)] == expected
