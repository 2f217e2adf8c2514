"""Trains drafters for the demo model that comes with jaxllm, from its own distributions: an EAGLE-3 head and a draft model.

    python scripts/train_demo_drafters.py --minutes 3                  # on a GPU; writes jaxllm/data/demo_eagle3 and demo_draft
    python scripts/train_demo_drafters.py --tiny --output /tmp/drafters # the whole way in small, on a CPU

`--minutes` counts from the start of the script to the end of the training; saving and measuring take about another half minute.
The data is that of the demo model (scripts/demo_data) and Python that the demo model continues itself; nothing is downloaded.
Needs optax (`pip install jaxllm[dev]`) in addition to what jaxllm needs.
"""

import argparse
import concurrent.futures
import dataclasses
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

DATA = Path(__file__).resolve().parent.parent / "jaxllm" / "data"
SHORT_LENGTH, LONG_LENGTH = 256, 1024
CONTINUED_FROM = 64
"""Tokens of Python that the target continues to rows of SHORT_LENGTH."""
HELD_OUT_TOKENS = 192
DIALOGUES_PER_JOB = 5_000
MOST_DRAFTS = 6
DIRECTORIES = {"eagle3": "demo_eagle3", "draft": "demo_draft"}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=DATA, help="gets the folders demo_eagle3 and demo_draft")
    parser.add_argument("--target", type=Path, default=DATA / "demo", help="the demo model")
    parser.add_argument("--only", choices=("eagle3", "draft"), help="train one of the two")
    parser.add_argument("--minutes", type=float, default=3.0, help="from the start of the script to the end of the training")
    parser.add_argument("--dialogues", type=int, default=400_000, help="how many dialogues to generate")
    parser.add_argument("--continued", type=int, default=16_384, help="how many pieces of Python the target continues")
    parser.add_argument("--depth", type=int, default=5, help="drafts in a row that the head is trained on")
    parser.add_argument("--feature-layers", type=int, nargs="+", default=[1, 3, 5], help="layers whose inputs the head reads")
    parser.add_argument("--draft-vocab-size", type=int, default=2048, help="tokens that the head can draft")
    parser.add_argument("--head-intermediate-size", type=int, default=512)
    parser.add_argument("--draft-hidden-size", type=int, default=192)
    parser.add_argument("--draft-intermediate-size", type=int, default=384)
    parser.add_argument("--draft-layers", type=int, default=2)
    parser.add_argument("--short-rows", type=int, default=128, help=f"rows of {SHORT_LENGTH} tokens in a step")
    parser.add_argument("--long-rows", type=int, default=4, help=f"rows of {LONG_LENGTH} tokens of longer dialogues in a step")
    parser.add_argument("--text-rows", type=int, default=4, help=f"rows of {LONG_LENGTH} tokens of Python text in a step")
    parser.add_argument("--rate", type=float, default=0.002, help="the highest learning rate")
    parser.add_argument("--steps", type=int, help="end the training after so many steps instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that generate dialogues")
    parser.add_argument("--questions", type=int, default=400, help="held-out questions, and as many pieces of held-out Python")
    parser.add_argument("--tiny", action="store_true", help="8 steps, little data: tries the script itself")
    arguments = parser.parse_args()
    if arguments.tiny:
        small = {"dialogues": 500, "continued": 16, "depth": 2, "draft_vocab_size": 256, "head_intermediate_size": 64}
        small |= {"draft_hidden_size": 64, "draft_intermediate_size": 64, "draft_layers": 1, "short_rows": 4, "long_rows": 1}
        vars(arguments).update(small | {"text_rows": 1, "steps": 8, "processes": 2, "questions": 8})
    return arguments


def main() -> None:
    """Runs all stages."""
    arguments = parse_arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer_file = arguments.target / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    counts = [min(DIALOGUES_PER_JOB, arguments.dialogues - at) for at in range(0, arguments.dialogues, DIALOGUES_PER_JOB)]
    with (
        concurrent.futures.ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn")) as pool,
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):
        jobs = [
            # Other seeds than those of the demo model's own training.
            pool.submit(
                packing.dialogue_rows,
                tokenizer_file,
                (arguments.seed + 1001) * 1_000_000 + job,
                count,
                SHORT_LENGTH,
                LONG_LENGTH,
            )
            for job, count in enumerate(counts)
        ]
        library, held_out_texts = python_text.library_texts()
        documents = python_text.training_documents(library, arguments.seed)
        if arguments.tiny:
            documents = documents[:20]
        texts = pool.submit(packing.document_stream, tokenizer, documents, END_OF_TEXT_ID)
        target = load_target(arguments)
        # Most of the time until the training begins is compiling, which threads do at the same time.
        held_out = threads.submit(HeldOut, arguments, target, tokenizer, held_out_texts)
        text = texts.result()
        drafters = make_drafters(arguments, target, [jobs[0].result()[0], text])
        training = threads.submit(start_training, arguments, target, drafters)
        measured = measured_drafters(arguments, drafters)
        untrained = threads.submit(lambda: [held_out.result().line(drafter, drafter.init(0)) for drafter in measured])
        continued = continue_python(arguments, target, text)
        parts = [job.result() for job in jobs]
        dialogues, long = (np.concatenate([part[size] for part in parts]) for size in (0, 1))
        # Half as many rows of continued Python as of dialogues, of which a third of the tokens is trained on.
        repeated = np.resize(continued, (len(dialogues) // 2, SHORT_LENGTH))
        data = (np.concatenate([dialogues, repeated]), long, text)
        report(f"data: {len(dialogues)} rows of dialogues, {len(long)} long ones, {text.size / 1e6:.1f} M tokens of Python")
        report("untrained " + "\n".join(untrained.result()))

    def measure(params: dict[str, Any]) -> str:
        return "\n".join(held_out.result().line(drafter, params[drafter.name]) for drafter in measured)

    training.result().train(
        data,
        STARTED + 60 * arguments.minutes,
        max_steps=arguments.steps,
        report=report,
        test=lambda: measure(training.result().state["drafters"]),
        tests=(0.5,),
        log_every=4 if arguments.tiny else 100,
    )
    params = rounded(training.result().state["drafters"])
    save(arguments, measured, params)
    report(measure(params))


@dataclasses.dataclass
class Target:
    """The demo model: for training and for the measurement."""

    training_config: Any
    config: Any
    state: Any


def load_target(arguments: argparse.Namespace) -> Target:
    """In the type in which the device computes fast, and in float32."""
    import jax

    from jaxllm.layers.build import build_model
    from jaxllm.loaders.load import load_weights
    from jaxllm.models.load_config import load_model_config
    from jaxllm.parallel.mesh import make_mesh

    config = load_model_config(arguments.target, dtype="float32")
    training_config = load_model_config(arguments.target, dtype=training_dtype())
    state = load_weights(
        config, build_model(config), arguments.target, load_format="safetensors", mesh=make_mesh(1), seed=0, progress=None
    )
    report(f"target loaded on {jax.devices()[0].device_kind}")
    return Target(training_config, config, jax.tree.map(lambda leaf: jax.device_put(leaf, jax.devices()[0]), state))


def training_dtype() -> str:
    """Bfloat16 on a GPU; a CPU emulates it."""
    import jax

    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def continue_python(arguments: argparse.Namespace, target: Target, text: np.ndarray) -> np.ndarray:
    """Rows of SHORT_LENGTH: pieces of the text as the target continues them, half of them greedily, half at temperature 1."""
    from scripts.demo_data.direct import DirectModel

    rng = np.random.default_rng(arguments.seed)
    direct = DirectModel(target.training_config, target.state)
    begins = rng.integers(0, len(text) - CONTINUED_FROM, arguments.continued)
    prompts = [(text[at : at + CONTINUED_FROM] & packing.TOKEN_MASK).tolist() for at in begins]
    half, max_new = arguments.continued // 2, SHORT_LENGTH - CONTINUED_FROM
    batch = min(1024, arguments.continued - half)
    outputs = direct.generate(prompts[:half], STOP_IDS, max_new, batch)
    outputs += direct.generate(prompts[half:], STOP_IDS, max_new, batch, temperature=1.0)
    rows = np.full((arguments.continued, SHORT_LENGTH), packing.STARTS, np.uint16)
    for row, prompt, output in zip(rows, prompts, outputs, strict=True):
        row[: len(prompt) + len(output)] = [*prompt, *(token | packing.TRAINED for token in output)]
        row[0] |= packing.STARTS
    report(f"the target continued {len(rows)} pieces of Python by {sum(map(len, outputs)) / 1e6:.2f} M tokens")
    return rows


def frequent_tokens(rows: list[np.ndarray], size: int) -> tuple[np.ndarray, list[float]]:
    """The tokens that are trained on most often, with the stop tokens, rising; and their share of each array of rows.

    Each array counts the same.
    """
    shares = []
    for part in rows:
        counts = np.bincount((part & packing.TOKEN_MASK)[(part & packing.TRAINED) != 0], minlength=1 + max(STOP_IDS))
        shares.append(counts / max(counts.sum(), 1))
    width = max(map(len, shares))
    shares = [np.pad(share, (0, width - len(share))) for share in shares]
    total = np.sum(shares, axis=0)
    total[list(STOP_IDS)] = np.inf
    chosen = np.sort(np.argsort(-total, kind="stable")[:size])
    return chosen, [float(share[chosen].sum()) for share in shares]


def target_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """The config.json of the demo model."""
    config: dict[str, Any] = json.loads((arguments.target / "config.json").read_text(encoding="utf-8"))
    return config


def draft_config_json(arguments: argparse.Namespace) -> dict[str, Any]:
    """The draft model as transformers describes it: a narrow Llama of the target's vocabulary."""
    sizes = {
        "hidden_size": arguments.draft_hidden_size,
        "intermediate_size": arguments.draft_intermediate_size,
        "num_hidden_layers": arguments.draft_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    return target_json(arguments) | sizes


def make_drafters(arguments: argparse.Namespace, target: Target, rows: list[np.ndarray]) -> list[Any]:
    """The drafter to train. rows: samples of the target's output, from which the head's vocabulary is chosen."""
    from jaxllm.models.load_config import load_model_config
    from scripts.demo_data import distilling, eagle3

    drafters: list[distilling.DrafterTraining] = []
    if arguments.only != "draft":
        columns, shares = frequent_tokens(rows, arguments.draft_vocab_size)
        report(f"the head drafts {len(columns)} tokens: {shares[0]:.2%} of the answers, {shares[1]:.2%} of Python")
        sizes = eagle3.Eagle3Sizes(
            hidden_size=target.config.hidden_size,
            vocab_size=target.config.vocab_size,
            draft_vocab_size=len(columns),
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            intermediate_size=arguments.head_intermediate_size,
            feature_layers=tuple(arguments.feature_layers),
            max_position_embeddings=target_json(arguments)["max_position_embeddings"],
        )
        drafters.append(distilling.Eagle3Training(sizes, columns, target.state["embedding"]["weight"][...]))
    if arguments.only != "eagle3":
        directory = arguments.output / DIRECTORIES["draft"]
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(draft_config_json(arguments)), encoding="utf-8")
        drafters.append(distilling.DraftModelTraining(load_model_config(directory, dtype=training_dtype())))
    return drafters


def measured_drafters(arguments: argparse.Namespace, drafters: list[Any]) -> list[Any]:
    """The drafters in float32, as a CPU serves them. A head computes in the type of its target."""
    from jaxllm.models.load_config import load_model_config
    from scripts.demo_data.distilling import DraftModelTraining

    config = arguments.output / DIRECTORIES["draft"]
    return [
        DraftModelTraining(load_model_config(config, dtype="float32")) if drafter.name == "draft" else drafter
        for drafter in drafters
    ]


def start_training(arguments: argparse.Namespace, target: Target, drafters: list[Any]) -> Any:
    """The training with its step compiled."""
    from scripts.demo_data.distilling import Distilling
    from scripts.demo_data.training import Recipe

    recipe = Recipe(
        arguments.short_rows,
        arguments.long_rows,
        arguments.text_rows,
        SHORT_LENGTH,
        LONG_LENGTH,
        arguments.rate,
        warmup_steps=3 if arguments.tiny else 100,
        constant_until=0.4,
    )
    layers = tuple(arguments.feature_layers)
    training = Distilling(target.training_config, target.state, layers, drafters, recipe, arguments.depth, arguments.seed)
    report(f"step compiled, {recipe.tokens_per_step} tokens a step")
    return training


def rounded(params: Any) -> Any:
    """To the type in which the files hold them."""
    import jax

    return jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), params)


def save(arguments: argparse.Namespace, drafters: list[Any], params: dict[str, Any]) -> None:
    """Write the drafters in bfloat16."""
    from scripts.demo_data import eagle3
    from scripts.saving import save_safetensors

    for drafter in drafters:
        directory = arguments.output / DIRECTORIES[drafter.name]
        if drafter.name == "eagle3":
            eagle3.save_head(directory, drafter.sizes, params[drafter.name], drafter.columns)
        else:
            described = draft_config_json(arguments)
            save_safetensors(drafter.config, params[drafter.name], directory, described, dtype="bfloat16")
        report(f"saved {directory}: {(directory / 'model.safetensors').stat().st_size / 2**20:.2f} MiB of weights")


class HeldOut:
    """Texts that the target generates from held-out questions and from the beginnings of pieces of held-out Python."""

    def __init__(self, arguments: argparse.Namespace, target: Target, tokenizer: Tokenizer, held_out_texts: list[str]):
        import jax

        from scripts.demo_data.acceptance import AcceptanceTest

        batch = 8 if arguments.tiny else 32 if jax.default_backend() == "cpu" else 128
        self._test = AcceptanceTest(target.config, target.state, tuple(arguments.feature_layers), MOST_DRAFTS, batch)
        questions = tasks.held_out_questions(arguments.questions)
        chat = [tokenizer.encode(chat_tokenizer.render_question(question)).ids for question in questions]
        stream = packing.document_stream(tokenizer, held_out_texts, END_OF_TEXT_ID) & packing.TOKEN_MASK
        begins = np.linspace(0, len(stream) - CONTINUED_FROM, arguments.questions).astype(int)
        python = [stream[at : at + CONTINUED_FROM].tolist() for at in begins]
        self._texts = {}
        for name, prompts, max_new in (("questions", chat, scoring.MAX_ANSWER_TOKENS), ("Python", python, HELD_OUT_TOKENS)):
            for temperature in (0.0, 1.0):
                title = f"{name} at temperature {temperature:.0f}"
                max_new = 16 if arguments.tiny else max_new
                self._texts[title] = self._test.generate(prompts, STOP_IDS, max_new, temperature)

    def line(self, drafter: Any, params: Any) -> str:
        """Tokens per step of each kind of text, by the number of drafts."""
        numbers = ", ".join(str(number + 1) for number in range(MOST_DRAFTS))
        lines = [f"{drafter.name}: tokens per step of the target with {numbers} drafts"]
        for title, texts in self._texts.items():
            results = self._test.measure(drafter, params, texts)
            lines.append(f"  held-out {title:<28}" + "  ".join(f"{result:.2f}" for result in results))
        return "\n".join(lines)


if __name__ == "__main__":
    main()
