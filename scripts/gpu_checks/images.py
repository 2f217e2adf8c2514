"""Images and videos: encoders with the device's segment attention against plain XLA, and prompts with items through engines.

Encoders have public widths, a few layers and random weights. In bfloat16 the device's kernels may be off from float32 by a stated factor of
what plain XLA is off by: see `logits`. Tiny models in float32 must say the tokens that plain JAX says of whole prompts, whatever the steps:
see `whole_prompts`. `spans` has the attention of Gemma 3, whose tokens of an image see each other, in its own widths.
"""

import copy
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.layers.patch_indices import Grid, patch_indices
from jaxllm.model_parts import Vision
from jaxllm.runner.features.images.step import Images
from scripts.gpu_checks import Outcome, kernels_in_use, left_out, spans, whole_prompts
from scripts.gpu_checks.logits import compare
from scripts.gpu_checks.whole_prompts import Prompt
from scripts.kernels.compiling import first_line
from scripts.measuring import seeing_models
from tests.helpers import vision_checkpoint

ENCODERS = {
    "Qwen3-VL": seeing_models.QWEN3_VL_8B,
    "Qwen2.5-VL": seeing_models.QWEN2_5_VL_7B,
    "Pixtral": seeing_models.PIXTRAL_24B,
    "Gemma 3": seeing_models.GEMMA3_4B,
}
NUM_LAYERS = 4
"""Layers of each encoder; in the one with windows the last layer has none."""
GRIDS: tuple[Grid, ...] = ((1, 68, 120), (1, 2, 2), (1, 26, 30), (1, 64, 4), (1, 16, 16), (1, 34, 62))
"""Grids of the images that are encoded together, in patches."""
TINY_GRIDS: tuple[Grid, ...] = ((1, 4, 6), (1, 2, 2), (1, 10, 4))
SQUARES: tuple[Grid, ...] = ((1, 64, 64),) * 2
"""Grids of the images of an encoder that takes one size."""
FAMILIES = {
    "Qwen3-VL": "qwen3_vl",
    "Gemma 3": "gemma3",
    "SmolVLM": "smolvlm",
    "Qwen3-VL with videos": "qwen3_vl",
    "Qwen3-VL MoE": "qwen3_vl_moe",
    "Qwen2.5-VL": "qwen2_5_vl",
    "Pixtral": "mistral3",
    "InternVL": "internvl",
}
"""Names of families in `vision_checkpoint`, which writes random values."""
WITH_VIDEOS = ("Qwen3-VL with videos",)
IN_PARTS = 132
"""Patches of encoders per step that decodes: half of the smallest program, so that images and videos of WITH_VIDEOS come in parts."""
LAYOUTS = {"Qwen3-VL": whole_prompts.ON_FOUR_TOO, "Gemma 3": whole_prompts.ON_TWO_TOO}
"""Layouts of families that also run on several devices."""
NUM_BLOCKS, TINY_BLOCKS = 40, 17
OF_GROUPS = 50
"""Blocks of a model whose groups of layers share them: few enough to preempt, enough for cached prefixes."""
TINY_FAMILIES = ("Qwen3-VL with videos",)
"""For a machine without a GPU."""


def check(*, tiny: bool, deadline: float, share: tuple[int, int] = (0, 1)) -> Iterator[Outcome]:
    """Check the encoders and engines of a share (index, number of shares); none begins after the deadline (`time.perf_counter`)."""
    index, num_shares = share
    checks = [
        *((f"encoder of {name}", partial(_check_encoder, name)) for name in list(ENCODERS)[: 1 if tiny else None]),
        (spans.TITLE, spans.check),
        *((name, partial(_check_engine, name)) for name in (TINY_FAMILIES if tiny else FAMILIES)),
    ]
    for title, run in checks[index::num_shares]:
        if time.perf_counter() > deadline:
            yield left_out(f"images, {title}")
            continue
        try:
            yield from run(tiny=tiny)
        except Exception as problem:
            traceback.print_exc()
            yield Outcome(f"images, {title}", False, first_line(problem, limit=1000))


def _check_encoder(name: str, *, tiny: bool) -> Iterator[Outcome]:
    config = _shortened(ENCODERS[name])
    grids = TINY_GRIDS if tiny else SQUARES if name == "Gemma 3" else GRIDS
    if tiny:
        config = seeing_models.tiny(config)
    kernels = {} if jax.default_backend() != "cpu" else {"attention_implementation": "triton"}  # interpreted
    found = []
    with tempfile.TemporaryDirectory() as directory:
        seeing_models.write(Path(directory), config)
        for options in (
            {"dtype": "float32", "attention_implementation": "xla"},
            {"dtype": "bfloat16", "attention_implementation": "xla"},
            {"dtype": "bfloat16", **kernels},
        ):
            core = _core(directory, **options)
            try:
                reports = {"segment_attention": core.kernels["segment_attention"]}
                found.append(_encoded(core, grids))
            finally:
                core.shutdown()
    title, total = f"images, encoder of {name}", sum(rows * columns for _, rows, columns in grids)
    yield kernels_in_use(title, reports)
    yield compare(f"{title}, {_num_layers(config)} layers, {len(grids)} images of {total} patches", *found)


def _shortened(config: seeing_models.Config) -> seeing_models.Config:
    """With few layers, and a small text model behind the encoder."""
    config = copy.deepcopy(config)
    vision, text = config["vision_config"], config.get("text_config", config)
    text |= {
        "vocab_size": 320,
        "hidden_size": 512,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    for number, key in enumerate(sorted(key for key in config if key.endswith(("token_id", "token_index")))):
        config[key] = 300 + number
    vision |= {key: NUM_LAYERS for key in ("depth", "num_hidden_layers") if key in vision}
    vision |= {"out_hidden_size": 512} if "out_hidden_size" in vision else {}
    vision |= {"deepstack_visual_indexes": [1]} if "deepstack_visual_indexes" in vision else {}
    vision |= {"fullatt_block_indexes": [NUM_LAYERS - 1]} if "fullatt_block_indexes" in vision else {}
    return config


def _num_layers(config: seeing_models.Config) -> int:
    vision = config["vision_config"]
    return int(vision.get("depth") or vision["num_hidden_layers"])


def _core(directory: str, **options: Any) -> EngineCore:
    return EngineCore(
        EngineConfig.from_options(
            model=directory,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=512,
            num_gpu_blocks_override=64,
            warmup="lazy",
            use_progress_bar=False,
            **options,
        )
    )


def _encoded(core: EngineCore, grids: Sequence[Grid]) -> np.ndarray:
    """Embeddings of random pixels, all images encoded together: float32 [embeddings, values]."""
    runner, vision = core.runner, core.model_config.vision
    images = runner.shapes.functions.get(Images)
    assert vision is not None and isinstance(images, Images)
    total = sum(rows * columns for _, rows, columns in grids)
    size, num_results = -(-total // 256) * 256, total // vision.merge_size**2
    patches_PC = np.random.default_rng(0).integers(0, 256, (size, 3 * vision.patch_size**2), dtype=np.uint8)
    rows = np.arange(size // vision.merge_size**2, dtype=np.int32)
    indices = np.concatenate([patch_indices(vision, grids, size).pack().reshape(-1), rows])
    slab = jnp.zeros((len(rows), vision.result_width), core.model_config.dtype)
    # Equal weights in all types. A cast there and back would be taken out by the compiler.
    rounded = jax.jit(lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7))
    (found,) = jax.jit(images.encode)(tuple(map(rounded, runner.params)), slab, patches_PC, indices)
    return np.asarray(found.astype(jnp.float32))[:num_results]


def _check_engine(name: str, *, tiny: bool) -> Iterator[Outcome]:
    def made(config: Any) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
        prompts = _prompts(config.vision, 5 if tiny else 24, seed=0, videos=name in WITH_VIDEOS)
        return prompts, [{**prompt, **_other_pixels(prompt)} for prompt in prompts]

    sizes = {"max_model_len": 256, "num_gpu_blocks_override": TINY_BLOCKS if tiny else NUM_BLOCKS}
    if name == "Gemma 3":
        sizes = {"max_model_len": 128, "num_gpu_blocks_override": OF_GROUPS}
    if name in WITH_VIDEOS:
        sizes["mm_max_decode_step_patches"] = IN_PARTS
    with tempfile.TemporaryDirectory() as temporary:
        yield from whole_prompts.check(
            f"images, {name}",
            vision_checkpoint.write(Path(temporary, "model"), FAMILIES[name]),
            made,
            tiny=tiny,
            differing="pixels",
            encoded="encoded images",
            caches_prefixes=True,
            layouts=whole_prompts.ONE_DEVICE if tiny else LAYOUTS.get(name, whole_prompts.ONE_DEVICE),
            mm_max_patches=512,
            **sizes,
        )


def _prompts(vision: Vision, count: int, seed: int, *, videos: bool) -> list[Prompt]:
    """Token ids and pixels of prompts with one to three images; of every third, the first image is that of the one before.

    videos: a video of two to six frames is before, between or behind the images, which then are two at most."""
    rng = np.random.default_rng(seed)
    prompts: list[Prompt] = []
    side, around = vision.patch_size * vision.merge_size, ([259], [260]) if vision.video_token_id is not None else ([], [])

    def pixels(*frames: int) -> np.ndarray:
        height, width = (rng.integers(2, 4 if frames else 7, 2) * side).tolist()
        return rng.integers(0, 256, (*frames, height, width, 3), dtype=np.uint8)

    for number in range(count):
        found = {"image": [pixels() for _ in range(rng.integers(1, 3 if videos else 4))]}
        kinds = ["image"] * len(found["image"])
        if videos:
            found["video"] = [pixels(int(rng.integers(2, 7)))]
            kinds.insert(int(rng.integers(len(kinds) + 1)), "video")
        if number % 3 == 2:
            for kind, items in found.items():
                items[0] = prompts[-1]["multi_modal_data"][kind][0]
        ids = rng.integers(0, 250, int(rng.integers(1, 12))).tolist()
        for kind in kinds:
            placeholder, num_places = vision.image_token_id, 1
            if kind == "video":
                assert vision.video_token_id is not None
                placeholder = vision.video_token_id
                num_places = -(-len(found["video"][0]) // vision.temporal_patch_size)
            for _ in range(num_places):
                ids += [*around[0], placeholder, *around[1], *rng.integers(0, 250, int(rng.integers(1, 8))).tolist()]
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": found})
    return prompts


def _other_pixels(prompt: Prompt) -> Prompt:
    return {
        "multi_modal_data": {kind: [255 - pixels for pixels in items] for kind, items in prompt["multi_modal_data"].items()}
    }
