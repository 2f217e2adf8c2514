"""Speech: tiny Whisper models in float32 say plain JAX's tokens, and large ones are as near to float32 as plain XLA.

Clips are shorter than what the model hears at a time, and as long; prompts have text before them or none, and times or none. The large
models have public widths, few layers and random weights in bfloat16: encoder and decoder may be off from float32 by a stated factor of what
plain XLA is off by. See `whole_prompts` and `logits`.
"""

import tempfile
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.engine.core import EngineCore
from jaxllm.media.features import log_mel
from jaxllm.runner.features.audio.step import Hearing
from scripts.gpu_checks import Outcome, kernels_in_use, left_out, logits, whole_prompts
from scripts.gpu_checks.logits import Steps
from scripts.gpu_checks.whole_prompts import Prompt
from scripts.kernels.compiling import first_line
from scripts.measuring import hearing_models
from tests.helpers import whisper_checkpoint
from tests.helpers.whisper_checkpoint import ENGLISH, FIRST_TIMESTAMP, NO_TIMESTAMPS, START, TRANSCRIBE

WIDTHS = {"Whisper large-v3": hearing_models.WHISPER_LARGE_V3, "Whisper small": hearing_models.WHISPER_SMALL}
NUM_LAYERS = 2
STEPS = Steps(prompts=(200, 61, 7, 1, 17), first=(120, 0, 4, 1, 17))
TINY_STEPS = Steps(prompts=(40, 7, 1, 17), first=(20, 0, 1, 17), num_decodes=2)
PREVIOUS = 264
"""Id of the token before text that comes before a clip's."""


def check(*, tiny: bool, deadline: float, share: tuple[int, int] = (0, 1)) -> Iterator[Outcome]:
    """Check the models of a share (index, number of shares); none begins after the deadline (`time.perf_counter`)."""
    index, num_shares = share
    checks = [("Whisper", _check_tokens), *((f"{name}'s widths", partial(_check_widths, name)) for name in WIDTHS)]
    for title, run in checks[: 2 if tiny else None][index::num_shares]:
        if time.perf_counter() > deadline:
            yield left_out(f"speech, {title}")
            continue
        try:
            yield from run(tiny=tiny)
        except Exception as problem:
            traceback.print_exc()
            yield Outcome(f"speech, {title}", False, first_line(problem, limit=1000))


def _check_tokens(*, tiny: bool) -> Iterator[Outcome]:
    with tempfile.TemporaryDirectory() as temporary:
        yield from whole_prompts.check(
            "speech, Whisper",
            whisper_checkpoint.write(Path(temporary, "model")),
            lambda config: (_prompts(count := 6 if tiny else 24, 0), _prompts(count, count)),
            tiny=tiny,
            differing="audio",
            encoded="",
            caches_prefixes=False,
            layouts=whole_prompts.ONE_DEVICE if tiny else whole_prompts.ON_TWO_TOO,
            max_model_len=112,
            num_gpu_blocks_override=8 if tiny else 24,
        )


def _prompts(count: int, first_clip: int) -> list[Prompt]:
    """Clips of a tenth of a second to a whole one, with the same texts before them whichever clips they are."""
    rng, prompts = np.random.default_rng(0), []
    for number in range(count):
        seconds = 1.0 if number % 4 == 0 else float(rng.uniform(0.1, 1.0))
        before = [PREVIOUS, *rng.integers(0, 250, int(rng.integers(1, 60))).tolist()] if number % 3 == 1 else []
        ids = [*before, START, ENGLISH, TRANSCRIBE, FIRST_TIMESTAMP if number % 2 else NO_TIMESTAMPS]
        clip = whisper_checkpoint.clip(first_clip + number, seconds)
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"audio": clip}})
    return prompts


def _check_widths(name: str, *, tiny: bool) -> Iterator[Outcome]:
    """Plain XLA in both types, then the default kernels, then Triton's."""
    steps, title = TINY_STEPS if tiny else STEPS, f"speech, {name}'s widths"
    config = hearing_models.tiny(WIDTHS[name])
    if not tiny:
        config = {**WIDTHS[name], **dict.fromkeys(("encoder_layers", "decoder_layers", "num_hidden_layers"), NUM_LAYERS)}
    engine = partial(logits.run, steps=steps, before=partial(_encoded, num_clips=len(steps.prompts)))
    plain = {"attention_implementation": "xla"}
    kernels: list[dict[str, Any]] = [{"attention_implementation": "triton"}]  # on a CPU interpreted
    if jax.default_backend() != "cpu":
        kernels.insert(0, {})
    with tempfile.TemporaryDirectory() as directory:
        hearing_models.write(Path(directory), config)
        exact, bfloat16 = (engine(directory, dtype=dtype, **plain).logits for dtype in ("float32", "bfloat16"))
        for options in kernels:
            ours = engine(directory, dtype="bfloat16", **options)
            told = f"{title} by {options.get('attention_implementation', 'default')}"
            yield kernels_in_use(told, ours.kernels)
            for part, found in ours.logits.items():
                yield logits.compare(f"{told}, {part}", exact[part], bfloat16[part], found)


def _encoded(core: EngineCore, num_clips: int) -> dict[str, np.ndarray]:
    """Encode a clip for each of the first rows. What the encoder gives: float32 [positions of all clips, width]."""
    runner, audio = core.runner, core.model_config.audio
    hearing = runner.shapes.functions.get(Hearing)
    assert audio is not None and isinstance(hearing, Hearing)
    first = len(runner.shapes.cache.arrays)

    def encoded(params: Any, features_TM: jax.Array) -> jax.Array:
        return hearing.encoded(params, features_TM).astype(jnp.float32)

    program, write = jax.jit(encoded), jax.jit(hearing.encode, donate_argnums=1)
    clips = [log_mel(_clip(number, audio.num_samples), audio) for number in range(num_clips)]
    found = []
    for row, features in enumerate(clips):
        found.append(np.asarray(program(runner.params, features)))
        states = write(runner.params, runner.caches[first:], features, np.array([row], np.int32))
        runner.caches = (*runner.caches[:first], *states)
    return {f"encoder of {num_clips} clips": np.concatenate(found)}


def _clip(number: int, num_samples: int) -> np.ndarray:
    """Every second one fills what the model hears at a time."""
    return whisper_checkpoint.clip(number, (1.0 if number % 2 else 0.3) * num_samples / 16000)
