"""Sizes of the programs of a vision encoder, and the parts that large images are encoded in."""

from types import SimpleNamespace

import pytest

from jaxllm.encoder_sizes import DECODE_STEP_PATCHES, EncoderSizes, program_sizes


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
