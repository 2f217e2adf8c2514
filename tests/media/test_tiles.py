"""Families that cut images into tiles: how many, and the tokens that are written around them."""

import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.media.expansion import embedding_runs
from jaxllm.media.families import FAMILIES
from jaxllm.media.families.tiles import with_whole
from jaxllm.media.options import MediaOptions
from jaxllm.media.payload import unpack
from jaxllm.media.processor import make_processor
from jaxllm.media.settings import Settings
from tests.helpers.images import NEWLINES, SETTINGS, TILE_TOKENS, VISIONS, media, picture, processor, write_settings

ID = {token: 500 + i for i, token in enumerate(TILE_TOKENS)}
IMAGE, AROUND, WHOLE = (ID[token] for token in TILE_TOKENS[:3])
CONTEXT, START, END = (ID[token] for token in TILE_TOKENS[3:6])


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    return processor(tmp_path_factory.mktemp("smolvlm"), "idefics3")


@pytest.fixture(scope="module")
def internvl(tmp_path_factory):
    return processor(tmp_path_factory.mktemp("internvl"), "internvl")


def test_smolvlm_says_where_each_tile_lies(smolvlm) -> None:
    wide = smolvlm.process(media(picture(300, 100)))
    tile = [IMAGE] * 4
    rows = [[[AROUND, ID[f"<row_{row}_col_{column}>"], *tile] for column in range(1, 5)] for row in (1, 2)]
    newline = list(smolvlm._family.encode("\n"))
    expected = [*sum(rows[0], []), *newline, *sum(rows[1], []), NEWLINES, AROUND, WHOLE, *tile, AROUND]
    assert list(wide.token_ids) == expected and len(newline) == 1 != NEWLINES
    assert wide.grid == (9, 2, 2) and unpack(wide.payload)[0] == (9, 6, 6)
    assert wide.embedding_runs[:2] == ((2, 4), (8, 4)) and len(wide.embedding_runs) == 9
    ids, (item,) = smolvlm.expand([7, IMAGE, 8], [wide])
    assert ids == [7, *expected, 8] and item.position == 1 and item.num_tokens == len(expected) and item.grid is None
    assert item.num_embeddings == 36
    assert smolvlm.count_tokens(300, 100) == len(expected)


def test_one_tile_is_the_whole_image(tmp_path) -> None:
    for kwargs in ({"do_image_splitting": False}, {"size": {"longest_edge": 86}}):
        alone = processor(tmp_path, "idefics3", mm_processor_kwargs=kwargs).process(media(picture(90, 90)))
        assert list(alone.token_ids) == [AROUND, WHOLE, *[IMAGE] * 4, AROUND] and alone.grid == (1, 2, 2)


def test_internvl_has_a_token_before_and_one_behind_all_tiles(internvl) -> None:
    two, one = (internvl.process(media(picture(*size))) for size in ((120, 60), (50, 50)))
    assert two.token_ids == (START, *[CONTEXT] * 12, END) and two.grid == (3, 2, 2)
    assert one.token_ids == (START, *[CONTEXT] * 4, END) and one.embedding_runs == ((1, 4),)
    ids, items = internvl.expand([CONTEXT, 9, CONTEXT], [two, one])
    assert ids == [*two.token_ids, 9, *one.token_ids] and [item.position for item in items] == [0, 15]


def test_an_expanded_prompt_stays_as_it_is(smolvlm, internvl) -> None:
    for prepare, placeholder in ((smolvlm, IMAGE), (internvl, CONTEXT)):
        images = [prepare.process(media(picture(*size))) for size in ((300, 100), (80, 80))]
        once, items = prepare.expand([1, placeholder, placeholder, 2], images)
        assert prepare.expand(once, images) == (once, items)
        with pytest.raises(InvalidRequestError, match=f"not the {images[0].num_tokens} tokens that stand for image 1"):
            prepare.expand([placeholder] * sum(image.num_embeddings for image in images), images)


def test_an_image_gets_no_more_tiles_than_patches_allow(tmp_path) -> None:
    def make(name, max_patches):
        write_settings(tmp_path, name)
        return FAMILIES[name].of(VISIONS[name], Settings(SETTINGS[name], {}, ()), max_patches, tmp_path)

    for name, of_tile in (("idefics3", 36), ("internvl", 16)):
        for tiles in (1, 2, 3, 7, 12):
            family = make(name, of_tile * tiles + of_tile // 2)
            found = [family.grid(*size)[0] for size in ((90, 90), (400, 30), (30, 400), (300, 200))]
            assert (tiles - 1) // 2 < max(found) <= tiles
        with pytest.raises(
            ConfigError, match=f"mm_max_patches is {of_tile - 1}, must be at least {of_tile}, the patches of each"
        ):
            make(name, of_tile - 1)


def test_lengths_far_above_the_longest_cost_nothing(tmp_path) -> None:
    usual, huge = (
        processor(tmp_path, "idefics3", mm_processor_kwargs={"size": {"longest_edge": longest}}, mm_max_patches=36 * 17)
        for longest in (4096 + 86, 2**31 - 86 + (4096 - 2**31) % 86)
    )
    assert usual.count_tokens(300, 200) == huge.count_tokens(300, 200)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_sides_are_whole_tiles(smolvlm, internvl, width: int, height: int) -> None:
    for prepare in (smolvlm, internvl):
        family = prepare._family
        rows, columns = family.rows_and_columns(width, height)
        assert family.resized(width, height) == (columns * family.side, rows * family.side)
        assert family.grid(width, height)[0] == with_whole(rows * columns) <= 17


def test_files_that_do_not_fit_are_refused(tmp_path) -> None:
    def make(family, **changed):
        write_settings(tmp_path, family, **changed)
        return make_processor(tmp_path, VISIONS[family], MediaOptions())

    with pytest.raises(ConfigError, match="max_image_size is 100, must make 6 patches of 14 pixels"):
        make("idefics3", max_image_size={"longest_edge": 100})
    with pytest.raises(ConfigError, match="do_image_splitting is 1, must be true or false"):
        make("idefics3", do_image_splitting=1)
    with pytest.raises(ConfigError, match="size is .*, must be 56 x 56"):
        make("internvl", size={"height": 448, "width": 448})
    with pytest.raises(ConfigError, match="min_patches is 13, must be at most 12"):
        make("internvl", min_patches=13)
    write_settings(tmp_path, "internvl")
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": []}')
    with pytest.raises(ConfigError, match="has no token <img> and no </img>, which images are written with"):
        make_processor(tmp_path, VISIONS["internvl"], MediaOptions())
    write_settings(tmp_path, "idefics3")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer.json is not a tokenizer"):
        make_processor(tmp_path, VISIONS["idefics3"], MediaOptions())


def test_runs_of_embeddings() -> None:
    assert embedding_runs([5, 5], 5) == ()
    assert embedding_runs([1, 5, 5, 2, 5], 5) == ((1, 2), (4, 1))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(300, 100), (100, 300), (344, 344), (5, 400)])
def test_the_text_is_that_of_transformers(smolvlm, size: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    rows, columns = smolvlm._family.rows_and_columns(*size)
    theirs = SimpleNamespace(
        fake_image_token="<fake_token_around_image>", image_token="<image>", global_image_tag="<global-img>", image_seq_len=4
    )
    text = Idefics3Processor.replace_image_token(theirs, {"rows": [[rows]], "cols": [[columns]]}, 0)
    assert list(smolvlm._family.encode(text)) == smolvlm._family.token_ids(*size)


def test_all_families_with_tiles_are_here() -> None:
    assert {name for name, vision in VISIONS.items() if vision.has_tiles} == {"idefics3", "internvl"} < FAMILIES.keys()
