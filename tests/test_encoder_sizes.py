"""Sizes of the programs of encoders, and the parts that large images are encoded in."""

from types import SimpleNamespace

import pytest

from jaxllm.encoder_sizes import DECODE_STEP_PATCHES, MAX_STEP_CLIPS, EncoderSizes, program_sizes
from jaxllm.model_parts import MLP, Audio, AudioTokens, MergerLinear


def test_sizes_of_programs_end_at_the_most_patches_of_an_image():
    vision = SimpleNamespace(family="qwen3_vl", merge_size=2, has_tiles=False)
    assert program_sizes(vision, 16384) == (256, 1024, 2048, 4096, 8192, 16384)
    assert program_sizes(vision, 5000) == (256, 1024, 2048, 4096, 5120)
    assert program_sizes(vision, 256) == program_sizes(vision, 100) == (256,)


@pytest.mark.parametrize(
    ("grid", "merge", "sizes"),
    [
        (32, 2, (1024, 2048, 4096, 8192, 16384)),
        (27, 3, (729, 1458, 2187, 4374, 8748, 16767)),
        (4, 2, (256, 1024, 2048, 4096, 8192, 16384)),
    ],
)
def test_programs_encode_whole_tiles(grid, merge, sizes):
    vision = SimpleNamespace(merge_size=merge, position_grid=grid, has_tiles=True)
    assert program_sizes(vision, 16384) == sizes


def sizes(max_decode_patches: int = DECODE_STEP_PATCHES, num_layers: int = 27, **vision: object) -> EncoderSizes:
    vision = {"family": "qwen3_vl", "merge_size": 2, "has_tiles": False, "position_grid": 48, **vision}
    return EncoderSizes.of(SimpleNamespace(num_layers=num_layers, **vision), 16384, max_decode_patches)


def test_parts_of_all_sizes_take_about_as_long() -> None:
    """On an H200 the encoder of Qwen3-VL-8B takes 14 ms for 4096 patches, 114 for 16384."""
    found = sizes()
    assert found.whole_programs == (256, 1024, 2048)
    counts = (1, 2048, 2049, 4096, 8160, 16384)
    assert [found.num_parts(count) for count in counts] == [1, 1, 2, 2, 6, 16]
    assert [found.part_cost(count) for count in counts] == [1, 2560, 3072, 3072, 2731, 3072]


def test_patches_of_a_tile_attend_to_those_of_the_tile_alone() -> None:
    found = sizes(has_tiles=True, position_grid=32)
    assert [found.num_parts(count) for count in (2048, 4096, 16384)] == [1, 2, 6]


def test_a_part_has_a_layer_and_without_a_budget_there_are_none() -> None:
    assert sizes(num_layers=4).num_parts(16384) == 4 and sizes(num_layers=4).part_cost(16384) == 12288
    without = sizes(max_decode_patches=0)
    assert without.whole_programs == without.programs and without.num_parts(16384) == 1


def test_a_step_encodes_a_few_of_the_longest_clips_or_more_shorter_ones() -> None:
    tokens = AudioTokens(9, "<|audio|>", "projector.", (MergerLinear("projector.linear", 64),), num_averaged=2)
    audio = Audio(128, 1500, 1280, 32, 20, MLP(5120), tokens=tokens)
    sizes = EncoderSizes.of_audio(audio)
    assert audio.sizes == (376, 750, 1500)
    assert sizes.max_item_embeddings == 750 and sizes.num_patches(750) == 1500
    assert sizes.max_step_patches // sizes.num_patches(750) == MAX_STEP_CLIPS
    assert sizes.num_patches(1) == sizes.num_patches(188) == 376, "as its program encodes"
    assert sizes.num_pages * sizes.page_embeddings >= 2 * MAX_STEP_CLIPS * 750
