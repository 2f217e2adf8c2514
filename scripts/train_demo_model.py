"""Trains the demo model that comes with jaxllm: tokenizer, dialogues and Python text, model, files, test.

    python scripts/train_demo_model.py --minutes 7 --output jaxllm/data/demo     # on a GPU
    python scripts/train_demo_model.py --tiny --output /tmp/demo                  # the whole way in small, on a CPU

`--minutes` counts from the start of the script to the end of the training; saving and testing take about another half minute.
Nothing is downloaded: the Python text is the standard library of the running interpreter, the dialogues are generated
(scripts/demo_data). Needs optax (`pip install jaxllm[dev]`) in addition to what jaxllm needs.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from tokenizers import Tokenizer

from scripts.demo_data import chat_tokenizer, packing, python_text, scoring, tasks
from scripts.demo_data.chat_tokenizer import END_OF_TEXT_ID, STOP_IDS
from scripts.demo_data.elapsed import STARTED, report

VOCAB_SIZE = 4096
SHORT_LENGTH, LONG_LENGTH = 256, 1024
DIALOGUES_PER_JOB = 20_000


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent.parent / "jaxllm" / "data" / "demo")
    parser.add_argument("--minutes", type=float, default=7.0, help="from the start of the script to the end of the training")
    parser.add_argument("--dialogues", type=int, default=3_000_000, help="how many dialogues to generate")
    parser.add_argument("--hidden-size", type=int, default=320)
    parser.add_argument("--intermediate-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--short-rows", type=int, default=160, help=f"rows of {SHORT_LENGTH} tokens of dialogues in a step")
    parser.add_argument("--long-rows", type=int, default=11, help=f"rows of {LONG_LENGTH} tokens of longer dialogues in a step")
    parser.add_argument("--text-rows", type=int, default=2, help=f"rows of {LONG_LENGTH} tokens of Python text in a step")
    parser.add_argument("--rate", type=float, default=0.002, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that generate dialogues")
    parser.add_argument("--questions", type=int, default=500, help="held-out questions in the test at the end")
    parser.add_argument("--tiny", action="store_true", help="two narrow layers, 30 steps, little data: tries the script itself")
    arguments = parser.parse_args()
    if arguments.tiny:
        small = {"dialogues": 2000, "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "kv_heads": 1}
        small |= {"short_rows": 8, "long_rows": 1, "text_rows": 1, "processes": 2, "questions": 24}
        vars(arguments).update(small)
    return arguments


def model_config(arguments: argparse.Namespace, dtype: str):
    """The model; in bfloat16 it is trained and stored, in float32 tested, as a CPU serves it."""
    from jaxllm.models.load_config import load_model_config

    (arguments.output / "config.json").write_text(json.dumps(config_json(arguments), indent=2) + "\n", encoding="utf-8")
    return load_model_config(arguments.output, dtype=dtype)


def config_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model as transformers describes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.intermediate_size,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.kv_heads,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": chat_tokenizer.MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": list(STOP_IDS),
    }


def main() -> None:
    """Runs all stages."""
    arguments = parse_arguments()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    generation = {"do_sample": False, "temperature": 0.0, "eos_token_id": list(STOP_IDS), "pad_token_id": END_OF_TEXT_ID}
    (output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")

    library, held_out_texts = python_text.library_texts()
    if sum(map(len, library)) < 1_000_000:
        sys.exit("this interpreter's standard library has hardly any sources; run the training with a complete Python")
    documents = python_text.training_documents(library, arguments.seed)
    report(f"Python text: {len(library)} files, {sum(map(len, library)) / 1e6:.1f} MB; held out {len(held_out_texts)} files")
    samples = (chat_tokenizer.render_dialogue(dialogue) for dialogue in tasks.training_dialogues(arguments.seed, 20_000))
    tokenizer = chat_tokenizer.train_tokenizer([*documents, *samples], VOCAB_SIZE)
    chat_tokenizer.save_tokenizer(tokenizer, output)
    report(f"tokenizer trained, {tokenizer.get_vocab_size()} tokens")

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    counts = [min(DIALOGUES_PER_JOB, arguments.dialogues - at) for at in range(0, arguments.dialogues, DIALOGUES_PER_JOB)]
    with concurrent.futures.ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(
                packing.dialogue_rows,
                output / "tokenizer.json",
                (arguments.seed + 1) * 1_000_000 + job,
                count,
                SHORT_LENGTH,
                LONG_LENGTH,
            )
            for job, count in enumerate(counts)
        ]
        trainer = start_trainer(arguments)  # compiles while the dialogues are made
        text = packing.document_stream(tokenizer, documents, END_OF_TEXT_ID)
        parts = [job.result() for job in jobs]
    data = (np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts]), text)
    del parts
    report(
        f"data: {arguments.dialogues} dialogues in {len(data[0])} rows of {SHORT_LENGTH} and {len(data[1])} of {LONG_LENGTH} "
        f"tokens ({sum(part.size for part in data[:2]) / 1e6:.1f} M tokens), {text.size / 1e6:.1f} M tokens of Python"
    )

    from scripts.demo_data.direct import DirectModel

    windows, num_bytes = scoring.text_windows(tokenizer, held_out_texts, END_OF_TEXT_ID, limit=4 if arguments.tiny else None)

    def text_score() -> str:
        direct = DirectModel(model_config(arguments, "bfloat16"), trainer.state)
        return f"held-out Python text: {scoring.bits_per_byte(windows, num_bytes, direct.log_likelihood):.4f} bits per byte"

    trainer.train(
        data,
        STARTED + 60 * arguments.minutes,
        max_steps=30 if arguments.tiny else None,
        report=report,
        test=text_score,
        log_every=10 if arguments.tiny else 200,
    )
    save_and_test(arguments, tokenizer, trainer.state, windows, num_bytes)


def start_trainer(arguments: argparse.Namespace):
    """The trainer with its step compiled."""
    import jax

    from scripts.demo_data.training import Recipe, Trainer

    recipe = Recipe(
        arguments.short_rows,
        arguments.long_rows,
        arguments.text_rows,
        SHORT_LENGTH,
        LONG_LENGTH,
        arguments.rate,
        warmup_steps=5 if arguments.tiny else 200,
    )
    trainer = Trainer(model_config(arguments, "bfloat16"), recipe, arguments.seed)
    size = f"{trainer.num_parameters / 1e6:.2f} M parameters, {recipe.tokens_per_step} tokens a step"
    report(f"step compiled for {jax.devices()[0].device_kind}: {size}")
    return trainer


def save_and_test(arguments: argparse.Namespace, tokenizer: Tokenizer, state, windows: list[list[int]], num_bytes: int) -> None:
    """Writes the weights and prints the scores of what was written."""
    import jax

    from scripts.demo_data.direct import DirectModel
    from scripts.saving import save_safetensors

    config, output = model_config(arguments, "float32"), arguments.output
    state = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), state)
    save_safetensors(config, state, output, config_json(arguments), dtype="bfloat16")
    report(f"saved {output}: {(output / 'model.safetensors').stat().st_size / 2**20:.2f} MiB of weights")
    direct = DirectModel(config, state)
    questions = tasks.held_out_questions(arguments.questions)
    prompts = [tokenizer.encode(chat_tokenizer.render_question(question)).ids for question in questions]
    answers = direct.answer(prompts, STOP_IDS, scoring.MAX_ANSWER_TOKENS, batch=16 if arguments.tiny else 256)
    _, text = scoring.score(questions, tokenizer.decode_batch(answers), show_wrong=3 if arguments.tiny else 30)
    report(text)
    report(f"held-out Python text: {scoring.bits_per_byte(windows, num_bytes, direct.log_likelihood):.4f} bits per byte")
    show_samples(tokenizer, direct)


SAMPLES = ("def fibonacci(n):\n", "import os\n\ndef list_files(path):\n", "class Queue:\n", 'def parse(self, line):\n    """')
CHATS = (
    "Hello!",
    "Who are you?",
    "What is 17 + 28?",
    "What is the capital of France?",
    "Spell strawberry",
    "Why is grass green?",
)


def show_samples(tokenizer: Tokenizer, direct) -> None:
    """Prints a few completions and answers, to look at."""
    prompts = [*SAMPLES, *(chat_tokenizer.render([{"role": "user", "content": chat}], ask=True) for chat in CHATS)]
    answers = direct.answer([tokenizer.encode(prompt).ids for prompt in prompts], STOP_IDS, scoring.MAX_ANSWER_TOKENS, batch=16)
    for prompt, answer in zip((*SAMPLES, *CHATS), tokenizer.decode_batch(answers), strict=True):
        print(f"--- {prompt}\n{answer}" if prompt in CHATS else f"--- {prompt}{answer}", flush=True)


if __name__ == "__main__":
    main()
