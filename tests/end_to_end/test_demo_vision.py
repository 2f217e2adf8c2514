"""The demo model that sees, as users meet it: the README's command, held-out questions, an image asked about several times."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from jaxllm.hub import resolve_model
from scripts.demo_data.vision import scoring

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm():
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512}
    llm = LLM(model="demo_vision", dtype="float32", **sizes, decode_buckets=(16,), token_buckets=(512,))
    yield llm
    llm.shutdown()


def test_it_has_at_most_12_megabytes():
    directory = resolve_model("demo_vision")
    assert sum(path.stat().st_size for path in directory.iterdir()) < 12e6
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["Qwen3VLForConditionalGeneration"]


@pytest.mark.slow
def test_the_command_of_the_readme(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    pattern = r"^jaxllm (generate -m demo_vision .*?) +# (.*)$"
    [(command, answer)] = re.findall(pattern, (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    main(shlex.split(command))
    assert capsys.readouterr().out.strip() == answer


@pytest.mark.slow
def test_held_out_questions(llm):
    questions = scoring.held_out(2)
    prompts = [{"prompt": asked.prompt, "multi_modal_data": {"image": list(asked.images)}} for asked in questions]
    params = SamplingParams(temperature=0, max_tokens=scoring.MAX_ANSWER_TOKENS)
    answers = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    scores, report = scoring.score(questions, answers)
    shares = {skill: right / count for skill, (right, count) in scores.items()}
    assert shares.pop("read") >= 0.6 and min(shares.values()) >= 0.85, report


@pytest.mark.slow
def test_the_same_image_is_encoded_once(llm):
    core = llm.llm_engine.core
    before = core.stats()
    image = np.zeros((160, 192, 3), np.uint8)
    prompt = {
        "prompt": "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n"
    }
    for _ in range(3):
        llm.generate([{**prompt, "multi_modal_data": {"image": image}}] * 2, SamplingParams(max_tokens=2), use_tqdm=False)
    after = core.stats()
    assert after.num_encoded_patches - before.num_encoded_patches == (160 // 16) * (192 // 16)
    assert after.num_computed_patches - before.num_computed_patches == 256, "the smallest program"
    assert after.num_encoder_runs - before.num_encoder_runs == 1


@pytest.mark.torch
def test_transformers_writes_the_same(llm):
    torch = pytest.importorskip("torch")
    from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration

    from jaxllm.media import Media, MediaOptions, load_processor
    from jaxllm.media.payload import unpack

    directory = resolve_model("demo_vision")
    model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    asked = next(each for each in scoring.held_out(1) if each.skill == "describe")
    prompt = {"prompt": asked.prompt, "multi_modal_data": {"image": list(asked.images)}}
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    processor = load_processor(directory, llm.llm_engine.core.model_config, MediaOptions())
    assert processor is not None
    grid, patches = unpack(processor.process(Media("image", asked.images[0])).payload)
    pixels = torch.tensor((patches.astype(np.float32) / 255 - 0.5) / 0.5).reshape(len(patches), 3, 1, 256)
    ids = torch.tensor([output.prompt_token_ids])
    generated = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=pixels.repeat(1, 1, 2, 1).reshape(len(patches), -1),
        image_grid_thw=torch.tensor([grid]),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        max_new_tokens=24,
        do_sample=False,
    )
    text = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
    assert text == output.outputs[0].text == asked.answer
