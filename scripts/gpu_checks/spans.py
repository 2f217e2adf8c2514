"""Attention of Gemma 3 in its own widths, in two parts: the device's kernel over the cache, with logarithms of sums, and later tokens.

Layers with and without a window, random weights in bfloat16, prompts in two steps with spans whose tokens see each other: logits may be off
from float32 by a stated factor of what plain XLA is off by, with each kernel that a Hopper GPU may choose. See `logits`.
"""

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from scripts.gpu_checks import Outcome, kernels_in_use, logits
from scripts.gpu_checks.logits import Steps
from scripts.measuring import seeing_models

TITLE = "attention of Gemma 3"
NUM_LAYERS, PATTERN = 4, 2
"""Every second layer has no window."""
STEPS = Steps(
    prompts=(1500, 61, 700, 1, 17),
    first=(1110, 0, 256, 1, 9),
    spans=((0, 5, 256), (0, 850, 256), (0, 1110, 256), (0, 1400, 64), (1, 40, 21), (2, 0, 256), (2, 300, 256)),
    num_groups=2,
)
TINY_STEPS = Steps(
    prompts=(40, 7, 1, 21),
    spans=((0, 2, 9), (0, 15, 9), (0, 24, 9), (1, 1, 5), (3, 9, 9)),
    num_decodes=2,
    num_groups=2,
)


def check(*, tiny: bool) -> Iterator[Outcome]:
    """Plain XLA in both types, then the default kernels, then Triton's."""
    steps, title = TINY_STEPS if tiny else STEPS, f"images, {TITLE}"
    plain = {"attention_implementation": "xla"}
    kernels: list[dict[str, Any]] = [{"attention_implementation": "triton"}]  # on a CPU interpreted
    if jax.default_backend() != "cpu":
        kernels.insert(0, {})
    with tempfile.TemporaryDirectory() as directory:
        seeing_models.write(Path(directory), _config(tiny=tiny))
        exact, bfloat16 = (logits.run(directory, steps, dtype=dtype, **plain).logits for dtype in ("float32", "bfloat16"))
        for options in kernels:
            ours = logits.run(directory, steps, dtype="bfloat16", **options)
            name = f"{title} by {options.get('attention_implementation', 'default')}"
            yield kernels_in_use(name, ours.kernels)
            for step, found in ours.logits.items():
                yield logits.compare(f"{name}, {step}", exact[step], bfloat16[step], found)


def _config(*, tiny: bool) -> seeing_models.Config:
    """With few layers and tokens, and a small encoder, which is not used."""
    config = copy.deepcopy(seeing_models.GEMMA3_4B)
    config |= {"mm_tokens_per_image": 256, "boi_token_index": 8000, "eoi_token_index": 8001, "image_token_index": 8002}
    config["text_config"] |= {"num_hidden_layers": NUM_LAYERS, "sliding_window_pattern": PATTERN, "vocab_size": 8192}
    config["vision_config"] |= {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    if tiny:
        config["mm_tokens_per_image"] = 64
        config["text_config"] |= {
            "num_hidden_layers": PATTERN,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        config["text_config"] |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}
    return config
