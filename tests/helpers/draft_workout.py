"""Takes an engine with a drafter through whatever may happen to it, and compares each token with what it says without drafts."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxllm.engine.core import EngineCore
from jaxllm.engine.fault_points import injected
from jaxllm.request import EngineCoreRequest, FinishReason
from tests.helpers import engines, goldens
from tests.helpers.engines import Answer
from tests.helpers.fake_runner import RandomDrafts

NAME = "llama_gqa"
RESULTS = goldens.golden(NAME).results
NUM_TOKENS = 32
DECODED = (
    {},
    {"temperature": 0.9, "top_p": 0.95},
    {"stop_token_ids": [RESULTS[2].tokens[9]], "min_tokens": 3},
    {"temperature": 0.3, "num_speculative_tokens": 1},
    {"num_speculative_tokens": 0, "max_tokens": 40},
)
"""Kinds of requests that the decode program serves."""
SCORED = ({"logprobs": 2}, {"temperature": 0.8, "logprobs": 1}, {"prompt_logprobs": 1}, {"logprob_token_ids": [3, 5, 8]}, {})
FULL = (
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.7, "frequency_penalty": 0.4, "logprobs": 1},
    {"logit_bias": {3: 2.0, 4: -2.0}, "temperature": 0.9},
    {"allowed_token_ids": [31, 32, 33, 34]},
    {"min_tokens": 20, "stop_token_ids": [RESULTS[3].tokens[4]]},
)


def requests(*kinds: dict, golden: str = NAME) -> list[EngineCoreRequest]:
    """More than there are rows, of these kinds in turn, with the prompts of a golden."""
    results = goldens.golden(golden).results
    count = max(len(kinds), len(results))
    return [
        engines.request(
            str(i), results[i % len(results)].prompt, **{"max_tokens": NUM_TOKENS, "seed": i, **kinds[i % len(kinds)]}
        )
        for i in range(count)
    ]


class Workout:
    """An engine over a golden, with or without drafts of the same drafter."""

    def __init__(self, core: EngineCore):
        self.core, self.golden = core, Path(core.config.model.model).name
        drafter = core.runner.shapes.functions.latest.drafter
        self.drafts = RandomDrafts(random.Random(1), num_drafts=drafter.num_drafts, num_lookahead=drafter.num_lookahead)

    def requests(self, *kinds: dict) -> list[EngineCoreRequest]:
        """See `requests`."""
        return requests(*kinds, golden=self.golden)

    def reschedule(self, *, has_drafts: bool = True, **options) -> None:
        """A new scheduler: see `engines.reschedule`."""
        self.core.scheduler.drafts = self.drafts if has_drafts else None
        engines.reschedule(self.core, **options)

    def check(self, wanted: list[EngineCoreRequest], expected: dict[str, Answer], **options) -> dict[str, Answer]:
        """The answers are as expected, and there were drafts."""
        before = self.drafts.counts.num_drafts
        found = engines.run(self.core, wanted, **options)
        for name, answer in found.items():
            compare(name, answer, expected[name])
        self.core.check_integrity()
        assert self.drafts.counts.num_drafts > before
        return found

    def without_drafts(self, wanted: list[EngineCoreRequest]) -> dict[str, Answer]:
        """Answers of the engine without drafts."""
        self.reschedule(has_drafts=False)
        return engines.run(self.core, wanted)


def compare(name: str, found: Answer, expected: Answer) -> None:
    """Tokens, logprobs, and why a request ended."""
    assert found.tokens == expected.tokens, f"request {name}"
    assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
    pairs = [(found.prompt_logprobs, expected.prompt_logprobs)]
    if expected.logprobs:
        pairs.append((found.token_logprobs, expected.token_logprobs))
    for one, other in pairs:
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_ids[:, 0].tolist() == other.token_ids[:, 0].tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)
            assert one.ranks.tolist() == other.ranks.tolist()


def depths_and_chunks(core: EngineCore) -> None:
    """Steps one by one and ahead of their tokens, prompts in parts, few blocks; repeated, so that beginnings are cached."""
    workout, num_preempted, num_cached = Workout(core), 0, 0
    for kinds, schedules in (
        (DECODED, [{"async_scheduling": False}, {"max_in_flight": 2, "num_blocks": 9}]),
        (
            (*DECODED, *SCORED, *FULL),
            [
                {"max_in_flight": 3, "num_blocks": 9, "max_num_batched_tokens": 21},
                {"async_scheduling": False, "enable_prefix_caching": False},
            ],
        ),
    ):
        expected = workout.without_drafts(workout.requests(*kinds))
        for schedule in schedules:
            workout.reschedule(**schedule)
            for _ in ("computed", "cached"):
                answers = workout.check(workout.requests(*kinds), expected)
                num_preempted += sum(answer.num_preemptions for answer in answers.values())
                num_cached += sum(answer.num_cached_tokens for answer in answers.values())
    assert num_preempted and num_cached and workout.drafts.counts.num_accepted_tokens > 50


def interruptions(core: EngineCore, kinds: Sequence[dict] = (*DECODED, *FULL)) -> None:
    """Aborts, resets of the prefix cache, failed steps, sleep."""
    workout = Workout(core)
    wanted = workout.requests(*kinds)
    expected = workout.without_drafts(wanted)
    workout.reschedule(max_in_flight=3)
    rng = random.Random(2)

    def disturb(step: int, answers: dict[str, Answer]) -> None:
        running = [name for name, answer in answers.items() if answer.finish_reason is None]
        if step % 7 == 3 and running:
            name = rng.choice(running)
            core.abort_requests([name])
            found = answers.pop(name)
            assert found.tokens == expected[name].tokens[: len(found.tokens)]
        if step % 11 == 5:
            assert core.reset_prefix_cache(reset_running_requests=True)

    workout.check(wanted, expected, after_step=disturb)
    with injected("step:4:oom,result:9:error,step:15:error,draw:6:oom"):
        answers = engines.run(core, wanted)
    assert any(answer.finish_reason != FinishReason.ERROR for answer in answers.values())
    for name, answer in answers.items():
        if answer.finish_reason != FinishReason.ERROR:
            compare(name, answer, expected[name])
    for level in (1, 2):
        core.sleep(level)
        core.wake_up()
        workout.check(wanted, expected)
    assert workout.drafts.counts.num_accepted_tokens > 20


def interruptions_of_few_kinds(core: EngineCore) -> None:
    """Interruptions with few programs, for what differs in neither draws nor logits: requests with drafts and without."""
    interruptions(core, (DECODED[0], DECODED[-1]))


def the_longest_requests(core: EngineCore) -> None:
    """Answers that end with the room of the model, in a cache that holds one of them."""
    workout, longest = Workout(core), core.max_model_len
    results = goldens.golden(workout.golden).results
    wanted = [engines.request(str(i), result.prompt, max_tokens=longest, seed=i) for i, result in enumerate(results[:4])]
    expected = workout.without_drafts(wanted)
    for depth, num_blocks in ((1, -(-longest // 16) + 1), (3, 40)):
        workout.reschedule(max_in_flight=depth, num_blocks=num_blocks)
        answers = workout.check(wanted, expected)
        for result, answer in zip(results, answers.values(), strict=False):
            assert len(result.prompt) + len(answer.tokens) == longest and answer.finish_reason == FinishReason.LENGTH


WORKOUTS: tuple[Callable[[EngineCore], None], ...] = (depths_and_chunks, interruptions, the_longest_requests)
