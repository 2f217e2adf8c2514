"""Scores the demo model: exact answers to held-out questions, and bits per byte of held-out Python text.

    python scripts/evaluate_demo_model.py                      # through the engine, as users meet it
    python scripts/evaluate_demo_model.py --direct             # the plain model in JAX, without the engine
    python scripts/evaluate_demo_model.py --minimum 0.95       # fails if fewer answers are right
    python scripts/evaluate_demo_model.py --quantization fp8 --kv-cache-dtype fp8
    python scripts/evaluate_demo_model.py --adapter demo_pirate    # answers are right only in the adapter's style

The questions are generated and held out by hash, so they are the same on every machine and never trained on. The Python text is
the held-out part of the running interpreter's standard library: its score differs a little from one Python version to the next.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tokenizers import Tokenizer

from jaxllm.options.quantization import ONLINE
from scripts.demo_data import chat_tokenizer, pirate, python_text, scoring, tasks
from scripts.demo_data.chat_tokenizer import END_OF_TEXT_ID, STOP_IDS
from scripts.demo_data.dialogue import Dialogue


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="demo", help="a model directory; default: the model that comes with jaxllm")
    parser.add_argument("--direct", action="store_true", help="without the engine")
    parser.add_argument("--quantization", choices=tuple(ONLINE), help="the engine's option")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="the engine's option")
    parser.add_argument("--adapter", help="a LoRA adapter in the style of demo_pirate, through the engine")
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--windows", type=int, default=64, help="how many windows of Python text at most; 0: none")
    parser.add_argument("--show-wrong", type=int, default=10, help="how many wrong answers to print")
    parser.add_argument("--minimum", type=float, default=0.0, help="exit with 1 if a smaller share of the answers is right")
    parser.add_argument("--json", type=Path, help="write the scores to this file as well")
    arguments = parser.parse_args()
    if arguments.direct and (arguments.adapter or arguments.kv_cache_dtype != "auto"):
        parser.error("--direct computes without the engine: leave out --adapter and --kv-cache-dtype")
    return arguments


class Direct:
    """Answers from the plain model."""

    def __init__(self, directory: Path, quantization: str | None):
        import jax

        from jaxllm.layers.build import build_model
        from jaxllm.loaders.load import load_weights
        from jaxllm.models.load_config import load_model_config
        from jaxllm.parallel.mesh import make_mesh
        from scripts.demo_data.direct import DirectModel

        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        config = load_model_config(directory, dtype="float32", quantization=quantization)
        state = load_weights(
            config, build_model(config), directory, load_format="safetensors", mesh=make_mesh(1), seed=0, progress=None
        )
        self.model = DirectModel(config, state)
        self.batch = 32 if jax.default_backend() == "cpu" else 256

    def answers(self, questions: list[Dialogue]) -> list[str]:
        """The answer to each question."""
        prompts = [self.tokenizer.encode(chat_tokenizer.render_question(question)).ids for question in questions]
        return self.tokenizer.decode_batch(self.model.answer(prompts, STOP_IDS, scoring.MAX_ANSWER_TOKENS, self.batch))

    def log_likelihood(self, windows: list[list[int]]) -> float:
        """See `scoring.bits_per_byte`."""
        return self.model.log_likelihood(windows, batch=4)


class ThroughEngine:
    """Answers from `jaxllm.LLM`."""

    def __init__(self, model: str, directory: Path, adapter: str | None, **options: Any):
        from jaxllm import LLM, LoRARequest

        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.llm = LLM(model=model, enable_lora=adapter is not None, **options)
        self.adapter = None if adapter is None else LoRARequest("adapter", 1, adapter)

    def answers(self, questions: list[Dialogue]) -> list[str]:
        """The answer to each question. Questions with tools have each their own, so they are asked one by one."""
        from jaxllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=scoring.MAX_ANSWER_TOKENS)
        answers = [""] * len(questions)
        plain = [place for place, question in enumerate(questions) if not question.tools]
        conversations = [list(questions[place].messages[:-1]) for place in plain]
        outputs = self.llm.chat(conversations, params, lora_request=self.adapter)
        for place, output in zip(plain, outputs, strict=True):
            answers[place] = output.outputs[0].text
        for place, question in enumerate(questions):
            if question.tools:
                output = self.llm.chat(
                    list(question.messages[:-1]), params, tools=list(question.tools), lora_request=self.adapter, use_tqdm=False
                )
                answers[place] = output[0].outputs[0].text
        return answers

    def log_likelihood(self, windows: list[list[int]]) -> float:
        """See `scoring.bits_per_byte`."""
        from jaxllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        total = 0.0
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in windows], params, lora_request=self.adapter)
        for window, output in zip(windows, outputs, strict=True):
            entries = output.prompt_logprobs
            total += math.fsum(entries[place][window[place]].logprob for place in range(1, len(window)))
        return total


def main() -> None:
    """Print both scores."""
    arguments = parse_arguments()
    from jaxllm.hub import resolve_model

    directory = resolve_model(arguments.model)
    subject: Direct | ThroughEngine
    if arguments.direct:
        subject = Direct(directory, arguments.quantization)
    else:
        options = {"quantization": arguments.quantization, "kv_cache_dtype": arguments.kv_cache_dtype}
        subject = ThroughEngine(arguments.model, directory, arguments.adapter, **options)
    begin = time.monotonic()
    questions = tasks.held_out_questions(arguments.questions)
    questions = [pirate.as_pirate(question) for question in questions] if arguments.adapter else questions
    answers = subject.answers(questions)
    share, text = scoring.score(questions, answers, arguments.show_wrong)
    print(text)
    print(f"answered in {time.monotonic() - begin:.1f} s")
    scores: dict[str, Any] = {"questions": len(questions), "exact": share}
    if arguments.adapter:
        scores["in_style"] = pirate.share_in_style(questions, answers)
        print(f"in the adapter's style: {100 * scores['in_style']:.1f} %")
    if arguments.windows:
        held_out_texts = python_text.library_texts()[1]
        windows, num_bytes = scoring.text_windows(subject.tokenizer, held_out_texts, END_OF_TEXT_ID, arguments.windows)
        scores |= {"bytes": num_bytes, "bits_per_byte": scoring.bits_per_byte(windows, num_bytes, subject.log_likelihood)}
        print(f"held-out Python text: {scores['bits_per_byte']:.4f} bits per byte over {num_bytes} bytes")
    if arguments.json:
        arguments.json.write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    if share < arguments.minimum:
        sys.exit(f"{100 * share:.1f} % of the answers are right; {100 * arguments.minimum:.1f} % are asked for")


if __name__ == "__main__":
    main()
