"""Prompts and chats with images, most of them prepared for Qwen 3 VL, over an engine core without a model."""

import base64
import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.llm import LLM
from jaxllm.llm_engine import check_model
from jaxllm.metrics.metric import Histogram
from jaxllm.models.load_config import load_model_config
from jaxllm.sampling_params import SamplingParams
from tests.helpers.fake_engine_core import FakeEngineCore
from tests.helpers.scripted_core import fake_core
from tests.helpers.vision_checkpoint import FAMILIES, write

IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8))
PAD = "<|vision_start|><|image_pad|><|vision_end|>"
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("qwen3_vl"))


def seeing(directory: Path, **options: Any) -> tuple[LLM, FakeEngineCore]:
    core = fake_core(directory, lambda request: [1], max_model_len=512, **options)
    core.model_config = dataclasses.replace(load_model_config(directory), vocab_size=core.model_config.vocab_size)
    return LLM.from_config(core.config, core=core), core


def test_prompts_and_chats_with_the_same_image_are_the_same(directory: Path) -> None:
    llm, core = seeing(directory)
    png = io.BytesIO()
    IMAGE.save(png, "png")
    for prompt in (
        {"prompt": f"a{PAD}b", "multi_modal_data": {"image": IMAGE}},
        {"prompt": f"a{PAD}b", "multi_modal_data": {"image": [np.asarray(IMAGE)]}},
        {"prompt_token_ids": llm.get_tokenizer().encode(f"a{PAD}b"), "multi_modal_data": {"image": [png.getvalue()]}},
    ):
        llm.generate(prompt, ONE, use_tqdm=False)  # type: ignore[arg-type]
    parts = [{"type": "text", "text": "a"}, {"type": "image_pil", "image_pil": IMAGE}, {"type": "text", "text": "b"}]
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text or '" + PAD + "' }}{% endfor %}{% endfor %}"
    llm.chat([{"role": "user", "content": parts}], ONE, use_tqdm=False, chat_template=template)
    first = core.requests[0]
    assert first.prompt_token_ids.count(core.model_config.vision.image_token_id) == 12  # type: ignore[union-attr]
    assert {tuple(request.prompt_token_ids) for request in core.requests} == {tuple(first.prompt_token_ids)}
    assert {request.items[0].payload for request in core.requests} == {first.items[0].payload}
    (prepared,) = [metric for metric in llm.get_metrics() if metric.name.endswith("mm_preparation_time_seconds")]
    assert isinstance(prepared, Histogram) and prepared.count == 4
    counted = {metric.labels["kind"]: metric.value for metric in llm.get_metrics() if metric.name.endswith("mm_items")}  # type: ignore
    assert counted == {"image": 4, "video": 0}
    assert {(item.position, item.grid) for request in core.requests for item in request.items} == {(2, (1, 3, 4))}


def test_prompts_and_chats_with_the_same_video_are_the_same(directory: Path) -> None:
    llm, core = seeing(directory)
    frames = np.random.default_rng(0).integers(0, 256, (4, 64, 96, 3), np.uint8)
    images = [Image.fromarray(frame) for frame in frames]
    clip = "<|vision_start|><|video_pad|><|vision_end|>"
    for video in (frames, [frames], images, [images], (frames, {"fps": 1}), [(images, {"fps": 1.0})], list(frames)):
        prompt: Any = {"prompt": f"a{clip}b{PAD}", "multi_modal_data": {"video": video, "image": IMAGE}}
        llm.generate(prompt, ONE, use_tqdm=False)
    parts = [
        *({"type": "text", "text": "a"}, {"type": "video", "video": frames}, {"type": "text", "text": "b"}),
        {"type": "image_pil", "image_pil": IMAGE},
    ]
    texts = "{{ p.text or {'video': '" + clip + "', 'image': '" + PAD + "'}[p.type] }}"
    template = "{% for m in messages %}{% for p in m.content %}" + texts + "{% endfor %}{% endfor %}"
    llm.chat([{"role": "user", "content": parts}], ONE, use_tqdm=False, chat_template=template)
    llm.chat([{"role": "user", "content": parts}], ONE, use_tqdm=False, chat_template="{{ messages[0].content }}")
    *same, joined = core.requests
    assert len({tuple(request.prompt_token_ids) for request in same}) == 1
    assert {tuple((item.kind, item.grid) for item in request.items) for request in core.requests} == {
        (("video", (1, 2, 3)), ("video", (1, 2, 3)), ("image", (1, 3, 4)))
    }
    decoded = llm.get_tokenizer().decode([each for each in same[0].prompt_token_ids if each < 256])
    assert decoded == "a<0.5 seconds><2.5 seconds>b"
    assert joined.prompt_token_ids != same[0].prompt_token_ids, "a template of strings has videos before the text"
    prompt = {"prompt": clip * 2, "multi_modal_data": {"video": [images, frames[:2]]}}
    llm.generate(prompt, ONE, use_tqdm=False)
    assert len(core.requests[-1].items) == 3, "two videos"


def test_parts_of_every_type_are_the_same_image(directory: Path) -> None:
    """Parts of vLLM, with type and without, and of transformers; by address and as objects."""
    llm, core = seeing(directory)
    png = io.BytesIO()
    IMAGE.save(png, "png")
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": url},
        {"image_url": {"url": url}},
        {"image_pil": IMAGE},
        {"type": "image_pil", "image_pil": np.asarray(IMAGE)},
        {"type": "image", "image": IMAGE},
        {"type": "image", "image": png.getvalue()},
        {"type": "image", "url": url},
    ]
    llm.chat([[{"role": "user", "content": [part, {"type": "text", "text": "?"}]}] for part in parts], ONE, use_tqdm=False)
    assert len(core.requests) == len(parts)
    assert len({(tuple(request.prompt_token_ids), request.items[0].payload) for request in core.requests}) == 1
    with pytest.raises(InvalidRequestError, match="message 0, part 0 is 'image_embeds'"):
        llm.chat([{"role": "user", "content": [{"type": "image_embeds", "image_embeds": [1.0]}]}], ONE, use_tqdm=False)


def test_the_order_of_images_is_that_of_the_parts(directory: Path) -> None:
    llm, core = seeing(directory)
    wide, tall = IMAGE.crop((0, 0, 128, 64)), IMAGE.crop((0, 0, 64, 96))
    talk = [
        {"role": "user", "content": [{"type": "image_pil", "image_pil": wide}, {"type": "text", "text": "and"}]},
        {"role": "user", "content": [{"type": "image_pil", "image_pil": tall}]},
    ]
    llm.chat(talk, ONE, use_tqdm=False)
    assert [item.grid for item in core.requests[0].items] == [(1, 2, 4), (1, 3, 2)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_placeholder_of_every_family_is_that_of_its_chats(family: str, tmp_path: Path) -> None:
    llm, core = seeing(write(tmp_path, family))
    llm.chat([{"role": "user", "content": [{"type": "image_pil", "image_pil": IMAGE}]}], ONE, use_tqdm=False)
    (text,) = llm.llm_engine.input_processor.media.placeholders(["image"])
    llm.generate({"prompt": text, "multi_modal_data": {"image": IMAGE}}, ONE, use_tqdm=False)
    ((chat,), (plain,)) = (request.items for request in core.requests)
    assert chat.content_hash == plain.content_hash and chat.num_tokens == plain.num_tokens and chat.position > plain.position


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ({"prompt": "no placeholder", "multi_modal_data": {"image": IMAGE}}, "has 0 image placeholder.* and 1 image"),
        ({"prompt": PAD}, "has 1 image placeholder.* and 0 image"),
        ({"prompt": PAD, "multi_modal_data": {"image": b"GIF89a"}}, r"multi_modal_data.image\[0\]"),
        ({"prompt": PAD * 43, "multi_modal_data": {"image": [IMAGE] * 43}}, "prompt has 602 tokens, the model takes 512"),
    ],
)
def test_prompts_whose_images_do_not_fit_are_refused(directory: Path, prompt: Any, told: str) -> None:
    llm, core = seeing(directory)
    with pytest.raises(InvalidRequestError, match=told):
        llm.generate(prompt, ONE, use_tqdm=False)
    assert core.requests == []


@pytest.mark.parametrize("is_chat", [False, True])
def test_images_of_many_prompts_are_prepared_while_others_run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    """No more wait at a time than the engine takes and a few ahead; answers come in the order of the prompts."""
    monkeypatch.setattr("jaxllm.llm.AHEAD", 2)
    monkeypatch.setattr("jaxllm.request_feed.AHEAD", 2)
    llm, core = seeing(directory, max_num_seqs=3)
    images = [IMAGE.crop((0, 0, 128, 32 * height)) for height in (1, 2, 3)] * 5
    most_at_once, core.before_step = [], lambda: most_at_once.append(len(core.running))
    params = SamplingParams(max_tokens=2)
    if is_chat:
        talks = [[{"role": "user", "content": [{"type": "image_pil", "image_pil": image}]}] for image in images]
        outputs = llm.chat([*talks, [{"role": "user", "content": "text"}]], params, use_tqdm=False)
    else:
        prompts: list[Any] = [{"prompt": PAD, "multi_modal_data": {"image": image}} for image in images]
        outputs = llm.generate([*prompts, "text"], params, use_tqdm=False)
    pad = core.model_config.vision.image_token_id  # type: ignore[union-attr]
    counts = [output.prompt_token_ids.count(pad) for output in outputs]
    assert counts == [4, 8, 12] * 5 + [0] and [int(output.request_id) for output in outputs] == list(range(16))
    assert max(most_at_once) <= 3 + 2 and len(most_at_once) > 2, "requests came while others ran"


def test_of_many_prompts_one_whose_image_is_damaged_ends_the_call(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxllm.llm.AHEAD", 2)
    llm, core = seeing(directory)
    good: Any = {"prompt": PAD, "multi_modal_data": {"image": IMAGE}}
    damaged: Any = {"prompt": PAD, "multi_modal_data": {"image": b"GIF89a"}}
    media, tried = llm.llm_engine.input_processor.media, []
    monkeypatch.setattr(media, "submit", lambda prompt, submit=media.submit: tried.append(prompt) or submit(prompt))
    with pytest.raises(
        InvalidRequestError, match=r"prompt 2 of 4 cannot be served, and ended the call: the image at .*image\[0\]"
    ):
        llm.generate([good, good, damaged, good], SamplingParams(max_tokens=99), use_tqdm=False)
    assert not core.running and tried.count(damaged) == 1, "its image is not tried again"
    wrong: Any = {"prompt": PAD, "multi_modal_data": {"picture": IMAGE}}
    core.requests.clear()
    with pytest.raises(InvalidRequestError, match="1 of 4 prompts cannot be served, none was run: prompt 3: .*'picture'"):
        llm.generate([good, good, good, wrong], ONE, use_tqdm=False)
    assert core.requests == [], "what can be checked without images is checked first"


def test_scripts_set_how_images_are_prepared(directory: Path) -> None:
    llm, core = seeing(directory)
    prompt: Any = {"prompt": PAD, "multi_modal_data": {"image": IMAGE}, "mm_processor_kwargs": {"max_pixels": 4096}}
    llm.generate(prompt, ONE, use_tqdm=False)
    assert core.requests[0].items[0].num_tokens <= 4


def test_a_model_without_its_encoder_takes_text_alone(directory: Path) -> None:
    assert load_model_config(directory, language_model_only=True).vision is None
    assert load_model_config(directory).vision is not None


def test_wrong_options_of_images_are_found_before_weights_are_loaded(directory: Path) -> None:
    _, core = seeing(directory)
    wrong = {"mm_processor_kwargs": {"no_such": 1}}
    check_model(core.config.replace(**wrong, language_model_only=True))
    with pytest.raises(ConfigError, match="no_such"):
        check_model(core.config.replace(**wrong))
    with pytest.raises(ConfigError, match="allowed_local_media_path is '/no/such', must be an existing directory"):
        check_model(core.config.replace(allowed_local_media_path="/no/such"))
