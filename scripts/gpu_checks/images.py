"""Images: encoders with the device's segment attention against plain XLA, and prompts with images through engines.

Encoders have public widths, a few layers and random weights. In bfloat16 the device's kernels may be off from float32 by a stated factor of
what plain XLA is off by: see `logits`. Tiny models in float32 must say the tokens that plain JAX says of whole prompts, whatever the steps.
"""

import contextlib
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

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from jaxllm.layers.patch_indices import Grid, patch_indices
from jaxllm.model_parts import Vision
from jaxllm.runner.features.images.step import Images
from scripts.gpu_checks import Outcome, kernels_in_use, left_out, skip
from scripts.gpu_checks.logits import compare
from scripts.gpu_checks.tensor_parallel_traffic import full_precision
from scripts.kernels.compiling import first_line
from scripts.measuring import seeing_models
from tests.helpers import vision_checkpoint

ENCODERS = {
    "Qwen3-VL": seeing_models.QWEN3_VL_8B,
    "Qwen2.5-VL": seeing_models.QWEN2_5_VL_7B,
    "Pixtral": seeing_models.PIXTRAL_24B,
}
NUM_LAYERS = 4
"""Layers of each encoder; in the one with windows the last layer has none."""
GRIDS: tuple[Grid, ...] = ((1, 68, 120), (1, 2, 2), (1, 26, 30), (1, 64, 4), (1, 16, 16), (1, 34, 62))
"""Grids of the images that are encoded together, in patches."""
TINY_GRIDS: tuple[Grid, ...] = ((1, 4, 6), (1, 2, 2), (1, 10, 4))
FAMILIES = {"Qwen3-VL": "qwen3_vl", "Qwen3-VL MoE": "qwen3_vl_moe", "Qwen2.5-VL": "qwen2_5_vl", "Pixtral": "mistral3"}
"""Names of families in `vision_checkpoint`, which writes random values."""
TIE = 1e-3
"""Difference of logprobs up to which either token may be said."""
Prompt = dict[str, Any]


def check(*, tiny: bool, deadline: float, share: tuple[int, int] = (0, 1)) -> Iterator[Outcome]:
    """Check the encoders and engines of a share (index, number of shares); none begins after the deadline (`time.perf_counter`)."""
    index, num_shares = share
    checks = [
        *((f"encoder of {name}", partial(_check_encoder, name)) for name in list(ENCODERS)[: 1 if tiny else None]),
        *((name, partial(_check_engine, name)) for name in list(FAMILIES)[: 1 if tiny else None]),
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
    config, grids = _shortened(ENCODERS[name]), TINY_GRIDS if tiny else GRIDS
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
    """Together in small steps, with little memory; again, from cached prefixes; alone."""
    on_cpu = jax.default_backend() == "cpu"
    layouts: dict[str, dict[str, Any]] = {"": {"attention_implementation": "triton"} if on_cpu else {}}
    if name == "Qwen3-VL":
        layouts[" on 2 devices"] = {"tensor_parallel_size": 2}
    with tempfile.TemporaryDirectory() as temporary, full_precision():
        directory = vision_checkpoint.write(Path(temporary, "model"), FAMILIES[name])
        with _engine(
            directory, tiny=tiny, max_num_batched_tokens=512, token_buckets=[512], attention_implementation="xla"
        ) as llm:
            vision: Any = llm.llm_engine.core.model_config.vision
            prompts = _prompts(vision, 5 if tiny else 24, seed=0)
            others = [{**prompt, **_other_pixels(prompt)} for prompt in prompts]
            expected, changed = _answers(llm, prompts), _answers(llm, others)
        num_changed = sum(_tokens(one) != _tokens(other) for one, other in zip(expected, changed, strict=True))
        yield Outcome(
            f"images, {name}: pixels change answers",
            num_changed > 0.7 * len(prompts),
            f"{num_changed} of {len(prompts)} requests with other pixels",
        )
        for layout, options in layouts.items():
            title = f"images, {name}{layout}"
            if options.get("tensor_parallel_size", 1) > len(jax.devices()):
                yield skip(title, f"{len(jax.devices())} visible")
                continue
            with _engine(directory, tiny=tiny, max_num_batched_tokens=32, token_buckets=[32], **options) as llm:
                core: Any = llm.llm_engine.core
                yield kernels_in_use(title, core.kernels)
                before = core.stats()
                runs = {"together": _answers(llm, prompts)}
                middle = core.stats()
                runs["again"] = _answers(llm, prompts[::-1])[::-1]  # the latest are cached still
                after = core.stats()
                runs["alone"] = [answer for prompt in prompts[:4] for answer in _answers(llm, [prompt])]
                llm.llm_engine.check_integrity()
            told = {
                "preemptions": after.num_preemptions - before.num_preemptions,
                "tokens from cached prefixes": after.prefix_cache_hits - middle.prefix_cache_hits,
                "uses of encoded images": after.item_cache_hits - before.item_cache_hits,
            }
            yield Outcome(f"{title}: what happened", all(told.values()), ", ".join(f"{n} {what}" for what, n in told.items()))
            for run, answers in runs.items():
                equal = [_tokens(got) == _tokens(want) for got, want in zip(answers, expected, strict=False)]
                ties = sum(not same and _is_tie(got, want) for same, got, want in zip(equal, answers, expected, strict=False))
                detail = f"{sum(equal)} of {len(equal)} requests equal plain JAX of whole prompts, {ties} others after a tie"
                yield Outcome(f"{title}: tokens, {run}", sum(equal) + ties == len(equal), detail)


def _prompts(vision: Vision, count: int, seed: int) -> list[Prompt]:
    """Token ids and pixels of prompts with one to three images; of every third, the first image is that of the one before."""
    rng = np.random.default_rng(seed)
    prompts: list[Prompt] = []
    around = ([259], [260]) if vision.video_token_id is not None else ([], [])
    for number in range(count):
        sides = rng.integers(2, 7, (int(rng.integers(1, 4)), 2)) * vision.patch_size * vision.merge_size
        images = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in sides.tolist()]
        if number % 3 == 2:
            images[0] = prompts[-1]["multi_modal_data"]["image"][0]
        ids = rng.integers(0, 250, int(rng.integers(1, 12))).tolist()
        for _ in images:
            ids += [*around[0], vision.image_token_id, *around[1], *rng.integers(0, 250, int(rng.integers(1, 8))).tolist()]
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": images}})
    return prompts


def _other_pixels(prompt: Prompt) -> Prompt:
    return {"multi_modal_data": {"image": [255 - pixels for pixels in prompt["multi_modal_data"]["image"]]}}


def _answers(llm: LLM, prompts: Sequence[Prompt]) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=2)
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]  # type: ignore[arg-type]


def _tokens(answer: Any) -> list[int]:
    return list(answer.token_ids)


def _is_tie(got: Any, expected: Any) -> bool:
    """Whether the first token that differs is about as likely as the expected one."""
    place = next(i for i, (a, b) in enumerate(zip(got.token_ids, expected.token_ids, strict=True)) if a != b)
    likely = expected.logprobs[place]
    token, other = got.token_ids[place], expected.token_ids[place]
    return token in likely and abs(likely[token].logprob - likely[other].logprob) < TIE


@contextlib.contextmanager
def _engine(directory: Path, *, tiny: bool, **options: Any) -> Iterator[LLM]:
    """In float32, with a cache that is too small for all requests together."""
    rows = 4 if tiny else 16
    llm = LLM(
        str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=rows,
        decode_buckets=[rows],
        max_model_len=256,
        block_size=16,
        num_gpu_blocks_override=17 if tiny else 40,
        mm_max_patches=512,
        warmup="lazy",
        use_progress_bar=False,
        **options,
    )
    try:
        yield llm
    finally:
        llm.shutdown()
