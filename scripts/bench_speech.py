"""Measures speech through `LLM` with dummy weights of Whisper large-v3-turbo's sizes; prints a Markdown table.

usage: bench_speech.py [MODEL_DIR] [--model NAME] [--parts encode,decode,…] [--seconds N] [--json FILE] [engine options as name=value …]

first     what a clip waits for its first token: of the engine's first request, and of later ones, from features and from samples
programs  wait until all programs are made, before all parts that follow, whether named or not
encode    the program that encodes a clip, for 1 and 8 clips one after the other
decode    time of a token of 1 and of 64 requests that decode
together  64 clips with 100 output tokens each, all given at once: seconds of audio a second
prepare   a clip from samples to features, on one core

Clips are as long as the model hears at a time, 30 seconds, each new, prepared before the clock starts except where said. MODEL_DIR holds
the config.json of a Whisper; without it --model says whose sizes (--tiny: toy sizes).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

from jaxllm import LLM
from jaxllm.measuring.runs import end_all, greedy, time_decodes, time_first_token, time_generation
from jaxllm.media import Media
from jaxllm.media.features import log_mel
from jaxllm.model_parts.audio import SAMPLE_RATE
from jaxllm.runner.features.audio.programs import EncodeClip
from jaxllm.runner.programs.key import ProgramKey
from scripts.measuring import hearing_models
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.parts import Rows, run_parts

MODELS = {
    "whisper-large-v3-turbo": hearing_models.WHISPER_LARGE_V3_TURBO,
    "whisper-large-v3": hearing_models.WHISPER_LARGE_V3,
    "whisper-small": hearing_models.WHISPER_SMALL,
}
PROMPT_LENGTH = 4
"""Tokens before a transcript: start, language, task, and whether it has times."""
Prompt = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work."""

    clips: tuple[int, ...] = (1, 8)
    """Clips that are encoded one after the other."""
    repeats: int = 20
    rows: int = 64
    steps: int = 128
    """Decode steps that are timed."""
    num_output: int = 100


TINY = Sizes(repeats=2, rows=4, steps=4, num_output=5)
TINY_OPTIONS = {"dtype": "float32", "token_buckets": [16], "decode_buckets": [4], "warmup": "lazy"}


class Bench:
    """One engine that hears, and the rows found so far."""

    def __init__(self, args: argparse.Namespace, directory: Path):
        self.sizes = TINY if args.tiny else Sizes()
        self.rows = Rows(directory.name, args.json)
        self.note = self.rows.note
        self._random = np.random.default_rng(1)
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "use_progress_bar": False, "dtype": "bfloat16"}
        options |= {"max_num_seqs": self.sizes.rows, **(TINY_OPTIONS if args.tiny else {}), **dict(args.options)}
        began = time.perf_counter()
        self.llm: Any = LLM(model=str(directory), **options)
        self.ready = time.perf_counter()
        self.note(f"engine start, {len(self.core.runner.programs)} programs", self.ready - began, "s")

    # Prompts

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.core

    @property
    def audio(self) -> Any:
        return self.core.model_config.audio

    @property
    def clip_seconds(self) -> float:
        return self.audio.num_samples / SAMPLE_RATE  # type: ignore[no-any-return]

    def samples(self) -> np.ndarray:
        """Noise, as long as the model hears at a time."""
        return self._random.normal(0, 0.1, self.audio.num_samples).astype(np.float32)

    def prompts(self, count: int, *, prepared: bool = True) -> list[Prompt]:
        """Prompts of new clips."""
        ids = list(range(PROMPT_LENGTH))
        made = [{"prompt_token_ids": ids, "multi_modal_data": {"audio": self.samples()}} for _ in range(count)]
        return self.engine.input_processor.media.prepared(made) if prepared else made  # type: ignore[no-any-return]

    # Parts

    def first(self) -> None:
        (prompt,) = self.prompts(1)
        waited, name = time.perf_counter() - self.ready, f"first token of a clip of {self.clip_seconds:g} s"
        note = f"{waited:.1f} s after the start"
        self.note(f"{name}, the engine's first request", 1e3 * time_first_token(self.engine, prompt), "ms", note=note)
        for told, prepared in (("", True), (", from samples", False)):
            times = [time_first_token(self.engine, *self.prompts(1, prepared=prepared)) for _ in range(10)]
            note = f"longest of {len(times)}: {1e3 * max(times):.1f} ms"
            self.note(name + told, 1e3 * float(np.median(times)), "ms", note=note)

    def programs(self) -> None:
        began = time.perf_counter()
        self.engine.finish_compiling()
        self.note(f"wait for all {len(self.core.runner.programs)} programs", time.perf_counter() - began, "s")

    def encode(self) -> None:
        runner = self.core.runner
        program = runner.programs.get(ProgramKey(EncodeClip.name))
        first = len(runner.shapes.cache.arrays)
        inputs = [
            runner.put(tuple(map(runner.ranks.repeated, (log_mel(self.samples(), self.audio), np.array([row], np.int32)))))
            for row in range(min(self.sizes.rows, max(self.sizes.clips)))
        ]

        def run(count: int) -> float:
            """Seconds."""
            began = time.perf_counter()
            for i in range(count):
                states = program(runner.params, runner.caches[first:], *inputs[i % len(inputs)])
                runner.caches = (*runner.caches[:first], *states)
            jax.block_until_ready(runner.caches)
            return time.perf_counter() - began

        run(1)  # does not count
        for count in self.sizes.clips:
            ms = 1e3 * float(np.median([run(count) for _ in range(self.sizes.repeats)]))
            note = f"{ms / count:.2f} ms a clip, {1e3 * count * self.clip_seconds / ms:,.0f} s of audio a second"
            self.note(f"encode {count} clip{'s' * (count > 1)} of {self.clip_seconds:g} s", ms, "ms", note=note)

    def decode(self) -> None:
        most = self.core.max_model_len - PROMPT_LENGTH
        for rows in (1, self.sizes.rows):
            prompts, params = self.prompts(rows), [greedy(most)] * rows
            runs = [time_decodes(self.engine, prompts, params, num_steps=self.sizes.steps) for _ in range(3)]
            best = min(runs, key=lambda run: run.seconds)
            ms = 1e3 * best.seconds / best.num_steps
            note = f"{rows * 1e3 / ms:,.0f} tokens/s at {best.mean_context:.0f} tokens" + f"; {best.note}" * bool(best.note)
            self.note(f"decode step of {rows} request{'s' * (rows > 1)}", ms, "ms", note=note)

    def together(self) -> None:
        rows, num_output = self.sizes.rows, self.sizes.num_output
        title = f"{rows} clips of {self.clip_seconds:g} s, {num_output} output tokens each"
        self._generate(self.prompts(rows), num_output)  # does not count
        for told, prepared in (("", True), (", from samples", False)):
            seconds = self._generate(self.prompts(rows, prepared=prepared), num_output)
            note = f"{rows / seconds:.1f} requests/s, {rows * num_output / seconds:,.0f} tokens/s, {seconds:.2f} s"
            self.note(title + told, rows * self.clip_seconds / seconds, "s of audio a second", note=note)

    def _generate(self, prompts: Sequence[Prompt], num_output: int) -> float:
        """Seconds of requests that are given at once."""
        return time_generation(self.llm, prompts, [greedy(num_output)] * len(prompts))[0]

    def prepare(self) -> None:
        processor, times = self.engine.input_processor.media.speech, []
        for _ in range(6):
            samples = self.samples()
            began, wall = time.process_time(), time.perf_counter()
            num_bytes = len(processor.process(Media("audio", samples)).payload)
            times.append((time.process_time() - began, time.perf_counter() - wall))
        core, wall = (1e3 * float(np.median(each)) for each in zip(*times[1:], strict=True))
        note = f"{num_bytes / 1e6:.2f} MB to the engine; {wall:.1f} ms of wall time"
        self.note(f"prepare {self.clip_seconds:g} s from samples, one core", core, "ms", note=note)


PARTS = ("first", "programs", "encode", "decode", "together", "prepare")


def main() -> None:
    """Measure the parts. A part that fails is reported, and the others run."""
    parser = script_parser(__doc__, 3)
    parser.add_argument("words", nargs="*", metavar="MODEL_DIR or name=value", help="a model, and engine options")
    parser.add_argument("--model", choices=MODELS, default=next(iter(MODELS)), help="whose sizes, without MODEL_DIR")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=240.0, help="no part begins after this")
    parser.add_argument("--part-seconds", type=float, default=90.0, help="a part that takes longer is ended")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a machine without a GPU")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_intermixed_args()
    models = [word for word in args.words if "=" not in word]
    args.options = [engine_option(word) for word in args.words if "=" in word]
    if len(models) > 1:
        parser.error(f"one model at a time, not {', '.join(models)}")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))} is unknown; there are {', '.join(PARTS)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(models[0]) if models else Path(directory, args.model)
        if not models:
            config = MODELS[args.model]
            hearing_models.write(model, hearing_models.tiny(config) if args.tiny else config)
        bench = Bench(args, model)
        parts = {part: getattr(bench, part) for part in PARTS if part in (*args.parts, "programs")}
        limits = {"seconds": args.seconds - (time.monotonic() - began), "part_seconds": args.part_seconds}
        left_out = run_parts(parts, **limits, after_failure=lambda: end_all(bench.engine))
        bench.llm.shutdown()
    table = bench.rows.table()
    print(f"\n{table}\n{time.monotonic() - began:.0f} s in all")
    if args.markdown:
        args.markdown.write_text(table)
    if left_out:
        sys.exit(f"left out: {'; '.join(left_out)}")


if __name__ == "__main__":
    main()
