"""Trains the demo model that sees, a small Qwen3-VL: tokenizer, drawn pictures with questions, model, files, test.

    python scripts/train_demo_vision.py --seconds 480 --output jaxllm/data/demo_vision     # on a GPU
    python scripts/train_demo_vision.py --tiny --output /tmp/demo_vision                   # the whole way in small, on a CPU

`--seconds` counts from the start of the script to the end of the training; then the weights are written, and only then tested, for
`--test-seconds` at most. Nothing is downloaded: the pictures are drawn (scripts/demo_data/vision). `--resume DIRECTORY` goes on
from weights that an earlier run wrote; the optimizer's moments begin at zero, so take a lower `--rate`.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizers import Tokenizer

from scripts.demo_data.elapsed import STARTED, report
from scripts.demo_data.vision import card, model_files, scoring
from scripts.demo_data.vision.model_files import Sizes
from scripts.demo_data.vision.rows import BatchShape
from scripts.demo_data.vision.workers import working

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "jaxllm" / "data" / "demo_vision"
ROW_TOKENS, ROW_PATCHES = 256, 400
"""The longest dialogues, and the largest picture, fit."""
NARROW = Sizes(
    width=64,
    layers=2,
    heads=2,
    kv_heads=1,
    mlp_width=128,
    tower_width=64,
    tower_layers=2,
    tower_heads=2,
    tower_mlp_width=128,
    head_width=64,
    rope_sections=(12, 10, 10),
)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--seconds", type=float, default=480.0, help="from the start of the script to the end of the training")
    parser.add_argument("--test-seconds", type=float, default=70.0, help="for the test behind it, at most")
    parser.add_argument("--steps", type=int, help="end after so many steps, if that is earlier")
    parser.add_argument("--rows", type=int, default=240, help=f"rows of {ROW_TOKENS} tokens in a step")
    parser.add_argument("--picture-rows", type=int, default=256, help=f"rows of {ROW_PATCHES} patches in a step")
    parser.add_argument("--rate", type=float, default=0.003, help="the highest learning rate")
    parser.add_argument("--warmup-steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes that draw pictures")
    parser.add_argument("--questions", type=int, default=500, help="held-out questions of each skill in the test at the end")
    parser.add_argument("--resume", type=Path, help="a directory with weights to go on from")
    parser.add_argument("--tiny", action="store_true", help="narrow layers, 20 steps, little data: tries the script itself")
    arguments = parser.parse_args()
    arguments.sizes = NARROW if arguments.tiny else Sizes()
    if arguments.tiny:
        vars(arguments).update(rows=6, picture_rows=6, steps=20, processes=1, questions=2, warmup_steps=5)
    return arguments


def main() -> None:
    """Runs all stages."""
    arguments = parse_arguments()
    output: Path = arguments.output
    if arguments.resume:
        arguments.sizes = Sizes.of(json.loads((arguments.resume / "config.json").read_text(encoding="utf-8")))
        tokenizer = Tokenizer.from_file(str(arguments.resume / "tokenizer.json"))
    else:
        tokenizer = model_files.train_tokenizer(num_dialogues=3000 if arguments.tiny else 20_000)
    model_files.write_model_files(output, arguments.sizes, tokenizer)
    report(f"tokenizer of {tokenizer.get_vocab_size()} tokens, files written to {output}")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    shape = BatchShape(arguments.rows, ROW_TOKENS, arguments.picture_rows, ROW_PATCHES)
    with working(output / "tokenizer.json", shape, arguments.seed, arguments.processes) as workers:
        trainer = start_trainer(arguments, shape)  # compiles while pictures are drawn
        try:
            trainer.train(
                workers,
                STARTED + arguments.seconds,
                max_steps=arguments.steps,
                report=report,
                checkpoint=lambda: save(arguments, trainer),
            )
        finally:
            save(arguments, trainer)
    test(arguments, tokenizer, trainer.num_parameters)


def start_trainer(arguments: argparse.Namespace, shape: BatchShape):
    """The trainer with its step compiled."""
    import jax

    from scripts.demo_data.vision.model import init_weights, load_weights
    from scripts.demo_data.vision.training import Recipe, Trainer

    weights = load_weights(arguments.resume)[1] if arguments.resume else init_weights(arguments.sizes, arguments.seed)
    recipe = Recipe(arguments.rate, arguments.warmup_steps)
    trainer = Trainer(arguments.sizes, shape, recipe, weights)
    report(
        f"step compiled for {jax.devices()[0].device_kind}: {trainer.num_parameters / 1e6:.2f} M parameters, "
        f"{shape.rows * shape.tokens} tokens and {shape.picture_rows * shape.patches} patches a step "
        f"({shape.num_bytes / 2**20:.0f} MiB), {trainer.temporary_bytes / 2**30:.1f} GiB of temporary memory"
    )
    return trainer


def save(arguments: argparse.Namespace, trainer) -> None:
    """Writes the weights beside the model's other files, unless the training has spoilt them."""
    import numpy as np

    from scripts.demo_data.vision.model import save_weights

    if not all(np.isfinite(value).all() for value in trainer.weights.values()):
        report("the weights are not finite and not saved")
        return
    file = arguments.output / "model.safetensors"
    save_weights(trainer.weights, arguments.sizes, file)
    report(f"saved {file}: {file.stat().st_size / 1e6:.2f} MB of weights")


def test(arguments: argparse.Namespace, tokenizer: Tokenizer, num_parameters: int) -> None:
    """Prints the scores of what was written, and writes them into the model's card."""
    import jax

    from scripts.demo_data.vision.answers import Answerer
    from scripts.demo_data.vision.model import load_weights

    until = time.monotonic() + arguments.test_seconds
    sizes, weights = load_weights(arguments.output)
    on_cpu = jax.default_backend() == "cpu"
    answerer = Answerer(weights, sizes, tokenizer, "float32" if on_cpu else "bfloat16", batch=15 if on_cpu else 250)
    questions = scoring.held_out(arguments.questions)
    random.Random(0).shuffle(questions)  # if time runs out, all skills have been asked about
    answers = answerer.answer(questions, lambda: time.monotonic() > until)
    scores, text = scoring.score(questions[: len(answers)], answers)
    report(text)
    made = f"{jax.devices()[0].device_kind}, {arguments.seconds:.0f} s"
    (arguments.output / "README.md").write_text(card.card(scores, num_parameters, made), encoding="utf-8")
    report("done")


if __name__ == "__main__":
    main()
