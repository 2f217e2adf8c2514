"""Measures blocks in host memory: copies alone, during decodes, and what they save; prints a Markdown table with goals.

usage: bench_tiers.py [MODEL_DIR] [--parts copies,beside,…] [--json FILE] [--markdown FILE] [--tiny] [engine options as name=value …]

copies    GB/s from blocks to host memory and back, by batches of one operation each, on an idle engine, and what each part takes
beside    64 requests decode, without copies, and with a store or a load at all times: time of a step, GB/s
reload    a prompt of 2048 and one of 32768 tokens that is in host memory, in a cache of one and of three such prompts: time to the
          first token, against computing it
reuse     conversations whose contexts are four times the device's cache, in turn: tokens/s with host memory and without
no-reuse  prompts that never come back, in a cache that is too small for them: tokens/s with host memory and without

Weights are random, of Llama-3.1-8B's sizes in bfloat16 unless MODEL_DIR has another config.json. Goals are those of one H200.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from jaxllm import LLM
from jaxllm.device_ops import CopyBlocks, FinishedCopy, GatherBlocks, ScatterBlocks, StageBlocks
from jaxllm.measuring.runs import decoding, greedy, random_prompts
from jaxllm.scheduler_output import SchedulerOutput
from scripts.gpu_checks import shapes
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.parts import HEADER, Row
from scripts.measuring.rows import markdown_table

Prompt = dict[str, list[int]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work."""

    host_gib: float = 40.0
    num_blocks: int = 4096
    """Blocks of the device's cache, in parts whose work is to exceed it."""
    repeats: int = 20
    rows: int = 64
    context: int = 1024
    num_steps: int = 200
    prompts: tuple[int, ...] = (2048, 32768)
    conversations: int = 32
    first: int = 4096
    """Prompt tokens of a conversation's first turn, and in `turn` those of each of the others."""
    turns: int = 9
    turn: int = 512
    new_prompt: int = 2048
    """Tokens of each prompt that never comes back."""
    new_rows: int = 24
    """Requests with such prompts at a time: fewer than fit the cache, so that both engines plan the same steps."""
    num_output: int = 16
    max_model_len: int = 40960


TINY = Sizes(0.05, 24, 3, 2, 32, 10, (100, 200), 6, 60, 2, 60, 60, 2, 8, 320)
TINY_OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "token_buckets": [64],
    "decode_buckets": [4],
    "warmup": "lazy",
}


class Bench:
    """Engines of one model, one after the other, and the rows found so far."""

    def __init__(self, args: argparse.Namespace, directory: str):
        self.args, self.directory = args, directory
        self.sizes = TINY if args.tiny else Sizes()
        self.rows: list[Row] = []

    def note(
        self, name: str, value: float, unit: str, goal: float | None = None, *, more: bool = False, note: str = ""
    ) -> None:
        self.rows.append(Row(name, value, unit, goal, more, note))
        print("  ".join(self.rows[-1].cells()), flush=True)

    def start(self, *, tier: bool = True, **options: Any) -> LLM:
        """An engine, with host memory or without."""
        given = {"load_format": "dummy", "skip_tokenizer_init": True, "use_progress_bar": False, "dtype": "bfloat16"}
        # Programs that are compiled meanwhile take Python's time from copies.
        given |= {"max_model_len": self.sizes.max_model_len, "max_num_seqs": 64, "decode_buckets": [8, 64], "warmup": "all"}
        given |= {"kv_offloading_size": self.sizes.host_gib} if tier else {}
        return LLM(self.directory, **(given | (TINY_OPTIONS if self.args.tiny else {}) | options | dict(self.args.options)))

    # Parts

    def copies(self) -> None:
        """Each operation alone, on an idle engine."""
        llm = self.start(num_gpu_blocks_override=self.sizes.num_blocks)
        copies = Copies(llm)
        batch_bytes = copies.size * copies.copier.block_bytes
        note = f"{copies.size} blocks of {copies.copier.block_bytes / 2**20:.2f} MiB"
        for name, ops, goal in (
            ("device to host", copies.gathers, 44.0),
            ("host to staging", copies.stages, 44.0),
            ("staging to blocks", copies.scatters, None),
        ):
            seconds, inside = zip(*(copies.time(ops()) for _ in range(self.sizes.repeats)), strict=True)
            median = statistics.median(seconds)
            within = statistics.median(inside)
            self.note(
                f"{name}, one batch", batch_bytes / median / 1e9, "GB/s", goal, more=True, note=f"{note}, {1e3 * median:.2f} ms"
            )
            if within:
                self.note(f"{name}, the transfer in it", batch_bytes / within / 1e9, "GB/s")
        began = time.perf_counter()
        count = copies.pipelined_loads(self.sizes.repeats * copies.copier.num_staging)
        self.note(
            "reload, batches in a row", count * batch_bytes / (time.perf_counter() - began) / 1e9, "GB/s", 44.0, more=True
        )
        llm.shutdown()

    def beside(self) -> None:
        """Decodes alone, with stores and with loads."""
        sizes = self.sizes
        llm = self.start()
        copies = Copies(llm)
        prompts = random_prompts([sizes.context] * sizes.rows, copies.core.model_config.vocab_size, 0)
        batch_bytes, alone = copies.size * copies.copier.block_bytes, 0.0
        for name, begin in (("nothing", None), ("stores", copies.gathers), ("loads", copies.stages)):
            copies.forget()
            with decoding(llm.llm_engine, prompts, [greedy(sizes.num_steps + 64)] * sizes.rows) as step:
                seconds, num_copies = [], 0
                for _ in range(sizes.num_steps):
                    began = time.perf_counter()
                    num_copies += copies.go_on(begin)
                    step()
                    seconds.append(time.perf_counter() - began)
            total, ordered = sum(seconds), sorted(seconds)
            mean, tail = 1e3 * total / len(seconds), 1e3 * ordered[int(0.99 * (len(ordered) - 1))]
            alone = alone or mean
            p99 = f"p99 {tail:.2f} ms"
            self.note(f"step of {sizes.rows} decodes, {name}", mean, "ms", 1.1 * alone if begin else None, note=p99)
            if begin:
                self.note(
                    f"{name} meanwhile",
                    num_copies * batch_bytes / total / 1e9,
                    "GB/s",
                    30.0 if name == "loads" else None,
                    more=True,
                )
        llm.shutdown()

    def reload(self) -> None:
        """The first token of prompts that are in host memory, and of those that are new. The cache has room for one prompt of the longest
        length, whose blocks all have to leave for them, and for three."""
        for num_prompts in (1, 3):
            self._reload(num_prompts)

    def _reload(self, num_prompts: int) -> None:
        sizes, goals = self.sizes, {2048: 20.0, 32768: 130.0}
        longest = max(sizes.prompts) + 256
        llm = self.start(num_gpu_blocks_override=num_prompts * longest // 16 + 2, max_model_len=longest)
        core: Any = llm.llm_engine.core
        for length in sizes.prompts:
            computed, loaded = [], []
            for number in range(3):
                prompt, *others = random_prompts([length] + [longest - 16] * num_prompts, core.model_config.vocab_size, number)
                computed.append(first_token_ms(llm, prompt))
                for other in others:
                    first_token_ms(llm, other)
                before = core.stats().num_loaded_blocks
                loaded.append(first_token_ms(llm, prompt))
                if (count := core.stats().num_loaded_blocks - before) < 0.9 * (length // 16):
                    print(f"{count} blocks of {length} tokens were loaded", flush=True)
            note = f"cache of {num_prompts * longest} tokens"
            self.note(f"first token, {length} tokens computed", min(computed), "ms", note=note)
            goal = goals.get(length) if num_prompts > 1 else None
            self.note(f"first token, {length} tokens from host memory", min(loaded), "ms", goal, note=note)
        llm.shutdown()

    def reuse(self) -> None:
        """Conversations in turn, whose contexts do not fit the device together."""
        speeds = {}
        for tier in (False, True):
            llm = self.start(tier=tier, num_gpu_blocks_override=self.sizes.num_blocks)
            speeds[tier], note = self._conversations(llm)
            llm.shutdown()
            self.note(f"conversations, {'with' if tier else 'without'} host memory", speeds[tier], "tokens/s", note=note)
        self.note("gain of host memory", speeds[True] / speeds[False], "×", 3.0, more=True)

    def _conversations(self, llm: LLM) -> tuple[float, str]:
        sizes, core = self.sizes, llm.llm_engine.core
        vocab_size = core.model_config.vocab_size  # type: ignore[attr-defined]
        contexts: list[list[int]] = [[] for _ in range(sizes.conversations)]
        num_tokens, began = 0, time.perf_counter()
        for turn in range(sizes.turns):
            length = sizes.turn if turn else sizes.first
            more = random_prompts([length] * sizes.conversations, vocab_size, turn)
            prompts = [
                {"prompt_token_ids": context + new["prompt_token_ids"]} for context, new in zip(contexts, more, strict=True)
            ]
            outputs = llm.generate(prompts, greedy(sizes.num_output), use_tqdm=False)  # type: ignore[arg-type]
            for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
                contexts[index] = prompt["prompt_token_ids"] + list(output.outputs[0].token_ids)
                num_tokens += sizes.num_output
        stats: Any = core.stats()
        return num_tokens / (
            time.perf_counter() - began
        ), f"{stats.num_loaded_blocks} blocks loaded, {stats.num_skipped_stores} lost"

    def no_reuse(self) -> None:
        """Prompts that never come back."""
        sizes, speeds = self.sizes, {}
        for tier in (False, True):
            llm = self.start(tier=tier, num_gpu_blocks_override=sizes.num_blocks, max_num_seqs=sizes.new_rows)
            prompts = random_prompts(
                [sizes.new_prompt] * 4 * sizes.conversations, llm.llm_engine.core.model_config.vocab_size, 7
            )
            began = time.perf_counter()
            llm.generate(prompts, greedy(sizes.num_output), use_tqdm=False)  # type: ignore[arg-type]
            speeds[tier] = len(prompts) * (sizes.new_prompt + sizes.num_output) / (time.perf_counter() - began)
            stats: Any = llm.llm_engine.core.stats()
            llm.shutdown()
            note = f"{stats.num_stored_blocks} blocks stored, {stats.num_skipped_stores} lost" if tier else ""
            self.note(f"new prompts, {'with' if tier else 'without'} host memory", speeds[tier], "tokens/s", note=note)
        self.note("speed with host memory over without", 100 * speeds[True] / speeds[False], "%", 98.0, more=True)


class Copies:
    """Copies that this script makes, in place of the engine's tier."""

    def __init__(self, llm: LLM):
        self.core: Any = llm.llm_engine.core
        self.core.scheduler.cache_manager.loading = self.core.scheduler.cache_manager.pool.evicting = None
        self.copier = self.core.runner.op_runner(GatherBlocks)
        pool = self.core.scheduler.cache_manager.pool
        self.size = min(self.copier.max_blocks, self.copier.num_slots // 2, pool.num_free_blocks // 2)
        self.blocks = [block.block_id for block in pool.allocate(self.size)]
        self._number = 0
        self._under_way: set[int] = set()
        self._buffer = 0

    def _next(self) -> tuple[int, int, list[int]]:
        self._number += 1
        self._buffer = (self._buffer + 1) % self.copier.num_staging
        first = self._number * self.size % (self.copier.num_slots - self.size)
        return self._number, self._buffer, list(range(first, first + self.size))

    def gathers(self) -> CopyBlocks:
        number, buffer, slots = self._next()
        return GatherBlocks(number, buffer, self.blocks, slots)

    def stages(self) -> CopyBlocks:
        number, buffer, slots = self._next()
        return StageBlocks(number, buffer, slots)

    def scatters(self) -> CopyBlocks:
        """Scatter the buffer that was staged last."""
        stage = self.stages()
        self.time(stage)
        self._number += 1
        return ScatterBlocks(self._number, stage.staging, self.blocks)

    def time(self, op: CopyBlocks) -> tuple[float, float]:
        """Seconds until it is over, and those of the transfer in it."""
        began = time.perf_counter()
        self._dispatch([op])
        while True:
            self.copier.wait(1.0)
            for copy in self._taken():
                if copy.number == op.number:
                    return time.perf_counter() - began, copy.seconds

    def _dispatch(self, ops: Sequence[CopyBlocks]) -> None:
        self.core.runner.dispatch(SchedulerOutput([], [], 0, [], [], ops=tuple(ops))).result()

    def _taken(self) -> list[FinishedCopy]:
        found: list[FinishedCopy] = self.copier.finished()
        for copy in found:
            if copy.error is not None:
                raise copy.error
        return found

    def pipelined_loads(self, count: int) -> int:
        """Stage and scatter, with all buffers in use. Returns the number of batches."""
        buffers, of_buffer, num_done, num_begun = list(range(self.copier.num_staging)), dict[int, tuple[int, bool]](), 0, 0
        while num_done < count:
            ops: list[CopyBlocks] = []
            for copy in self._taken():
                buffer, is_staged = of_buffer.pop(copy.number)
                if is_staged:
                    num_done += 1
                    buffers.append(buffer)
                else:
                    self._number += 1
                    of_buffer[self._number] = buffer, True
                    ops.append(ScatterBlocks(self._number, buffer, self.blocks))
            while buffers and num_begun < count:
                number, _, slots = self._next()
                of_buffer[number] = buffers.pop(), False
                num_begun += 1
                ops.append(StageBlocks(number, of_buffer[number][0], slots))
            if ops:
                self._dispatch(ops)
            elif num_done < count:
                self.copier.wait(1.0)
        return num_done

    def go_on(self, begin: Callable[[], CopyBlocks] | None) -> int:
        """Have the next plan carry copies, for all buffers that are free. Returns how many were over."""
        over = {copy.number for copy in self._taken()}
        self._under_way -= over
        while begin is not None and len(self._under_way) < self.copier.num_staging - 1:
            op = begin()
            self._under_way.add(op.number)
            self.core.ops.add(op)
        return len(over)

    def forget(self) -> None:
        """Wait for what is under way."""
        while self._under_way:
            self.copier.wait(1.0)
            self._under_way -= {copy.number for copy in self._taken()}


def first_token_ms(llm: LLM, prompt: Prompt) -> float:
    """Milliseconds until a prompt has its first token, on an idle engine."""
    began = time.perf_counter()
    llm.generate([prompt], greedy(1), use_tqdm=False)  # type: ignore[list-item]
    return 1e3 * (time.perf_counter() - began)


PARTS: dict[str, Callable[[Bench], None]] = {
    "copies": Bench.copies,
    "beside": Bench.beside,
    "reload": Bench.reload,
    "reuse": Bench.reuse,
    "no-reuse": Bench.no_reuse,
}


def main() -> None:
    """Run the parts, print each row as it is found, then the table. A part that fails is reported, and the others run."""
    parser = script_parser(__doc__, 3)
    parser.add_argument("words", nargs="*", metavar="MODEL_DIR or name=value", help="a model, and engine options")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a machine without a GPU")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_intermixed_args()
    models = [word for word in args.words if "=" not in word]
    args.options = [engine_option(word) for word in args.words if "=" in word]
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))} is unknown; there are {', '.join(PARTS)}")
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        if not models:
            # Random prompts leave out as many ids as there may be special ones.
            config = shapes.tiny(shapes.LLAMA_8B) | {"vocab_size": 2048} if args.tiny else shapes.LLAMA_8B
            Path(directory, "config.json").write_text(json.dumps(config))
        bench = Bench(args, models[0] if models else directory)
        for part in args.parts:
            try:
                PARTS[part](bench)
            except Exception as problem:
                traceback.print_exc()
                failed.append(f"{part} ({type(problem).__name__}: {problem})")
    table = markdown_table(HEADER, [row.cells() for row in bench.rows])
    print(f"\n{jax.devices()[0].device_kind}\n\n{table}")
    if args.markdown:
        args.markdown.write_text(table)
    if args.json:
        args.json.write_text(json.dumps([vars(row) for row in bench.rows], indent=1))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
