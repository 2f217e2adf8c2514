"""Compares whole engines with transformers, for every variant of every family: a line for each, and 1 is returned if one differs.

    python scripts/check_families.py [--only NAME ...] [--seconds N]

Needs torch. An engine on one CPU device and on two write 64 greedy tokens after each of some prompts: all at once, in chunks of 16
tokens, with n-gram drafts and prefix caching, in a pool too small for the rows, and give the prompts' logprobs. Then all prompts are
asked for twice in a large pool, the second time found in the cache; these answers consist of few ids, so that drafts are accepted.
Prompts with their answers go through the model of transformers as a whole, in float64: each token must be its likeliest next one, but
for what rounding changes. Its own generation, which reads a cache, has no part in it, but for ropes that depend on the length. Encoders
and classifiers (`make_encoder_goldens.py`) generate nothing: their vectors and scores are compared. MTP modules are not: transformers
has none.
"""

import argparse
import copy
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
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
NUM_ALLOWED = 4
"""Ids that these consist of."""
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
    """Result of an engine: the number of texts that are right, of all texts, the largest error of logprobs, and counts to print."""

    num_right: int
    num_texts: int
    error: float
    notes: str
    needs: tuple[bool, ...] = ()
    """Whether requests were preempted, drafts accepted and whole blocks found, without which the comparison shows less than it should."""

    @property
    def is_right(self) -> bool:
        return self.num_right == self.num_texts and self.error <= TOLERANCE and all(self.needs)

    def __str__(self) -> str:
        return f"{'ok' if self.is_right else 'WRONG'} {self.num_right}/{self.num_texts} {self.error:.0e} ({self.notes})"


def main() -> int:
    variants = [*tiny_configs.VARIANTS, *make_encoder_goldens.VARIANTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(variants), default=variants, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=300, help="the longest time for a variant (default: 300)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(conftest.COMPILED, f"{folder}/compiled")
        num_wrong = sum([not check_in_process(name, Path(folder), arguments.seconds) for name in arguments.only])
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


class Reference:
    """A model of transformers, in float64."""

    def __init__(self, exact: Any):
        self._exact = exact
        self._logprobs = cache(self._compute)

    @classmethod
    def saved(cls, name: str, directory: Path, prompts: Sequence[list[int]]) -> "Reference":
        """With the first seed that float32 rounds little, else the least of some; its checkpoint is written to the directory."""
        import torch

        torch.set_grad_enabled(False)
        least = np.inf
        for seed in range(1, 20):
            model = make_goldens.random_model(tiny_configs.VARIANTS[name], seed=seed, scale=0.3)
            exact, low = cls(copy.deepcopy(model).double()), cls(model)
            rounding = max(np.abs(exact.logprobs(prompt) - low.logprobs(prompt)).max() for prompt in prompts)
            if rounding < least:
                least, found, chosen = rounding, exact, model
            if least < TOLERANCE / 2:
                break
        make_goldens.save(chosen, directory)
        return found

    def logprobs(self, tokens: Sequence[int]) -> np.ndarray:
        """[T, V] of the token after each of these."""
        return self._logprobs(tuple(tokens))

    def _compute(self, tokens: tuple[int, ...]) -> np.ndarray:
        import torch

        if self._depends_on_length:
            kept, steps = None, []
            for token in tokens:
                out = self._exact(torch.tensor([[token]]), past_key_values=kept, use_cache=True)
                kept, steps = out.past_key_values, [*steps, out.logits[0]]
            logits = torch.cat(steps)
        else:
            logits = self._exact(torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), -1).numpy()

    @property
    def _depends_on_length(self) -> bool:
        """Whether how a position is turned depends on the length that a pass has. Then it goes token by token, as generation does."""
        rope = getattr(self._exact.config.get_text_config(), "rope_parameters", None) or {}
        return rope.get("rope_type") == "dynamic" and not rope.get("alpha")

    def is_greedy(self, prompt: list[int], answer: list[int], length: int, allowed: Collection[int] | None = None) -> bool:
        """Whether an answer has this length and each of its tokens is the likeliest of the allowed ones, within the tolerance."""
        ids = slice(None) if allowed is None else sorted(allowed)
        after = self.logprobs([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        chosen = after[np.arange(len(answer)), answer]
        is_allowed = allowed is None or {*answer} <= {*allowed}
        return len(answer) == length and is_allowed and bool((chosen >= after[:, ids].max(axis=1) - 2 * TOLERANCE).all())

    def error(self, prompt: list[int], answer: engines.Answer) -> float:
        """The largest error of the logprobs of a prompt's tokens."""
        assert answer.prompt_logprobs is not None
        expected = self.logprobs(prompt)[np.arange(len(prompt) - 1), prompt[1:]]
        return float(np.abs(answer.prompt_logprobs.logprobs[:, 0] - expected).max(initial=0))


def check(name: str, folder: Path) -> list[Found]:
    """Engines on one device and on two."""
    vocab_size = tiny_configs.VARIANTS[name].get_text_config().vocab_size
    rng = np.random.default_rng(1)
    prompts = [rng.integers(vocab_size, size=length).tolist() for length in PROMPT_LENGTHS]
    allowed = rng.choice(vocab_size, NUM_ALLOWED, replace=False).tolist()
    reference = Reference.saved(name, folder / name, prompts)
    return [check_engine(folder / name, reference, prompts, allowed, size) for size in (1, 2)]


def check_engine(
    directory: Path, reference: Reference, prompts: list[list[int]], allowed: list[int], num_devices: int
) -> Found:
    core = make_core(model=str(directory), tensor_parallel_size=num_devices, speculative_config=DRAFTS)
    drafts = core.scheduler.drafts
    drafts.most = lambda *running: drafts.num_drafts  # also where steps with them take longer than they save
    needed = core.scheduler.cache_manager.num_blocks_for(core.max_model_len)
    engines.reschedule(core, num_blocks=needed + needed // 2, max_in_flight=3)
    length = make_goldens.NEW_TOKENS
    answers = ask(core, prompts, max_tokens=length, prompt_logprobs=0)
    error = max(map(reference.error, prompts, answers))
    is_right = [reference.is_greedy(*each, length) for each in zip(prompts, tokens_of(answers), strict=True)]
    num_preemptions = core.stats().num_preemptions
    engines.reschedule(core)
    for _ in ("computed", "found"):  # requests with prompt logprobs do not read the prefix cache
        answers = ask(core, prompts, max_tokens=FEW, allowed_token_ids=allowed)
        is_right += [reference.is_greedy(*each, FEW, allowed) for each in zip(prompts, tokens_of(answers), strict=True)]
    num_accepted = core.stats().num_accepted_tokens
    caches, size = core.config.cache.enable_prefix_caching, core.memory_plan.block_size
    least = core.scheduler.cache_manager.states.least_tokens  # shorter prefixes are not worth the blocks of their states
    core.shutdown()
    num_cached = sum(answer.num_cached_tokens for answer in answers)
    notes = [f"{num_preemptions} preemptions", f"{num_accepted} drafts taken"]
    notes.append(f"{num_cached} tokens found" if caches else "no prefix caching")
    whole_blocks = [len(prompt) // size * size for prompt in prompts]
    is_found = num_cached == sum(length for length in whole_blocks if length >= least) > 0
    needs = (num_preemptions > 0, num_accepted > 0, is_found or not caches)
    return Found(sum(is_right), len(is_right), error, ", ".join(notes), needs)


def make_core(**options: Any) -> EngineCore:
    return EngineCore(EngineConfig.from_options(**{**OPTIONS, **options}))


def ask(core: EngineCore, prompts: list[list[int]], **params: Any) -> list[engines.Answer]:
    """The answers to all prompts at once."""
    requests = [engines.request(str(i), prompt, **params) for i, prompt in enumerate(prompts)]
    answers = engines.run(core, requests)
    return [answers[each.request_id] for each in requests]


def tokens_of(answers: list[engines.Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


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
