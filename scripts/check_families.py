"""Compares whole engines with transformers, for every variant of every family: a line for each, and 1 is returned if one differs.

    python scripts/check_families.py [--only NAME ...] [--seconds N] [--goldens DIR]

Needs torch, but for variants with a golden in tests/goldens or in DIR, where those of the others are written and found again. Texts are
64 greedy tokens after each of some prompts. An engine on one CPU device and one on two compute them all at once, in chunks of 16 tokens,
with n-gram drafts and prefix caching, in a pool too small for the rows, and give the prompts' logprobs. Then all prompts are asked for
twice in a large pool, the second time found in the cache. Encoders and classifiers (`make_encoder_goldens.py`) generate nothing: their
vectors and scores are compared. MTP modules are not: transformers has none.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ["JAX_PLATFORMS"] = "cpu"

from tests import conftest  # before JAX, whose variables it sets as in tests

# isort: split
import numpy as np

from jaxllm.config import EngineConfig
from jaxllm.engine.core import EngineCore
from scripts import make_encoder_goldens, make_goldens, tiny_configs
from tests.helpers import encoders, engines

TOLERANCE = 1e-4
CHUNK = 16
PROMPT_LENGTHS = (2, 19, 31, 40)
FEW = 16
"""Tokens of texts that are asked for again."""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
OPTIONS = {
    **engines.SMALL,
    "max_num_batched_tokens": CHUNK,
    "token_buckets": (CHUNK,),
    "num_gpu_blocks_override": 300,
    "warmup": "lazy",
}


@dataclass
class Found:
    """Result of an engine: the number of texts that are equal, of all texts, the largest error of logprobs, and counts to print."""

    num_equal: int
    num_texts: int
    error: float
    notes: str
    needs: tuple[bool, ...] = ()
    """Whether requests were preempted and whole blocks found, without which the comparison shows less than it should."""

    @property
    def is_right(self) -> bool:
        return self.num_equal == self.num_texts and self.error <= TOLERANCE and all(self.needs)

    def __str__(self) -> str:
        return f"{'ok' if self.is_right else 'WRONG'} {self.num_equal}/{self.num_texts} {self.error:.0e} ({self.notes})"


def main() -> int:
    variants = [*tiny_configs.VARIANTS, *make_encoder_goldens.VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(variants), default=variants, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=300, help="the longest time for a variant (default: 300)")
    parser.add_argument(
        "--goldens", type=Path, help="folder of the goldens that tests/goldens lacks (default: a temporary one)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.goldens or Path(temporary)
        os.environ.setdefault(conftest.COMPILED, f"{temporary}/compiled")
        num_wrong = sum([not check_in_process(name, folder, arguments.seconds) for name in arguments.only])
    print(f"{len(arguments.only) - num_wrong} of {len(arguments.only)} variants are as transformers computes them")
    return int(num_wrong > 0)


def check_in_process(name: str, folder: Path, seconds: float) -> bool:
    """Check in a forked process, which is ended if it takes longer: imports take longer than many variants."""
    context, start = multiprocessing.get_context("fork"), time.monotonic()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(name, folder, sender))
    process.start()
    sender.close()
    try:
        is_right, text = receiver.recv() if receiver.poll(seconds) else (False, f"not done after {seconds:.0f} s")
    except EOFError:
        is_right, text = False, "its process ended"
    process.kill()
    process.join()
    print(f"{name:<22} {text}; {time.monotonic() - start:.0f} s", flush=True)
    return is_right


def tell(name: str, folder: Path, sender: Connection) -> None:
    """Send whether all is right, and what to print of it."""
    conftest.pytest_collection_finish()
    try:
        founds = (check_encoder if name in make_encoder_goldens.VARIANTS else check)(name, folder)
        sender.send(
            (all(found.is_right for found in founds), ", ".join(f"TP {i + 1}: {each}" for i, each in enumerate(founds)))
        )
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        sender.send((False, f"{type(error).__name__}: {error}"))


def golden_of(name: str, folder: Path) -> Path:
    """The folder of a variant's golden, which is written if there is none: of the first seed whose texts have no tie."""
    if name in make_goldens.kept():
        return make_goldens.FOLDER / name
    folder /= name
    if (folder / "golden.json").exists():
        return folder
    import torch

    torch.set_grad_enabled(False)
    config = tiny_configs.VARIANTS[name]
    for seed in range(1, 20):
        model = make_goldens.random_model(config, seed=seed, scale=0.3)
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(config.get_text_config().vocab_size, size=length).tolist() for length in PROMPT_LENGTHS]
        computed = [make_goldens.compute(model, prompt) for prompt in prompts]
        if min(margin for _, margin, _ in computed) > make_goldens.SMALLEST_MARGIN:
            break
    make_goldens.save(model, folder)
    (folder / "golden.json").write_text(json.dumps({"results": [golden for golden, _, _ in computed]}), encoding="utf-8")
    return folder


def check(name: str, folder: Path) -> list[Found]:
    """Engines on one device and on two."""
    directory = golden_of(name, folder)
    results = json.loads((directory / "golden.json").read_text(encoding="utf-8"))["results"]
    return [check_engine(directory, results, size) for size in (1, 2)]


def check_engine(directory: Path, results: list[dict[str, Any]], num_devices: int) -> Found:
    core = make_core(model=str(directory), tensor_parallel_size=num_devices, speculative_config=DRAFTS)
    needed = core.scheduler.cache_manager.num_blocks_for(core.max_model_len)
    engines.reschedule(core, num_blocks=needed + needed // 2 + 1, max_in_flight=3)
    answers = ask(core, results, max_tokens=make_goldens.NEW_TOKENS, prompt_logprobs=0)
    error = max(error_of(*each) for each in zip(answers, results, strict=True))
    is_equal = [answer.tokens == result["tokens"] for answer, result in zip(answers, results, strict=True)]
    num_preemptions, num_accepted = core.stats().num_preemptions, core.stats().num_accepted_tokens
    engines.reschedule(core)
    for _ in ("computed", "found"):  # requests with prompt logprobs do not read the prefix cache
        answers = ask(core, results, max_tokens=FEW)
        is_equal += [answer.tokens == result["tokens"][:FEW] for answer, result in zip(answers, results, strict=True)]
    caches, size = core.config.cache.enable_prefix_caching, core.memory_plan.block_size
    least = core.scheduler.cache_manager.states.least_tokens  # shorter prefixes are not worth the blocks of their states
    core.shutdown()
    num_cached = sum(answer.num_cached_tokens for answer in answers)
    notes = [f"{num_preemptions} preemptions", f"{num_accepted} drafts taken"]
    notes.append(f"{num_cached} tokens found" if caches else "no prefix caching")
    whole_blocks = [len(result["prompt"]) // size * size for result in results]
    is_found = num_cached == sum(length for length in whole_blocks if length >= least) > 0
    return Found(sum(is_equal), len(is_equal), error, ", ".join(notes), (num_preemptions > 0, is_found or not caches))


def make_core(**options: Any) -> EngineCore:
    return EngineCore(EngineConfig.from_options(**{**OPTIONS, **options}))


def ask(core: EngineCore, results: list[dict[str, Any]], **params: Any) -> list[engines.Answer]:
    """The answers to all prompts at once."""
    requests = [engines.request(str(i), result["prompt"], **params) for i, result in enumerate(results)]
    answers = engines.run(core, requests)
    return [answers[each.request_id] for each in requests]


def error_of(answer: engines.Answer, result: dict[str, Any]) -> float:
    """The largest error of the logprobs of a prompt's tokens."""
    assert answer.prompt_logprobs is not None
    return float(np.abs(answer.prompt_logprobs.logprobs[:, 0] - result["prompt_logprobs"]).max(initial=0))


def check_encoder(name: str, folder: Path) -> list[Found]:
    if name in make_encoder_goldens.kept():
        folder = make_encoder_goldens.FOLDER
    elif not (folder / name).exists():
        make_encoder_goldens.write(name, folder)
    results = json.loads((folder / name / "encoder.json").read_text(encoding="utf-8"))["results"]
    return [check_encoder_engine(folder / name, results, size) for size in (1, 2)]


def check_encoder_engine(directory: Path, results: list[dict[str, Any]], num_devices: int) -> Found:
    core = encoders.make_core(directory, tensor_parallel_size=num_devices)
    task = "token_embed" if core.model_config.classifier is None else "classify"
    requests = [encoders.request_of(str(i), result, task=task) for i, result in enumerate(results)]
    answers = engines.run(core, requests)
    core.shutdown()
    errors = [float(np.abs(answers[str(i)].pooled - np.array(result["found"])).max()) for i, result in enumerate(results)]
    return Found(sum(error <= TOLERANCE for error in errors), len(errors), max(errors), f"{task}, nothing generated")


if __name__ == "__main__":
    sys.exit(main())
