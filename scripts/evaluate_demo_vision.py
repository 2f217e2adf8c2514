"""Scores the demo model that sees: exact answers to held-out questions about drawn pictures, by skill.

    python scripts/evaluate_demo_vision.py                      # through the engine, as users meet it
    python scripts/evaluate_demo_vision.py --direct             # the plain model in JAX, without the engine
    python scripts/evaluate_demo_vision.py --minimum 0.9        # fails if fewer answers are right

The questions are generated and held out by hash, so they are the same on every machine and never trained on. Pictures are drawn by
Pillow, whose versions may differ in single pixels.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.demo_data.vision import scoring
from scripts.measuring.command_line import engine_option

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "jaxllm" / "data" / "demo_vision"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="a model directory; default: the one in jaxllm")
    parser.add_argument("--direct", action="store_true", help="without the engine")
    parser.add_argument(
        "options", nargs="*", type=engine_option, metavar="name=value", help="engine options, e.g. dtype=float32"
    )
    parser.add_argument("--questions", type=int, default=100, help="of each skill")
    parser.add_argument("--show-wrong", type=int, default=2, help="how many wrong answers of each skill to print")
    parser.add_argument("--minimum", type=float, default=0.0, help="exit with 1 if a smaller share of the answers is right")
    parser.add_argument("--json", type=Path, help="write the scores to this file as well")
    arguments = parser.parse_args()
    if arguments.direct and arguments.options:
        parser.error("--direct computes without the engine: leave out its options")
    return arguments


def answers_of_engine(model: Path, options: dict[str, Any], questions: list[scoring.Asked]) -> list[str]:
    """Answers from `jaxllm.LLM`."""
    from PIL import Image

    from jaxllm import LLM, SamplingParams

    llm = LLM(model=str(model), **options)
    prompts = [
        {"prompt": asked.prompt}
        | ({"multi_modal_data": {"image": [Image.fromarray(p) for p in asked.pictures]}} if asked.pictures else {})
        for asked in questions
    ]
    params = SamplingParams(temperature=0.0, max_tokens=scoring.MAX_ANSWER_TOKENS)
    return [output.outputs[0].text for output in llm.generate(prompts, params)]


def answers_of_model(model: Path, questions: list[scoring.Asked]) -> list[str]:
    """Answers from the plain model, in float32."""
    import jax
    from tokenizers import Tokenizer

    from scripts.demo_data.vision.answers import Answerer
    from scripts.demo_data.vision.model import load_weights

    sizes, weights = load_weights(model)
    batch = 32 if jax.default_backend() == "cpu" else 250
    answerer = Answerer(weights, sizes, Tokenizer.from_file(str(model / "tokenizer.json")), "float32", batch)
    return answerer.answer(questions)


def main() -> None:
    """Prints the scores."""
    arguments = parse_arguments()
    begin = time.monotonic()
    questions = scoring.held_out(arguments.questions)
    if arguments.direct:
        answers = answers_of_model(arguments.model, questions)
    else:
        answers = answers_of_engine(arguments.model, dict(arguments.options), questions)
    scores, text = scoring.score(questions, answers, arguments.show_wrong)
    print(text)
    print(f"answered in {time.monotonic() - begin:.1f} s")
    right = sum(hits for hits, _ in scores.values())
    share = right / max(1, len(questions))
    if arguments.json:
        content = {
            "questions": len(questions),
            "exact": share,
            "skills": {kind: hits / count for kind, (hits, count) in scores.items()},
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if share < arguments.minimum:
        sys.exit(f"{100 * share:.1f} % of the answers are right; {100 * arguments.minimum:.1f} % are asked for")


if __name__ == "__main__":
    main()
