"""The data of the demo model that sees: right answers, a test set apart from training, patches, positions and packing."""

import json
import random
import re
from collections import Counter

import numpy as np
import pytest

from jaxllm.media import Media, MediaOptions, payload
from jaxllm.media.processor import make_processor
from jaxllm.model_parts import Vision
from scripts.demo_data import chat_tokenizer, packing
from scripts.demo_data.vision import dialogues, drawing, model_files, questions, rows, scenes, scoring
from scripts.demo_data.vision.dialogues import NO_PICTURE, PICTURE, SKILLS
from scripts.demo_data.vision.model_files import IMAGE_PAD_ID

SHAPE = rows.BatchShape(6, 256, 6, 400)


@pytest.fixture(scope="module")
def tokenizer():
    return model_files.train_tokenizer(num_dialogues=1500)


def asked(kind: str, count: int = 60) -> list[tuple[tuple[scenes.Scene, ...], questions.Question]]:
    rng, found = random.Random(kind), []
    while len(found) < count:
        shown = SKILLS[kind](rng)
        found += [(shown, question) for question in questions.ask(rng, shown) if question.kind == kind]
    return found


def the_thing(things, words: str):
    """The only one that fits the words."""
    fitting = [t for t in things if set(words.lower().split()) - {"the", "one", "shape", "a", "an"} <= {t.colour, t.shape}]
    (thing,) = fitting
    return thing


def test_the_same_seed_makes_the_same_dialogues_and_pictures():
    first, second = (dialogues.seen(random.Random(3)) for _ in range(2))
    assert first == second
    drawn = [scene.draw(random.Random(4)) for scene in (*first.scenes, *second.scenes)]
    assert (drawn[0] == drawn[len(first.scenes)]).all()


def test_pictures_have_sizes_that_need_no_resizing():
    rng = random.Random(0)
    for _ in range(300):
        for scene in dialogues.seen(rng).scenes:
            assert scene.width % scenes.CELL == scene.height % scenes.CELL == 0
            assert scenes.MIN_CELLS <= scenes.num_cells(scene) <= scenes.MAX_CELLS


def test_a_shape_is_drawn_in_its_colour_where_its_scene_says():
    rng = random.Random(0)
    for number in range(100):
        shape = drawing.SHAPES[number % len(drawing.SHAPES)]
        thing = drawing.Thing(shape, ("red", "blue", "green")[number % 3], rng.uniform(60, 100), rng.uniform(60, 100), 40)
        pixels = scenes.Shapes(160, 160, (thing,)).draw(random.Random(number)).astype(float)
        near = np.linalg.norm(pixels - drawing.COLOURS[thing.colour], axis=2) < 70
        where = np.argwhere(near)
        assert near.mean() > 0.01
        assert np.abs(where.mean(axis=0) - (thing.y, thing.x)).max() < 14


def test_shapes_do_not_overlap_and_stay_inside():
    rng = random.Random(0)
    for _ in range(60):
        scene = scenes.shapes(rng, 6)
        for place, one in enumerate(scene.things):
            assert one.radius < one.x < scene.width - one.radius and one.radius < one.y < scene.height - one.radius
            for other in scene.things[:place]:
                assert np.hypot(one.x - other.x, one.y - other.y) > one.radius + other.radius


def test_colours_shapes_and_numbers():
    for (scene,), question in asked("shape"):
        assert question.answer in {thing.shape for thing in scene.things}
    for (scene,), question in asked("colour"):
        assert question.answer in {thing.colour for thing in scene.things}
    for (scene,), question in asked("count"):
        if not any(word in question.text for word in (*drawing.COLOURS, *drawing.SHAPES)):
            assert int(question.answer) == len(scene.things)


def test_existence_is_asked_about_evenly():
    answers = Counter()
    for (scene,), question in asked("exists", 200):
        named = re.search(rf"an? ({'|'.join(drawing.COLOURS)}) ({'|'.join(drawing.SHAPES)})", question.text).groups()
        assert (question.answer == "yes") == (named in {(thing.colour, thing.shape) for thing in scene.things})
        answers[question.answer] += 1
    assert min(answers.values()) > 60


def test_bigger_is_the_one_with_more_area():
    for (scene,), question in asked("bigger"):
        first, second = re.search(
            r"(the [a-z ]+?) or (the [a-z ]+?)(?: (?:bigger|larger|smaller))?[?, ]*$", question.text
        ).groups()
        areas = {words: the_thing(scene.things, words).area for words in (first, second)}
        assert question.answer == (min if "smaller" in question.text else max)(areas, key=areas.get)


def test_places_are_those_of_the_thing():
    for (scene,), question in asked("where"):
        words = re.search(r"\bthe (?!picture|image)(?:[a-z]+ )?(?:[a-z]+)", question.text.replace("of the image", "")).group()
        words = re.sub(r" (in|lie).*", "", words)
        thing = the_thing(scene.things, words)
        if "left" in question.answer:
            assert thing.x < 0.36 * scene.width
        if "bottom" in question.answer:
            assert thing.y > 0.64 * scene.height
        if question.answer == "center":
            assert abs(thing.x / scene.width - 0.5) < 0.08 and abs(thing.y / scene.height - 0.5) < 0.08


def test_json_and_words_list_all_things_from_left_to_right():
    for (scene,), question in asked("json"):
        records = json.loads(question.answer)
        assert [(record["color"], record["shape"]) for record in records] == [(t.colour, t.shape) for t in scene.things]
        assert [thing.x for thing in scene.things] == sorted(thing.x for thing in scene.things)
    for (scene,), question in asked("describe"):
        assert re.findall("|".join(drawing.SHAPES), question.answer) == [thing.shape for thing in scene.things]


def test_sums_are_right_and_texts_short():
    for (scene,), question in asked("sum"):
        written, result = question.answer.split(" = ")
        assert eval(written) == int(result) >= 0 and written == scene.text
        assert scene.shown.replace(" ", "").rstrip("=?") == written.replace(" ", "")
    for (scene,), question in asked("read"):
        assert question.answer == scene.text == scene.shown and 1 <= len(scene.text) <= 6


def test_the_tallest_bar():
    for (scene,), question in asked("tallest"):
        extreme = min if re.search("shortest|lowest|smallest", question.text) else max
        assert scene.heights[scene.colours.index(question.answer)] == extreme(scene.heights)


def test_pairs_are_compared():
    for (first, second), question in asked("same"):
        is_same = (first.things[0].shape, first.things[0].colour) == (second.things[0].shape, second.things[0].colour)
        assert question.answer in (("yes", "the same") if is_same else ("no", "different"))
    for (first, second), question in asked("more"):
        difference = len(first.things) - len(second.things)
        assert question.answer == ("the first" if difference > 0 else "the second" if difference else "both the same")


def test_nothing_held_out_is_trained_on():
    rng = random.Random(0)
    trained = {key for _ in range(1500) for key in dialogues.training_dialogue(rng).dialogue.keys}
    made = [dialogue for dialogue, _ in dialogues.held_out_questions(4)]
    held_out = {key for dialogue in made for key in dialogue.dialogue.keys}
    assert trained and not trained & held_out
    assert Counter(dialogue.dialogue.kind for dialogue in made) == dict.fromkeys((*SKILLS, "none"), 4)
    assert all(bool(dialogue.scenes) == (dialogue.dialogue.kind != "none") for dialogue in made)
    assert {dialogue.dialogue.answer for dialogue in made if not dialogue.scenes} == {NO_PICTURE}


def test_patches_stand_in_merge_order():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    patches, places = rows.to_patches(pixels)
    assert places[:8, :2].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    for patch, (row, column, height, width) in zip(patches, places, strict=True):
        expected = pixels[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].transpose(2, 0, 1)
        assert (patch == expected.reshape(-1)).all() and (height, width) == (4, 6)


def test_the_engine_prepares_pictures_as_they_are_trained_on(tokenizer, tmp_path):
    model_files.write_model_files(tmp_path, model_files.Sizes(), tokenizer)
    vision = Vision("qwen3_vl", IMAGE_PAD_ID, 16, 2, 128, 4, 2, 384, 256, temporal_patch_size=2, position_grid=16)
    processor = make_processor(tmp_path, vision, MediaOptions())
    rng = random.Random(0)
    for width, height in ((128, 128), (96, 192), (320, 320), (512, 192)):
        pixels = scenes.Text(width, height, "7", "red", "7").draw(rng)
        processed = processor.process(Media("image", pixels))
        patches, _ = rows.to_patches(pixels)
        assert processed.grid == (1, height // scenes.CELL, width // scenes.CELL)
        assert (payload.unpack(processed.payload)[1] == patches).all()


def test_positions_of_a_picture_count_rows_and_columns_and_the_text_goes_on_behind_the_largest():
    ids = np.array([7, 7, *[IMAGE_PAD_ID] * 6, 7, *[IMAGE_PAD_ID] * 2, 7, 7])
    time, row, column = rows.mrope_positions(ids, [(2, 3), (2, 1)]).tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9]
    assert row == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9]
    assert column == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8, 9]


def test_a_batch_keeps_pictures_whole_and_each_stands_in_one_dialogue(tokenizer):
    batch = SHAPE.empty()
    maker = rows.BatchMaker(tokenizer, SHAPE, 0)
    filled = maker.fill(batch)
    assert min(filled) > 0.6
    is_pad = (batch.tokens_RT & packing.TOKEN_MASK) == IMAGE_PAD_ID
    assert ((batch.source_RT >= 0) == is_pad).all()
    used = batch.source_RT[is_pad]
    assert len(set(used.tolist())) == len(used) == (batch.segment_VP >= 0).sum() // rows.MERGED
    for row in range(SHAPE.picture_rows):
        for segment in range(batch.segment_VP[row].max() + 1):
            of_one = np.flatnonzero(batch.segment_VP[row] == segment)
            height, width = batch.places_VP4[row, of_one[0], 2:]
            assert (np.diff(of_one) == 1).all() and len(of_one) == height * width
    trained = batch.tokens_RT[(batch.tokens_RT & packing.TRAINED) != 0] & packing.TOKEN_MASK
    assert len(trained) and IMAGE_PAD_ID not in trained and chat_tokenizer.TURN_END_ID in trained
    before = batch.tokens_RT.copy()
    maker.fill(batch)
    assert (before != batch.tokens_RT).any()


def test_the_chat_template_writes_pictures_where_they_stand():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(model_files.CHAT_TEMPLATE)
    for image in ({"type": "image"}, {"type": "image_url", "image_url": {"url": "data:,"}}, {"image": "file"}):
        content = [image, {"type": "text", "text": "How many circles?"}]
        expected = f"<|im_start|>user\n{PICTURE}How many circles?<|im_end|>\n<|im_start|>assistant\n"
        assert template.render(messages=[{"role": "user", "content": content}], add_generation_prompt=True) == expected
    made = dialogues.seen(random.Random(1)).dialogue
    assert template.render(messages=made.messages) == chat_tokenizer.render_dialogue(made)


def test_score_counts_exact_answers_by_skill():
    some = [scoring.Asked("read", "?", (), "A"), scoring.Asked("read", "?", (), "B"), scoring.Asked("sum", "?", (), "C")]
    scores, text = scoring.score(some, ["A\n", "b", "C"])
    assert scores == {"read": (1, 2), "sum": (1, 1)}
    assert "2 of 3 = 66.7 %" in text and "given 'b'" in text
