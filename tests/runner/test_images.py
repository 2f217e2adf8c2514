"""The host's part of images: which are encoded together, what programs take, and where tokens find their embeddings."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from flax import nnx

from jaxllm.config import EngineConfig, resolve_platform_defaults
from jaxllm.device_ops import EncodeItem, EncodeParts, UseItem
from jaxllm.encoder_sizes import EncoderSizes
from jaxllm.foreseen import Needs
from jaxllm.kernel_policy import CPU
from jaxllm.layers.build import build_tower
from jaxllm.layers.vision import PatchIndices, VisionTower
from jaxllm.media.payload import pack
from jaxllm.models.load_config import load_model_config
from jaxllm.parallel.ranks import Ranks
from jaxllm.request import PromptItem
from jaxllm.runner import item_embeddings
from jaxllm.runner.batch import BatchBuilder
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.feature_inputs import FeatureInputs
from jaxllm.runner.features import images
from jaxllm.runner.features.images import encoding_bytes, packing
from jaxllm.runner.features.images.ops import ImagesOnHost
from jaxllm.runner.features.images.packing import EncoderInput, together
from jaxllm.runner.features.images.step import Images
from jaxllm.runner.features.rope_delta import RopeDelta
from jaxllm.runner.kernels import Kernels
from jaxllm.runner.programs.forward import Forward
from jaxllm.runner.programs.key import ProgramKey
from jaxllm.runner.programs.kind import Wanted
from jaxllm.runner.rows import Rows
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler_output import NewRequestData, RowStep, SchedulerOutput
from pallas_kernels.span_attention import Later, span_attention
from tests.helpers import pictures, vision_checkpoint
from tests.helpers.slow import slow_except

MAX_PATCHES = 1024
ITEM = PromptItem("image", b"a", 2, 6, grid=(1, 2, 3))
"""Two rows of three cells."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return vision_checkpoint.write(tmp_path_factory.mktemp("model") / "qwen3_vl")


@pytest.fixture(scope="module")
def vision(directory):
    return load_model_config(directory, dtype="float32").vision


def encoder_input(count, grid=(1, 2, 2), rows=(0,)):
    return EncoderInput(grid, np.full((count, 768), count % 251, np.uint8), np.array(rows, np.int32))


def replace_item(**values):
    return msgspec.structs.replace(ITEM, **values)


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ([], []),
        ([4, 1024, 4], [[1024], [4, 4]]),
        ([500, 600, 400, 500], [[600, 400], [500, 500]]),
        ([24], [[24]]),
        ([1000, 28, 900, 100, 20], [[1000, 20], [900, 100], [28]]),
    ],
)
def test_images_are_encoded_in_few_programs(counts, groups):
    found = together([encoder_input(count) for count in counts], 1024)
    assert [[len(each.patches_NC) for each in group] for group in found] == groups


def test_where_all_images_have_one_size_the_only_program_is_made_at_the_start(vision):
    """Programs of Gemma 3 have at least the 64 x 64 patches of an image."""
    vision = replace(vision, family="gemma3", merge_size=4, position_grid=64)
    images = Images(vision, EncoderSizes.of(vision, 16384), "float32", Kernels(), None, False)
    (encode,) = images.programs()
    assert [key.size for key in encode.common(None)] == [4096] and not [*encode.rare(None)]
    assert encode.is_first(None, ProgramKey("encode", 4096))


def test_a_program_takes_patches_their_indices_and_rows_of_the_slab(vision):
    first, second = encoder_input(24, (1, 4, 6), range(64, 70)), encoder_input(4, (1, 2, 2), [7])
    patches_PC, indices = packing.arrays(vision, [first, second], 256, 999, 768)
    assert patches_PC.shape == (256, 768) and (patches_PC[:24] == 24).all() and (patches_PC[24:28] == 4).all()
    assert not patches_PC[28:].any()
    assert indices[-64:].tolist() == [*range(64, 70), 7] + [999] * 57, "padding goes beyond the slab's end"
    found = PatchIndices.unpack(indices[:-64].reshape(PatchIndices.num_rows(vision), 256))
    assert found.segment_P.tolist() == [0] * 24 + [1] * 4 + [-1] * 228
    nothing_PC, indices = packing.arrays(vision, [], 256, 999, 1536)
    assert nothing_PC.shape == (256, 1536) and not nothing_PC.any() and (indices[-64:] == 999).all()


def test_an_image_is_at_most_as_large_as_the_largest_program():
    with pytest.raises(AssertionError, match="an image of 1025 patches, programs encode 1024"):
        together([encoder_input(1025)], 1024)


def test_few_programs_of_images_are_made_at_the_start(vision):
    images = Images(vision, EncoderSizes.of(vision, 16384), "float32", Kernels(), None, True)
    encode, of_videos = images.programs()
    assert [key.size for key in encode.common(None)] == [2048, 1024, 256]
    assert [key.size for key in encode.rare(None)] == [4096, 8192, 16384]
    assert not [*of_videos.common(None)], "those of videos are made for the first video"
    assert [key.size for key in of_videos.rare(None)] == [256, 1024, 2048, 4096, 8192, 16384]
    assert [key.size for key in encode.common(None) if encode.is_first(None, key)] == [1024]
    inputs = FeatureInputs((RopeDelta(), images))
    assert inputs.sets == ((), ("images",)) and inputs.decode_sets == inputs.logits_sets == ((),)
    assert inputs.common(2048) == ("images",) and inputs.common(2049) == ()


@pytest.mark.parametrize(
    ("cells", "patches"),
    [
        ((2040,), {8192}),
        ((64, 64, 64), {256, 1024}),
        ((1024, 1024, 1024), {4096, 8192}),
        ((4096, 2040), {16384, 8192}),
        ((), set()),
    ],
)
def test_a_request_foresees_the_programs_of_its_images(vision, cells, patches):
    """Each image alone, and all of them as far as a step encodes so much; and the mixed step up to the last one."""
    images = Images(vision, EncoderSizes.of(vision, 16384), "float32", Kernels(), None, True)
    items = [replace_item(position=5000 * i, num_tokens=count) for i, count in enumerate(cells)]
    wanted = Wanted.of(Needs(SamplingParams()), full_logprobs=False)
    (encode, of_videos), inputs = images.programs(), FeatureInputs((RopeDelta(), images))
    assert inputs.of_items(items) == (("images",) if cells else ())
    wanted = replace(wanted, items=items, features=inputs.of_items(items), num_tokens=4096)
    keys = [*encode.common(None), *encode.rare(None)]
    assert {key.size for key in keys if encode.is_needed(key, wanted)} == patches
    of_largest = [[size for size in encode.sizes if size >= 4 * max(cells)]] if cells else []
    assert [[key.size for key in keys] for keys in encode.awaited(None, wanted)] == of_largest, "it encodes the others too"
    assert not [*of_videos.awaited(None, wanted)]
    assert not any(of_videos.is_needed(key, wanted) for key in of_videos.rare(None))
    of_frames = replace(wanted, items=[msgspec.structs.replace(item, kind="video") for item in items])
    assert {key.size for key in of_videos.rare(None) if of_videos.is_needed(key, of_frames)} == patches
    assert [[key.size for key in keys] for keys in of_videos.awaited(None, of_frames)] == of_largest
    mixed = [ProgramKey("forward", size, features=names) for size in (2048, 4096, 8192) for names in inputs.sets]
    assert [key for key in mixed if Forward().is_needed(key, wanted)] == [key for key in mixed[3:4] if cells]


def test_a_request_waits_for_all_parts_of_its_images(vision):
    """For each size of its images in parts, and for one program that holds the largest of the others."""
    encode, _ = Images(vision, EncoderSizes.of(vision, 4096, 600), "float32", Kernels(), None, True).programs()
    num_parts = {size: len(encode.keys(size)) for size in encode.sizes}
    assert num_parts == {256: 1, 1024: 2, 2048: 2, 4096: 2}, "at most one for each layer"
    wanted = Wanted.of(Needs(SamplingParams()), full_logprobs=False)
    items = [replace_item(position=5000 * i, num_tokens=count) for i, count in enumerate((60, 1024, 250, 20, 1000))]
    found = [*encode.awaited(None, replace(wanted, items=items))]
    assert found == [[key] for size in (1024, 4096) for key in encode.keys(size)] + [encode.keys(256)]


@pytest.mark.parametrize("num_patches", [256, 1024])
@pytest.mark.slow
def test_encoding_takes_no_more_memory_than_is_planned(vision, num_patches):
    tower = VisionTower(vision, "float32")
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.state(tower))

    def encode(state, patches_PC, packed_KP):
        return nnx.merge(nnx.graphdef(tower), state)(patches_PC, PatchIndices.unpack(packed_KP), attention="xla")

    patches = jax.ShapeDtypeStruct((num_patches, 768), jnp.uint8)
    packed = jax.ShapeDtypeStruct((PatchIndices.num_rows(vision), num_patches), jnp.int32)
    found = jax.jit(encode).lower(state, patches, packed).compile().memory_analysis()
    assert 0 < found.temp_size_in_bytes + found.output_size_in_bytes <= encoding_bytes(vision, num_patches, "float32")


def test_memory_is_planned_for_encoder_slab_and_the_largest_encoding(directory):
    def planned(**options):
        config = EngineConfig.from_options(model=str(directory), max_num_batched_tokens=64, dtype="float32", **options)
        return images.memory_bytes(resolve_platform_defaults(config, on_gpu=False), model_config, None)

    model_config = load_model_config(directory, dtype="float32")
    vision, whole, unprofiled = model_config.vision, planned(), planned(skip_mm_profiling=True)
    assert whole - unprofiled == encoding_bytes(vision, 16384, "float32")
    weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(VisionTower(vision, "float32"))))
    row_bytes = 4 * vision.result_width
    assert unprofiled == weights + (EncoderSizes.of(vision, 16384).num_pages * 64 + 2 * 64) * row_bytes + 16384 * 4 * 32
    without_parts = planned(skip_mm_profiling=True, mm_max_decode_step_patches=0)
    assert unprofiled - without_parts == 16384 * 4 * 32, "the hidden state between parts"
    assert images.memory_bytes(EngineConfig(), replace(model_config, vision=None), None) == 0


@pytest.mark.slow
def test_attention_within_images_takes_no_more_memory_than_is_planned(tmp_path):
    model_config = load_model_config(vision_checkpoint.write(tmp_path, "gemma3"), dtype="float32")
    config = resolve_platform_defaults(EngineConfig.from_options(max_num_batched_tokens=4096), on_gpu=False)
    part = model_config.attentions[0]
    heads = (4096, part.num_kv_heads)
    shapes = ((*heads, part.group_size, part.head_dim), (*heads, part.head_dim), (*heads, part.head_dim))
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    later = Later(jax.ShapeDtypeStruct((4096,), jnp.int32), 255)
    found = jax.jit(partial(span_attention, scale=1.0)).lower(q, k, v, later).compile().memory_analysis()
    assert 0 < found.temp_size_in_bytes + found.output_size_in_bytes <= images.span_bytes(config, model_config, 255)


class Runner:
    """Notes what is encoded; two data-parallel ranks if asked for."""

    def __init__(self, images, num_ranks):
        self.ranks = Ranks(SimpleNamespace(shape={}))
        self.ranks.num = num_ranks
        self.shapes = SimpleNamespace(inputs=FeatureInputs((RopeDelta(), images)))
        self.params, self.put, self.calls = (), lambda arrays: arrays, []
        self.row_arrays = SimpleNamespace(
            of_features={"images": "slab", "images_hidden": "hidden"}, replaced=lambda **arrays: self.row_arrays
        )
        self.missing, self.encoder_totals = (), (0, 0)

    def ready_sizes(self, key, sizes):
        return tuple(size for size in sizes if size not in self.missing)

    def program(self, key):
        def encode(params, *arguments):
            changed = arguments[: 1 + isinstance(arguments[1], str)]
            assert changed == ("slab", "hidden")[: len(changed)]
            self.calls.append((key, *arguments[len(changed) :]))
            return changed

        return encode


def new_host(vision, num_ranks=1, has_rope_sections=True, max_decode_patches=0):
    sizes = EncoderSizes.of(vision, MAX_PATCHES, max_decode_patches)
    images = Images(vision, sizes, "float32", Kernels(), None, has_rope_sections)
    runner = Runner(images, num_ranks)
    config = EngineConfig.from_options(max_num_seqs=4, max_num_batched_tokens=64, decode_buckets=(2,), token_buckets=(16,))
    buckets = Buckets.choose(resolve_platform_defaults(config, on_gpu=False), CPU)
    builder = BatchBuilder(Rows(4, inputs=runner.shapes.inputs), buckets, block_size=16, max_blocks=8)
    return ImagesOnHost(runner, images), runner, builder


def step(builder, start, count, *, is_new=False):
    data = NewRequestData("a", [5] * 12, 12, SamplingParams(temperature=0.0), (0,), [1], start, start, items=(ITEM,))
    return builder.build(SchedulerOutput([data] if is_new else [], [RowStep("a", start, count, 0, [])], count, [], []))


def test_tokens_of_a_step_find_their_embeddings_and_positions(vision):
    host, runner, builder = new_host(vision)
    host.run(UseItem(0, "a", 2, [9]))
    batch = step(builder, 0, 4, is_new=True)
    assert batch.features == ("images",) and batch.layout.num_inputs == 4
    host.before_step([batch])
    inputs_IT = runner.shapes.inputs.token_inputs_of(batch, "images")
    slab_row = 9 * 64 + 1
    assert inputs_IT[0, :5].tolist() == [0, 0, slab_row, slab_row + 1, 0]
    # The image takes six indices and three positions: text behind it is three positions back.
    assert batch.layout.views(batch.buffer).columns_RC[0, runner.shapes.inputs.columns["rope_delta"]].tolist() == [-3]
    assert inputs_IT[1:, :5].tolist() == [[3, 3, 3, 2, 0], [3, 3, 3, 2, 0], [3, 3, 3, 3, 0]]
    host.run(UseItem(0, "a", 2, [4]))
    batch = step(builder, 4, 6)
    host.before_step([batch])
    inputs_IT = runner.shapes.inputs.token_inputs_of(batch, "images")
    assert inputs_IT[0, :7].tolist() == [4 * 64 + 1 + i for i in (2, 3, 4, 5)] + [0] * 3
    positions_3T = np.arange(4, 10) - 3 + inputs_IT[1:, :6]
    assert positions_3T.tolist() == [[2, 2, 2, 2, 5, 6], [2, 3, 3, 3, 5, 6], [4, 2, 3, 4, 5, 6]]
    assert not runner.calls, "nothing was to be encoded"


def test_tokens_that_see_each_other_say_how_many_follow(vision):
    """The second step begins behind a cached prefix that ends inside of the image."""
    host, runner, builder = new_host(replace(vision, attends_within=True), has_rope_sections=False)
    for start, count, expected in ((0, 10, [0, 0, 5, 4, 3, 2, 1, 0, 0, 0]), (4, 5, [3, 2, 1, 0, 0])):
        host.run(UseItem(0, "a", 2, [9]))
        batch = step(builder, start, count, is_new=start == 0)
        host.before_step([batch])
        inputs_IT = runner.shapes.inputs.token_inputs_of(batch, "images")
        assert len(inputs_IT) == 2 and inputs_IT[item_embeddings.SLAB_ROW, 6 - start] == 9 * 64 + 5
        assert inputs_IT[packing.NUM_LATER].tolist() == expected + [0] * (16 - count)
    host.run(UseItem(0, "a", 2, [9]))
    with pytest.raises(AssertionError, match="the step cuts an image"):
        host.before_step([step(builder, 4, 3)])


def test_behind_the_last_image_a_step_does_without(vision):
    _, _, builder = new_host(vision)
    step(builder, 0, 8, is_new=True)
    assert step(builder, 8, 3).features == ()
    batch = step(builder, 11, 1)
    assert batch.features == () and batch.is_decode
    assert step(builder, 7, 1).features == ("images",), "the last token of an image alone"


def test_a_step_that_uses_an_image_nobody_placed_is_an_error(vision):
    host, _, builder = new_host(vision)
    with pytest.raises(KeyError, match="'a', 2"):
        host.before_step([step(builder, 0, 4, is_new=True)])


def payload(rows, columns):
    return pack((1, rows, columns), np.full((rows * columns, 768), rows, np.uint8))


def test_the_images_of_a_plan_are_encoded_together_before_its_step(vision):
    host, runner, _ = new_host(vision)
    for rows, page in ((4, 2), (6, 0)):
        host.run(EncodeItem(0, payload(rows, 4), [page]))
    assert not runner.calls
    host.before_step([])
    ((key, patches_PC, indices),) = runner.calls
    assert key.size == 256 and patches_PC[:40, 0].tolist() == [6] * 24 + [4] * 16
    assert indices[-64:-54].tolist() == [0, 1, 2, 3, 4, 5, 128, 129, 130, 131], "the larger one first, each in its page"
    host.before_step([])
    assert len(runner.calls) == 1, "once"
    host.run(EncodeItem(0, payload(4, 4), [2]))
    host.replace_lost()
    host.before_step([])
    assert len(runner.calls) == 1, "what waits is lost with the slab"


def test_images_are_encoded_by_the_programs_that_are_there(vision):
    """Apart, if no program is there that encodes them together, and by a larger one than they need."""
    host, runner, _ = new_host(vision)
    runner.missing = (1024,)
    for page in range(2):
        host.run(EncodeItem(0, payload(12, 16), [page]))
    host.before_step([])
    assert [key.size for key, *_ in runner.calls] == [256, 256]
    runner.missing = (256,)
    host.run(EncodeItem(0, payload(4, 4), [2]))
    host.before_step([])
    runner.missing = (1024,)
    host.run(EncodeItem(0, payload(32, 32), [*range(4)]))
    host.before_step([])
    assert [key.size for key, *_ in runner.calls[2:]] == [1024, 1024], "if none is there, a step makes what it needs"


def test_ranks_encode_at_the_same_time_each_its_own(vision):
    host, runner, _ = new_host(vision, num_ranks=2)
    host.run(EncodeItem(1, payload(32, 32), [*range(4)]))
    host.run(EncodeItem(0, payload(2, 2), [5]))
    host.run(EncodeItem(1, payload(4, 2), [6]))
    host.before_step([])
    (key, patches_PC, indices), (second_key, second_PC, second) = runner.calls
    assert (key.size, second_key.size) == (1024, 256) and len(patches_PC) == 2048 and len(second_PC) == 512
    assert patches_PC[:5, 0].tolist() == [2, 2, 2, 2, 0] and (patches_PC[1024:, 0] == 32).all()
    assert not second_PC[:256].any() and second_PC[256:265, 0].tolist() == [4] * 8 + [0]
    num_slab_rows, of_first = EncoderSizes.of(vision, MAX_PATCHES).num_pages * 64, len(indices) // 2
    assert indices[of_first - 256 : of_first - 254].tolist() == [320, num_slab_rows]
    assert (second[: len(second) // 2][-64:] == num_slab_rows).all(), "a rank without images writes nothing"


ALIKE = ("internvl_large", "qwen3_vl_moe", "smolvlm")
"""Encoders that are cut as internvl's, qwen3_vl's and idefics3's."""


@pytest.mark.parametrize(
    ("name", "variant"),
    slow_except([("qwen3_vl", None)], [("qwen3_vl", "deep"), *((name, None) for name in pictures.NAMES if name not in ALIKE)]),
)
@pytest.mark.slow
def test_parts_leave_what_the_whole_program_leaves(tmp_path, name, variant):
    """With a picture whose pages lie apart, in parts of one layer; a program that runs on nothing meanwhile changes nothing."""
    directory = tmp_path / "model"
    if variant is None:
        pictures.write(name, directory)
    else:
        vision_checkpoint.write(directory, name, variant=variant)
    config, _, tower = pictures.load(directory)
    vision, graph = config.vision, nnx.graphdef(build_tower(config))
    sizes = EncoderSizes.of(vision, vision.position_grid**2 if vision.family == "gemma3" else 256, 1)
    images = Images(vision, sizes, "float32", Kernels(), lambda params: nnx.merge(graph, params), config.has_rope_sections)
    ((seed, height, width),) = pictures.sizes(vision, [(3, 2)])
    grid, patches_NC = pictures.patches(pictures.picture(seed, height, width), vision)
    rows = np.arange(len(patches_NC) // vision.merge_size**2, dtype=np.int32) * 2 + 1
    slab = jax.random.normal(jax.random.key(0), images.slab_shape)
    for encode in images.programs()[: None if variant else 1]:
        given = EncoderInput(grid, np.tile(patches_NC, (1, encode.frames)), rows)
        keys = encode.keys(sizes.program_size(len(patches_NC)))
        assert len(keys) == vision.num_layers
        (expected,) = jax.jit(images.encode)(tower, slab, *encode.arrays(keys[0], [given]))
        assert np.flatnonzero((expected != slab).all(axis=1)).tolist() == rows.tolist()
        found, hidden = slab, jnp.zeros(images.row_arrays(None)["images_hidden"].shape)
        for key in keys:
            part = jax.jit(partial(images.encode_part, key.size, images.layers_of(key.size, key.part)))
            found, hidden = part(tower, found, hidden, *encode.arrays(key, [given]))
            same, kept = part(tower, found, hidden, *encode.arrays(key))
            assert (same == found).all() and (kept == hidden).all()
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_images_above_the_budget_are_encoded_in_parts_of_their_own(vision):
    """One rank begins a large image and encodes a small one, and then goes on with the large one while the other begins its own."""
    host, runner, _ = new_host(vision, num_ranks=2, max_decode_patches=600)
    parts = [ProgramKey("encode", 1024, part=part) for part in range(2)]
    host.run(EncodeItem(1, payload(32, 32), [*range(4)], 1))
    host.run(EncodeItem(1, payload(4, 2), [6]))
    host.before_step([])
    (large, patches_PC, indices), (small, _, _) = runner.calls
    assert (large, small) == (parts[0], ProgramKey("encode", 256))
    assert not patches_PC[:1024].any() and (patches_PC[1024:, 0] == 32).all()
    host.run(EncodeParts(1, 1))
    host.run(EncodeItem(0, payload(64, 16), [*range(4, 8)], 2))
    host.before_step(())
    (begin, begun_PC, _), (end, of_one), (last, of_other) = runner.calls[2:]
    assert [begin, end, last] == [parts[0], parts[1], parts[1]]
    assert (begun_PC[:1024, 0] == 64).all() and not begun_PC[1024:].any()
    half = len(indices) // 2
    assert (of_one[half:] == indices[half:]).all() and (of_one[:1024] == -1).all(), "the same as with the first part"
    assert (of_other[half:] == indices[:half]).all() and (of_other[:1024] >= 0).all()
    host.run(EncodeItem(0, payload(32, 32), [*range(4)], 1))
    host.replace_lost()
    host.before_step(())
    assert len(runner.calls) == 5
    with pytest.raises(AssertionError, match="no image has so many parts left"):
        host.run(EncodeParts(0, 1))
