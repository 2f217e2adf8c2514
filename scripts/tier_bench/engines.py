"""Engines with host memory and without, which parts share."""

import gc
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from jaxllm import LLM
from jaxllm.measuring.runs import greedy, random_prompts
from jaxllm.scheduler.loading import Loading
from scripts.measuring.parts import Rows
from scripts.tier_bench.sizes import Sizes

Prompt = dict[str, list[int]]


class Engines:
    """The engines of one model that run now. Their caches have fixed numbers of blocks where several run on one device."""

    def __init__(self, model: Path, sizes: Sizes, options: Mapping[str, Any]):
        """options: of all engines; they precede those that a part gives."""
        self._model, self._sizes, self._options = model, sizes, options
        self._running: list[tuple[dict[str, Any], LLM]] = []

    def use(self, *wanted: dict[str, Any]) -> list[LLM]:
        """An engine with host memory for each set of options; `kv_offloading_size` None: without. Those that run with the same options
        stay, all others end first."""
        for options, llm in list(self._running):
            if options not in wanted:
                self._running.remove((options, llm))
                llm.shutdown()
        for options in wanted:
            if options not in [each for each, _ in self._running]:
                self._running.append((options, self._start(options)))
        return [llm for options in wanted for each, llm in self._running if each == options]

    def pair(self, num_blocks: int, **options: Any) -> dict[bool, LLM]:
        """An engine without host memory and one with, by whether it has it, whose caches have so many blocks and are empty."""
        options["num_gpu_blocks_override"] = num_blocks
        without, with_tier = self.use({**options, "kv_offloading_size": None}, options)
        for llm in (without, with_tier):
            empty(llm)
        return {False: without, True: with_tier}

    def close(self) -> None:
        """End all."""
        self.use()

    def _start(self, options: Mapping[str, Any]) -> LLM:
        given = {"load_format": "dummy", "skip_tokenizer_init": True, "use_progress_bar": False, "dtype": "bfloat16"}
        # Programs that are compiled meanwhile take Python's time from copies.
        given |= {"max_model_len": self._sizes.max_model_len, "max_num_seqs": 64, "decode_buckets": [8, 64], "warmup": "all"}
        given |= {"kv_offloading_size": self._sizes.host_gib}
        llm = LLM(str(self._model), **(given | {**options, **self._options}))
        gc.freeze()  # as the process of a server's engine does
        return llm


@dataclass(frozen=True)
class Bench:
    """Engines, sizes and rows of a run."""

    engines: Engines
    sizes: Sizes
    rows: Rows


def new_prompts(llm: LLM, lengths: Sequence[int], seed: int) -> list[Prompt]:
    """Prompts of random tokens."""
    core: Any = llm.llm_engine.core
    return random_prompts(lengths, core.model_config.vocab_size, seed)


def empty(llm: LLM) -> None:
    """Drop what the cache and host memory of an idle engine have. Raises RuntimeError if requests hold blocks."""
    if not llm.llm_engine.core.reset_prefix_cache():
        raise RuntimeError("requests of an earlier part hold blocks")


@contextmanager
def without_tiers(llm: LLM) -> Iterator[None]:
    """Have an engine, whose tiers neither load nor store, plan steps as if it had none."""
    core: Any = llm.llm_engine.core
    manager = core.scheduler.cache_manager
    kept = manager.loading, manager.pool.evicting
    manager.loading = Loading(manager, ())  # which takes nothing that leaves the pool
    try:
        yield
    finally:
        manager.loading, manager.pool.evicting = kept


def run_some_at_a_time(llm: LLM, prompts: Sequence[Prompt], num_output: int, most: int) -> float:
    """Seconds of requests of which so many are in the engine at a time."""
    engine, waiting = llm.llm_engine, deque(enumerate(prompts))
    began = perf_counter()
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < most:
            number, prompt = waiting.popleft()
            engine.add_request(f"request {number}", prompt, greedy(num_output))  # type: ignore[arg-type]
        engine.step()
    return perf_counter() - began


def first_token_ms(llm: LLM, prompt: Prompt) -> float:
    """Milliseconds until a prompt has its first token, on an idle engine."""
    began = perf_counter()
    llm.generate([prompt], greedy(1), use_tqdm=False)  # type: ignore[list-item]
    return 1e3 * (perf_counter() - began)
