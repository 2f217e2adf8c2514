"""Requests wait for programs that only they need, and hold no other up meanwhile: tokens of others do not wait for a compilation."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from jaxllm import encoder_sizes
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.request import EngineCoreRequest, ErrorKind, FinishReason
from jaxllm.request_options import RequestOptions
from jaxllm.runner import item_embeddings
from jaxllm.runner.features.images import programs
from jaxllm.runner.step_programs import StepPrograms
from jaxllm.scheduler_output import SchedulerOutput
from tests.end_to_end.test_image_steps import END, PAD, START, picture
from tests.helpers import engines, vision_checkpoint
from tests.helpers.engines import Answer
from tests.helpers.picture_requests import mixed_request

pytestmark = pytest.mark.slow

LARGE = "encode 64"
"""The program of the large image."""
WAIT_SECONDS = 120


class Gate:
    """Holds back the compilation of some programs, by what the log calls them, until it is opened; those that are broken fail."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.broken: set[str] = set()
        self.began: list[str] = []
        self.open = threading.Event()

    def lowered(self, lower: Any, shapes: StepPrograms, key: Any) -> Any:
        self.began.append(key.described)
        if key.described in self.held:
            return _Held(lower(shapes, key), self.open)
        if key.described in self.broken:
            raise ValueError("no such instruction")
        return lower(shapes, key)


class _Held:
    def __init__(self, program: Any, gate: threading.Event):
        self._program, self._gate = program, gate

    def compile(self, **options: Any) -> Any:
        assert self._gate.wait(WAIT_SECONDS)
        return self._program.compile(**options)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Programs that encode more than 16 patches are rare, and so is that of the largest step with images."""
    gate, lower = Gate(), StepPrograms.lower
    monkeypatch.setattr(StepPrograms, "lower", lambda shapes, key: gate.lowered(lower, shapes, key))
    monkeypatch.setattr(encoder_sizes, "PROGRAM_SIZES", (16, 64))
    for module, name in ((programs, "COMMON_PATCHES"), (programs, "FIRST_PATCHES"), (item_embeddings, "COMMON_TOKENS")):
        monkeypatch.setattr(module, name, 16)
    yield gate
    gate.open.set()


@pytest.fixture
def make_core(tmp_path_factory: pytest.TempPathFactory, gate: Gate) -> Iterator[Any]:
    made = []
    model = vision_checkpoint.write(tmp_path_factory.mktemp("qwen3_vl") / "model")

    def make(**options: Any) -> EngineCore:
        sizes = {"token_buckets": (16, 112), "dtype": "float32", "mm_max_patches": 256, "compile_threads": 2}
        config = EngineConfig.from_options(**{**engines.SMALL, **sizes, "model": str(model), "warmup": "background", **options})
        made.append(EngineCore(config))
        return made[-1]

    yield make
    gate.open.set()
    for core in made:
        core.shutdown()


def large(name: str, **params: Any) -> EngineCoreRequest:
    return mixed_request((START, PAD, END), name, 5, picture(1, 4, 4), 3, **params)


def small(name: str, **params: Any) -> EngineCoreRequest:
    return mixed_request((START, PAD, END), name, 2, picture(2, 2, 2), 2, **params)


def run_until(core: EngineCore, answers: dict[str, Answer], is_done: Callable[[], object]) -> None:
    """Step until something holds. Outputs are added to the answers."""
    end = time.monotonic() + WAIT_SECONDS
    while not is_done():
        assert time.monotonic() < end, "it never came"
        for output in core.step():
            answers.setdefault(output.request_id, Answer()).take(output)
        core.scheduler.check_integrity()


def wait_for(is_done: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_done():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_a_text_gets_its_tokens_while_the_programs_of_an_image_are_compiled(gate, make_core, caplog) -> None:
    caplog.set_level("INFO", logger="jaxllm")
    gate.held = {LARGE}
    core, answers = make_core(), dict[str, Answer]()
    core.add_request(large("image"))
    core.add_request(engines.request("text", [5, 6, 7], max_tokens=20))
    run_until(core, answers, lambda: "text" in answers and answers["text"].finish_reason)
    assert len(answers["text"].tokens) == 20 and "image" not in answers
    assert core.stats().num_deferred == core.stats().num_waiting == 1 and not core.scheduler.holds_blocks
    assert f"compiled, while others run: forward 112 images, {LARGE}" in caplog.text
    gate.open.set()
    found = engines.run(core, [large("second")])
    assert core.num_compiled_after_warmup == 0 and core.stats().num_deferred == 0, "no step waited"
    core.check_integrity()
    expected = engines.run(make_core(warmup="lazy"), [large("image")])["image"].tokens
    assert len(expected) == 8 and found["image"].tokens == found["second"].tokens == expected


def test_requests_that_wait_end_as_others_do(gate, make_core) -> None:
    gate.held = {LARGE}
    core, answers = make_core(), dict[str, Answer]()
    core.add_request(large("aborted"))
    core.step()
    core.abort_requests(["aborted"])
    assert core.stats().num_deferred == 0
    core.add_request(replace(large("late"), options=RequestOptions(queue_timeout_seconds=0.05)))
    run_until(core, answers, lambda: "late" in answers)
    assert answers["late"].error_kind is ErrorKind.QUEUE_TIMEOUT
    core.add_request(large("asleep"))
    core.step()
    core.sleep(1)
    run_until(core, answers, lambda: "asleep" in answers)
    assert answers["asleep"].finish_reason is FinishReason.ABORT
    core.wake_up()
    core.add_request(large("waits"))
    core.loop.start_over()
    core.add_request(engines.request("text", [5, 6, 7], max_tokens=4))
    run_until(core, answers, lambda: "text" in answers and answers["text"].finish_reason)
    assert "waits" not in answers and core.stats().num_deferred == 1, "a failure of others does not end its wait"
    gate.open.set()
    assert len(engines.run(core, [])["waits"].tokens) == 8
    core.check_integrity()


def test_a_program_that_cannot_be_compiled_ends_the_requests_that_need_it(gate, make_core) -> None:
    gate.broken = {LARGE}
    core = make_core()
    found = engines.run(core, [large("image"), engines.request("text", [5, 6, 7], max_tokens=4), small("small")])
    image = found.pop("image")
    assert image.finish_reason is FinishReason.ERROR and image.error_kind is ErrorKind.INTERNAL and not image.tokens
    assert image.stop_reason == "a program that the request needs cannot be compiled (encode 64: ValueError); try again later"
    assert {name: answer.finish_reason for name, answer in found.items()} == dict.fromkeys(found, FinishReason.LENGTH)
    gate.broken.clear()
    wait_for(lambda: not core.executor.programs.num_queued)
    assert len(engines.run(core, [large("again")])["again"].tokens) == 8, "the next request has it tried again"
    core.check_integrity()


def test_steps_with_images_are_small_until_the_program_of_large_ones_is_there(gate, make_core) -> None:
    gate.held = {"forward 112 images"}
    core, sizes = make_core(token_buckets=(16, 48, 112)), list[int]()
    schedule = core.scheduler.schedule

    def noted(**options: Any) -> SchedulerOutput:
        plan = schedule(**options)
        sizes.append(plan.num_tokens)
        return plan

    def answers() -> dict[str, list[int]]:
        sizes.clear()
        texts = [engines.request(f"text {i}", list(range(40 + i)), max_tokens=12) for i in range(2)]
        found = engines.run(core, [small("small"), large("large"), *texts], max_steps=100_000)
        return {name: answer.tokens for name, answer in found.items()}

    core.scheduler.schedule = noted
    before = answers()
    assert max(sizes) <= 48 and core.num_compiled_after_warmup == 0
    gate.open.set()
    core.finish_compiling()
    core.reset_prefix_cache()
    assert answers() == before and {len(tokens) for tokens in before.values()} == {8, 12}
    assert max(sizes) > 48, "the limit is lifted"


def test_texts_with_rare_parameters_wait_for_the_programs_that_sample_them(gate, make_core) -> None:
    gate.held = {"sample 4 full", "sample 4 random top", "new_state", "admit"}
    core, answers = make_core(), dict[str, Answer]()
    for params, needed in (
        ({"repetition_penalty": 1.2}, {"sample 4 full", "new_state", "admit"}),
        ({"logprobs": 2}, {"sample 4 random top"}),
        ({"prompt_logprobs": 1}, set()),
    ):
        name = next(iter(params))
        core.add_request(engines.request(name, [1, 2, 3], max_tokens=4, **params))
        core.add_request(engines.request(f"text beside {name}", [5, 6, 7], max_tokens=6))
        run_until(core, answers, lambda text=f"text beside {name}": text in answers and answers[text].finish_reason)
        awaited = {name for found in core.needed_programs._waiting.values() for name in found.awaited}
        assert awaited >= needed and (needed or name in answers)
        if needed:
            assert name not in answers
    gate.open.set()
    answers |= engines.run(core, [])
    assert {len(answer.tokens) for answer in answers.values()} == {4, 6}


def test_where_no_programs_are_compiled_ahead_no_request_waits(gate, make_core) -> None:
    core = make_core(warmup="lazy")
    core.add_request(large("image"))
    assert core.stats().num_deferred == 0
    core.abort_requests(["image"])
