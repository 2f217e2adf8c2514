"""Prompts with images give the same tokens however the scheduler cuts them into steps."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.core import EngineCore
from jaxllm.media.payload import pack
from jaxllm.request import EngineCoreRequest, PromptItem
from jaxllm.runner import runner
from tests.helpers import engines, peft_files, vision_checkpoint
from tests.helpers.picture_requests import mixed_request

PAD, START, END = 261, 259, 260
"""Ids of placeholders, and of what stands around them."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_checkpoint.write(tmp_path_factory.mktemp("qwen3_vl") / "model")


@pytest.fixture(scope="module")
def programs() -> engines.SharedPrograms:
    return engines.SharedPrograms()


@pytest.fixture
def make_core(directory: Path, programs: engines.SharedPrograms) -> Iterator[Any]:
    small = {"max_num_batched_tokens": 16, "token_buckets": (16, 112), "dtype": "float32", "mm_max_patches": 256}
    with programs.engines({**engines.SMALL, **small, "model": str(directory)}) as make:
        yield make


@cache
def picture(seed: int, rows: int, columns: int) -> PromptItem:
    """Random pixels in so many cells of 32 pixels."""
    grid = (1, 2 * rows, 2 * columns)
    patches = np.random.default_rng(seed).integers(0, 256, (4 * rows * columns, 3 * 16 * 16), dtype=np.uint8)
    name = f"{seed} {rows} {columns}".encode()
    return PromptItem("image", name, 0, rows * columns, pack(grid, patches), grid=(1, rows, columns))


request = partial(mixed_request, (START, PAD, END))


def mixed() -> list[EngineCoreRequest]:
    """Two images with text between; one at the very start; the first image again; text alone."""
    return [
        request("two", 5, picture(1, 3, 4), 4, picture(2, 2, 2), 3),
        request("first", picture(3, 5, 2), 2),
        request("again", 5, picture(1, 3, 4), 1),
        request("text", 9),
    ]


def answers(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    return {name: answer.tokens for name, answer in engines.run(core, requests).items()}


@pytest.mark.slow
def test_chunks_of_prompts_with_images_give_the_tokens_of_whole_prompts(make_core) -> None:
    core = make_core(max_num_batched_tokens=112)
    whole = answers(core, mixed())
    assert {len(tokens) for tokens in whole.values()} == {8}
    others = [
        request("pixels", 5, picture(4, 3, 4), 4, picture(2, 2, 2), 3),
        request("turned", 5, picture(1, 4, 3), 4, picture(2, 2, 2), 3),
    ]
    assert all(tokens != whole["two"] for tokens in answers(core, others).values()), "pixels and grid change what is said"
    for size in (16, 5):
        engines.reschedule(core, max_num_batched_tokens=size)
        assert answers(core, mixed()) == whole
        found = engines.run(core, mixed()[2:3])["again"]
        assert found.tokens == whole["again"] and found.num_cached_tokens == 16, "the cached prefix ends inside the image"


@pytest.mark.slow
def test_all_programs_of_images_may_be_made_at_the_start(make_core) -> None:
    """That "all" makes what is named here: test_no_late_compilation.py."""
    core = make_core()
    made = {*core.runner.shapes.start_keys(), *core.runner.shapes.rare_keys()}
    of_images = {(key.kind, key.size) for key in made if key.kind.startswith("encode") or "images" in key.features}
    assert of_images == {*((kind, size) for kind in ("encode", "encode_video") for size in (256,)), ("forward", 16)}
    answers(core, mixed())
    assert set(core.runner.programs._compiled) <= made


@pytest.mark.slow
def test_preempted_requests_encode_their_images_again_if_they_must(make_core) -> None:
    core = make_core()
    requests = [
        request(f"{seed}", 3 + seed, picture(seed, 3, 4), 4, picture(seed % 3, 2, 2), seed, max_tokens=24)
        for seed in range(1, 7)
    ]
    expected = answers(core, requests)
    engines.reschedule(core, num_blocks=12)
    found = engines.run(core, requests)
    assert sum(answer.num_preemptions for answer in found.values())
    assert {name: answer.tokens for name, answer in found.items()} == expected


@pytest.mark.slow
def test_adapters_and_images_in_the_same_step(make_core, directory, tmp_path) -> None:
    adapter = peft_files.write(tmp_path / "adapter", directory, targets=["q_proj", "down_proj"], strength=0.3)
    core = make_core(enable_lora=True, max_loras=1)
    requests = mixed()
    plain = answers(core, requests)
    number = core.add_adapter("style", str(adapter))
    while (state := core.adapter_state(number)).state == "loading":
        core.step()
    assert state.state == "ready", state.error
    requests[0] = replace(requests[0], options=replace(requests[0].options, adapter="style"))
    found = answers(core, requests)
    assert found["two"] != plain["two"]
    assert {**found, "two": plain["two"]} == plain
    assert any(key.kind == "forward" and key.features == ("adapters", "images") for key in core.runner.programs._compiled)


@pytest.mark.slow
@pytest.mark.parametrize("num_bytes", [1, 1 << 40])
def test_an_engine_may_begin_anew(make_core, monkeypatch, num_bytes) -> None:
    """Whether the slab is zeroed on the device or sent."""
    monkeypatch.setattr(runner, "LARGE_ROW_ARRAY_BYTES", num_bytes)
    core = make_core()
    expected = answers(core, mixed())
    engines.renew(core)
    assert answers(core, mixed()) == expected
    core.sleep(1)
    core.wake_up()
    assert answers(core, mixed()) == expected
