"""Trains an adapter for the demo model that comes with jaxllm: a LoRA with which it answers as a pirate does.

    python scripts/train_demo_adapter.py                                # on a GPU; writes jaxllm/data/demo_pirate
    python scripts/train_demo_adapter.py --tiny --output /tmp/adapter   # the whole way in small, on a CPU

The data is that of the demo model (scripts/demo_data) with the answers rewritten; nothing is downloaded. Two runs on a device make
the same adapter. Needs optax (`pip install jaxllm[dev]`) in addition to what jaxllm needs.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from tokenizers import Tokenizer

from scripts.demo_data import chat_tokenizer, packing, pirate, python_text, scoring, tasks
from scripts.demo_data.chat_tokenizer import END_OF_TEXT_ID, STOP_IDS
from scripts.demo_data.elapsed import report

DATA = Path(__file__).resolve().parent.parent / "jaxllm" / "data"
SHORT_LENGTH, LONG_LENGTH = 256, 1024
DIALOGUES_PER_JOB = 5_000
STORED_DTYPE = "bfloat16"


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=DATA / "demo_pirate", help="gets the adapter")
    parser.add_argument("--base", type=Path, default=DATA / "demo", help="the demo model")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dialogues", type=int, default=100_000, help="how many dialogues to generate")
    parser.add_argument("--short-rows", type=int, default=64, help=f"rows of {SHORT_LENGTH} tokens in a step")
    parser.add_argument("--long-rows", type=int, default=4, help=f"rows of {LONG_LENGTH} tokens of longer dialogues in a step")
    parser.add_argument("--text-rows", type=int, default=2, help=f"rows of {LONG_LENGTH} tokens of Python text in a step")
    parser.add_argument("--rate", type=float, default=0.002, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that generate dialogues")
    parser.add_argument("--questions", type=int, default=500, help="how many held-out questions to ask in the end")
    parser.add_argument("--tiny", action="store_true", help="8 steps, little data: tries the script itself")
    arguments = parser.parse_args()
    if arguments.tiny:
        small = {"steps": 8, "dialogues": 500, "short_rows": 4, "long_rows": 1, "text_rows": 1, "processes": 2, "questions": 8}
        vars(arguments).update(small)
    return arguments


def main() -> None:
    """Runs all stages."""
    arguments = parse_arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer_file = arguments.base / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    counts = [min(DIALOGUES_PER_JOB, arguments.dialogues - at) for at in range(0, arguments.dialogues, DIALOGUES_PER_JOB)]
    with concurrent.futures.ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            # Other seeds than those of the trainings of the demo model and its drafters.
            pool.submit(
                packing.dialogue_rows,
                tokenizer_file,
                (arguments.seed + 2001) * 1_000_000 + job,
                count,
                SHORT_LENGTH,
                LONG_LENGTH,
                pirate.as_pirate,
            )
            for job, count in enumerate(counts)
        ]
        library, _ = python_text.library_texts()
        documents = python_text.training_documents(library, arguments.seed)
        documents = documents[:20] if arguments.tiny else documents
        text = pool.submit(packing.document_stream, tokenizer, documents, END_OF_TEXT_ID)
        config, base = load_base(arguments)
        training = start_training(arguments, base)
        parts = [job.result() for job in jobs]
        dialogues, long = (np.concatenate([part[size] for part in parts]) for size in (0, 1))
        data = (dialogues, long, text.result())
    report(f"data: {len(dialogues)} rows of dialogues, {len(long)} long ones, {data[2].size / 1e6:.1f} M tokens of Python")
    training.train(
        data,
        0.0,
        max_steps=arguments.steps,
        report=report,
        test=str,
        tests=(),
        log_every=4 if arguments.tiny else 20,
    )
    save(arguments, training.state["adapter"])
    report(measure(arguments, tokenizer, config, base, training.state["adapter"]))


def load_base(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The demo model's config and weights, in float32."""
    import jax

    from jaxllm.layers.build import build_model
    from jaxllm.loaders.load import load_weights
    from jaxllm.models.load_config import load_model_config
    from jaxllm.parallel.mesh import make_mesh

    config = load_model_config(arguments.base, dtype="float32")
    state = load_weights(
        config, build_model(config), arguments.base, load_format="safetensors", mesh=make_mesh(1), seed=0, progress=None
    )
    report(f"base loaded on {jax.devices()[0].device_kind}")
    return config, jax.tree.map(lambda leaf: jax.device_put(leaf, jax.devices()[0]), state)


def sizes_of(arguments: argparse.Namespace) -> Any:
    """The adapter's."""
    from scripts.demo_data.adapting import Sizes

    return Sizes(arguments.rank, arguments.alpha)


def start_training(arguments: argparse.Namespace, base: Any) -> Any:
    """The training with its step compiled: in bfloat16 on a GPU; a CPU emulates it."""
    import jax

    from jaxllm.models.load_config import load_model_config
    from scripts.demo_data.adapting import Adapting
    from scripts.demo_data.training import Recipe

    recipe = Recipe(
        arguments.short_rows,
        arguments.long_rows,
        arguments.text_rows,
        SHORT_LENGTH,
        LONG_LENGTH,
        arguments.rate,
        warmup_steps=3 if arguments.tiny else 20,
        constant_until=0.4,
        weight_decay=0.0,
    )
    config = load_model_config(arguments.base, dtype="float32" if jax.default_backend() == "cpu" else "bfloat16")
    training = Adapting(config, base, sizes_of(arguments), recipe, arguments.seed)
    report(f"step compiled, {recipe.tokens_per_step} tokens a step")
    return training


def save(arguments: argparse.Namespace, params: Any) -> None:
    """Write the adapter."""
    from scripts.demo_data.adapting import save_adapter

    save_adapter(arguments.output, sizes_of(arguments), params, arguments.base.name, STORED_DTYPE)
    size = (arguments.output / "adapter_model.safetensors").stat().st_size
    report(f"saved {arguments.output}: {size / 1e6:.2f} MB of weights")


def measure(arguments: argparse.Namespace, tokenizer: Tokenizer, config: Any, base: Any, params: Any) -> str:
    """Answers to held-out questions with and without the adapter, as it was saved."""
    import jax

    from scripts.demo_data.adapting import Lora, merged
    from scripts.demo_data.direct import DirectModel

    direct = DirectModel(config, base)
    questions = tasks.held_out_questions(arguments.questions)
    lines = []

    def ask(title: str, questions: list[Any]) -> list[str]:
        prompts = [tokenizer.encode(chat_tokenizer.render_question(question)).ids for question in questions]
        batch = 8 if arguments.tiny else 32 if jax.default_backend() == "cpu" else 256
        max_new = 16 if arguments.tiny else scoring.MAX_ANSWER_TOKENS
        answers: list[str] = tokenizer.decode_batch(direct.answer(prompts, STOP_IDS, max_new, batch))
        lines.append(f"{title}: {scoring.score(questions, answers)[1]}")
        return answers

    ask("without the adapter", questions)
    rounded = jax.tree.map(lambda leaf: leaf.astype(STORED_DTYPE).astype("float32"), params)
    direct.state = merged(config, base, Lora(sizes_of(arguments), rounded))
    in_style = [pirate.as_pirate(question) for question in questions]
    answers = ask("with the adapter", in_style)
    lines.append(f"in the style: {100 * pirate.share_in_style(in_style, answers):.1f} %")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
