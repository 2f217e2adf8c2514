"""Measures images in prompts through `LLM` with dummy weights of Qwen3-VL-8B's sizes; prints a Markdown table with goals.

usage: bench_images.py [MODEL_DIR] [--parts encode,between,…] [--seconds N] [--json FILE] [--markdown FILE] [engine options as name=value …]

first     a request with an image of 1920 x 1080 on an engine that has just started: what it waits for its first token, and the longest
          time between tokens of a text that decodes meanwhile; then both again, with the programs there
programs  wait until all programs are made, before all parts that follow, whether named or not
encode    the program that encodes 256, 1024, 8160 (1920 x 1080) and 16384 patches alone, and its share of a large bf16 product's speed
between   64 requests decode while four images of 1024 x 1024 arrive a second: time between tokens, against none and against texts;
          set max_num_batched_tokens and mm_max_decode_step_patches, the most that a step computes while others decode
together  64 requests with an image of 1024 x 1024 each, 128 output tokens, all given at once
same      an image of 1920 x 1080 in 100 requests with different questions: patches encoded, cached tokens, time to the first token
prepare   an image of 1920 x 1080 from file and from pixels to patches, on one core
text      prompts of text alone, against a model of the text model's sizes that sees no images: 1 and 64 decodes at 1024, 64 x 1024

Images are random pixels, each new, prepared before the clock starts except where said; prompts are random token ids. MODEL_DIR holds
the config.json and preprocessor_config.json of a Qwen3-VL (default: the sizes of Qwen3-VL-8B; --tiny: toy sizes). Goals are those for
the whole of Qwen3-VL-8B on one H200 (of encoding on an H100 too).
"""

import argparse
import io
import itertools
import json
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
from PIL import Image

from jaxllm import LLM
from jaxllm.http_client.datasets import PromptWriter
from jaxllm.measuring.limits import measure_ceilings
from jaxllm.measuring.runs import SETTLING_STEPS, decoding, end_all, greedy, time_decodes, time_first_token, time_generation
from jaxllm.media import Media
from jaxllm.parallel.topology import Topology
from jaxllm.runner.features.images.packing import EncoderInput
from jaxllm.runner.features.images.programs import Encode
from jaxllm.runner.features.images.step import Images
from jaxllm.runner.memory import reserve_device_memory
from scripts.measuring import seeing_models
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.parts import Rows, device, run_parts

Prompt = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; images are (width, height) in pixels."""

    large: tuple[int, int] = (1920, 1080)
    medium: tuple[int, int] = (1024, 1024)
    patches: tuple[int, ...] = (256, 1024, 8160, 16384)
    repeats: int = 20
    """Runs of each program that encodes."""
    rows: int = 64
    seconds: float = 8.0
    """Duration of decodes with images, and of those without."""
    images_per_second: float = 4.0
    num_output: int = 128
    num_same: int = 100
    context: int = 1024
    steps: int = 128
    max_model_len: int = 4096


TINY = Sizes((256, 160), (64, 64), (16, 256), 2, 2, 0.3, 20.0, 8, 5, 32, 8, 1024)
TINY_OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "token_buckets": [64],
    "decode_buckets": [4],
    "num_gpu_blocks_override": 400,
    "mm_max_patches": 256,
    "mm_processor_kwargs": {"min_pixels": 1024},
    "warmup": "lazy",
}


class Bench:
    """One engine that sees images, and the rows found so far."""

    def __init__(self, args: argparse.Namespace, directory: Path):
        self.args, self.directory = args, directory
        self.sizes = TINY if args.tiny else Sizes()
        self.rows = Rows(directory.name, args.json)
        self.note = self.rows.note
        self.config = json.loads((directory / "config.json").read_text())
        self._random, self._numbers = np.random.default_rng(1), itertools.count()
        # The ceilings start the device, the engine comes after.
        reserve_device_memory(dict(args.options).get("gpu_memory_utilization", 0.92), Topology(1))
        self.gemm_flops = measure_ceilings(tiny=args.tiny).gemm_flops_per_second
        began = time.perf_counter()
        self.llm = self.start(directory)
        self.ready = time.perf_counter()
        self.note(f"engine start, {len(self.core.runner.programs)} programs", self.ready - began, "s")

    def start(self, directory: Path) -> Any:
        options = {"load_format": "dummy", "skip_tokenizer_init": True, "use_progress_bar": False}
        options |= {"max_model_len": self.sizes.max_model_len, "max_num_seqs": 256, "dtype": "bfloat16"}
        sees = "vision_config" in json.loads((directory / "config.json").read_text())
        tiny = {name: value for name, value in TINY_OPTIONS.items() if sees or not name.startswith("mm_")}
        return LLM(model=str(directory), **(options | (tiny if self.args.tiny else {}) | dict(self.args.options)))

    # Prompts

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.core

    @property
    def vision(self) -> Any:
        return self.core.model_config.vision

    def pixels(self, size: tuple[int, int]) -> np.ndarray:
        """Random pixels, in squares of 8: photos do not change at random from pixel to pixel."""
        width, height = size
        coarse = self._random.integers(0, 256, (-(-height // 8), -(-width // 8), 3), dtype=np.uint8)
        return coarse.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]

    def ids(self, length: int) -> list[int]:
        """Random ids, none of them special."""
        return PromptWriter(self._random, self.config["image_token_id"]).ids(length)

    def image(self, size: tuple[int, int], question: int = 32, *, prepared: bool = True) -> Prompt:
        """A prompt of a new image, and a text behind it."""
        start, end = self.config["vision_start_token_id"], self.config["vision_end_token_id"]
        ids = [*self.ids(4), start, self.vision.image_token_id, end, *self.ids(question)]
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {"image": [self.pixels(size)]}}
        return self.engine.input_processor.media.prepared([prompt])[0] if prepared else prompt  # type: ignore[no-any-return]

    def num_tokens(self, prompt: Prompt) -> int:
        """Tokens of a prompt with one prepared image."""
        return len(prompt["prompt_token_ids"]) - 1 + prompt["multi_modal_data"]["image"][0].num_tokens  # type: ignore[no-any-return]

    # Parts

    def first(self) -> None:
        name = "first token of {} x {}, {{}}".format(*self.sizes.large)
        for which in ("the engine's first", "the second"):
            large, programs = self.image(self.sizes.large), self.core.executor.programs
            waited, held_up = time.perf_counter() - self.ready, self.core.num_compiled_after_warmup
            made = programs.num_compiled + programs.num_loaded
            seconds, gaps, deferred = self._first_beside_text(large)
            held_up = self.core.num_compiled_after_warmup - held_up
            made = programs.num_compiled + programs.num_loaded - made
            note = f"{waited:.1f} s after the start; it waited {deferred:.1f} s for programs; {made} made meanwhile"
            self.note(name.format(which), 1e3 * seconds, "ms", note=note)
            note = f"{len(gaps)} of them, median {1e3 * np.median(gaps):.1f} ms; steps waited for {held_up} programs"
            self.note(f"longest time between tokens of a text beside {which}", 1e3 * gaps.max(), "ms", note=note)

    def _first_beside_text(self, image: Prompt) -> tuple[float, np.ndarray, float]:
        """Seconds until a request with an image has a token, while a text decodes; the times between tokens of the text meanwhile; and for
        how many of these seconds the image waited for programs."""
        text, name, began, last = self._decode_text(), "", 0.0, 0.0
        gaps: list[float] = []
        seconds = deferred = 0.0
        while not seconds:
            if not began and len(gaps) == SETTLING_STEPS:
                began, gaps = time.perf_counter(), []
                name = self._add(image, 2)
            outputs, now = self.core.step(), time.perf_counter()
            self.engine.take(outputs)
            for output in outputs:
                if output.request_id == name and output.new_token_ids and not seconds:
                    seconds = now - began
                if output.request_id == text and output.new_token_ids:
                    gaps, last = [*gaps, now - last] if last else [], now
                if output.request_id == text and output.finish_reason:
                    text = self._decode_text()
            if began and self.core.stats().num_deferred:
                deferred = now - began
        gaps.append(time.perf_counter() - last)  # a step may give the image a token and none to the text
        end_all(self.engine)
        return seconds, np.array(gaps), deferred

    def _decode_text(self) -> str:
        """Queue a text of the longest output. Returns its id in the core."""
        length = self.sizes.context // 16
        return self._add({"prompt_token_ids": self.ids(length)}, self.sizes.max_model_len - length)

    def _add(self, prompt: Prompt, num_output: int) -> str:
        """Queue a request. Returns its id in the core."""
        self.engine.add_request(f"request {next(self._numbers)}", prompt, greedy(num_output))
        return next(reversed(self.core.scheduler.requests))  # type: ignore[no-any-return]

    def programs(self) -> None:
        began = time.perf_counter()
        self.engine.finish_compiling()
        self.note(f"wait for all {len(self.core.runner.programs)} programs", time.perf_counter() - began, "s")

    def encode(self) -> None:
        runner = self.core.runner
        images, kind = runner.shapes.functions.get(Images), runner.shapes.kinds[Encode.name]
        goals = {8160: 45.0 if "H200" in device() else 60.0}
        for num_patches in self.sizes.patches:
            if num_patches > kind.sizes[-1]:
                continue
            given, keys = self._input(num_patches), kind.keys(images.sizes.program_size(num_patches))
            began = time.perf_counter()
            parts = [(key, runner.programs.get(key), kind.arrays(key, [given])) for key in keys]
            compiled = time.perf_counter() - began
            ms, ms_with_copy = self._encode_ms(kind, parts)
            share = encode_flops(self.vision, num_patches) / (ms / 1e3) / self.gemm_flops
            note = f"segment attention {images.kernels.segment_attention}; {share:.1%} of a product's speed; "
            note += f"{ms_with_copy:.2f} ms with pixels from the host; made in {compiled:.1f} s"
            title = f"encode {num_patches} patches (programs of {keys[0].size}: {len(keys)})"
            self.note(title, ms, "ms", goals.get(num_patches), note=note)
            if len(keys) > 1:
                of_parts = [self._encode_ms(kind, [part])[0] for part in parts]
                note = f"the first {of_parts[0]:.2f} ms, the last {of_parts[-1]:.2f} ms"
                self.note(f"encode {num_patches} patches: the longest part", max(of_parts), "ms", note=note)

    def _input(self, num_patches: int) -> Any:
        merge = self.vision.merge_size
        cells = num_patches // merge**2
        rows = next(rows for rows in range(int(cells**0.5), 0, -1) if cells % rows == 0)
        patches = self._random.integers(0, 256, (num_patches, 3 * self.vision.patch_size**2), dtype=np.uint8)
        return EncoderInput((1, rows * merge, cells // rows * merge), patches, np.arange(cells, dtype=np.int32))

    def _encode_ms(self, kind: Encode, parts: Sequence[tuple[Any, Any, Any]]) -> tuple[float, float]:
        """Milliseconds of an image back to back with its inputs on the device, and of it alone from the host's arrays on. parts: key,
        program and host arrays of each."""
        runner = self.core.runner

        def run(parts: Sequence[tuple[Any, Any, Any]]) -> Any:
            for key, program, given in parts:
                kind.run(runner, key, program, given)
            return runner.row_arrays.of_features

        on_device = [(key, program, jax.block_until_ready(runner.put(given))) for key, program, given in parts]
        times = []
        for _ in range(4):  # the first does not count
            began = time.perf_counter()
            for _ in range(self.sizes.repeats):
                arrays = run(on_device)
            jax.block_until_ready(arrays)
            times.append((time.perf_counter() - began) / self.sizes.repeats)
        alone = []
        for _ in range(self.sizes.repeats):
            began = time.perf_counter()
            jax.block_until_ready(run(parts))
            alone.append(time.perf_counter() - began)
        return 1e3 * min(times[1:]), 1e3 * float(np.median(alone))

    def between(self) -> None:
        count = round(self.sizes.seconds * self.sizes.images_per_second)
        images = [self.image(self.sizes.medium) for _ in range(count + 4)]
        texts = [{"prompt_token_ids": self.ids(self.num_tokens(images[0]))} for _ in images]
        self._between(images[:4], self.sizes.seconds / 4)  # does not count
        arriving = {"nothing": [], "texts": texts, "images": images[4:]}
        found = {name: self._between(prompts, self.sizes.seconds) for name, prompts in arriving.items()}
        p50, p99 = (1e3 * float(np.percentile(found["nothing"], each)) for each in (50, 99))
        sizes = self.core.runner.shapes.functions.get(Images).sizes
        most = f"{sizes.max_decode_patches or sizes.max_step_patches} patches, {self.core.scheduler.limits.max_num_batched_tokens} tokens"
        for name, times in found.items():
            goals = {99: round(2 * p99, 2)} if name == "images" else {}
            for each in (50, 99):
                ms = 1e3 * float(np.percentile(times, each))
                note = f"{ms / (p50 if each == 50 else p99):.2f} times that without; longest {1e3 * times.max():.1f} ms"
                note += f"; a step has at most {most}" if name != "nothing" else ""
                title = f"between tokens of {self.sizes.rows} requests, p{each}, {name} arriving"
                self.note(title, ms, "ms", goals.get(each), note=note)

    def _between(self, arriving: Sequence[Prompt], seconds: float) -> np.ndarray:
        """All times between two tokens of requests that decode, while other prompts arrive at even times for so many seconds."""
        rows, context = self.sizes.rows, self.sizes.context
        prompts = [{"prompt_token_ids": self.ids(context)} for _ in range(rows)]
        found: list[float] = []
        with decoding(self.engine, prompts, [greedy(self.sizes.max_model_len - context)] * rows) as step:
            last: dict[str, float] = {}
            decodes = {request.request_id for request in self.core.scheduler.running}
            begin = time.perf_counter()
            due = [(begin + seconds * i / len(arriving), prompt) for i, prompt in enumerate(arriving)]
            while (now := time.perf_counter()) < begin + seconds:
                while due and due[0][0] <= now:
                    self.engine.add_request(f"arrives {next(self._numbers)}", due.pop(0)[1], greedy(8))
                outputs, now = step(), time.perf_counter()
                for output in outputs:
                    if output.new_token_ids and output.request_id in decodes:
                        found += [now - last[output.request_id]] if output.request_id in last else []
                        last[output.request_id] = now
            if len(decodes & {request.request_id for request in self.core.scheduler.running}) < rows:
                raise RuntimeError("requests that decode ended or waited meanwhile: raise max_model_len")
        return np.array(found)

    def together(self) -> None:
        rows, num_output = self.sizes.rows, self.sizes.num_output
        title = f"{rows} requests, an image of {{}} x {{}} each, {num_output} output tokens".format(*self.sizes.medium)
        self._generate([self.image(self.sizes.medium) for _ in range(rows)], num_output)  # does not count
        for told, prepared in (("", True), (", from pixels", False)):
            seconds = self._generate([self.image(self.sizes.medium, prepared=prepared) for _ in range(rows)], num_output)
            note = f"{rows / seconds:.1f} images/s, {seconds:.2f} s"
            self.note(title + told, rows * num_output / seconds, "tokens/s", note=note)

    def _generate(self, prompts: Sequence[Prompt], num_output: int) -> float:
        """Seconds of requests that are given at once."""
        return time_generation(self.llm, prompts, [greedy(num_output)] * len(prompts))[0]

    def same(self) -> None:
        image, count = self.image(self.sizes.large), self.sizes.num_same
        beginning, length = image["prompt_token_ids"][:-32], self.num_tokens(image) - 32
        text = self.ids(length)
        prompts = [{**image, "prompt_token_ids": beginning + self.ids(32)} for _ in range(count)]
        texts = [{"prompt_token_ids": text + self.ids(32)} for _ in range(count)]
        for prompt in (self.image(self.sizes.large), {"prompt_token_ids": self.ids(length)}):
            time_first_token(self.engine, prompt)  # does not count
        before = self.core.stats()
        new, *seen = (time_first_token(self.engine, prompt) for prompt in prompts)
        after = self.core.stats()
        encoded = after.num_encoded_patches - before.num_encoded_patches
        wanted = image["multi_modal_data"]["image"][0].num_embeddings * self.vision.merge_size**2
        cached = (after.prefix_cache_hits - before.prefix_cache_hits) / (count - 1)
        title = f"an image of {{}} x {{}} in {count} requests".format(*self.sizes.large)
        self.note(f"{title}: encoded", encoded / wanted, "times", 1, note=f"{encoded} patches")
        self.note(f"{title}: tokens from cached prefixes", cached, f"of {length + 32}", length - 64, more=True)
        new_text, *seen_texts = (time_first_token(self.engine, text) for text in texts)
        for name, found, of_text in (("first", [new], [new_text]), ("others", seen, seen_texts)):
            ms, ms_of_text = (1e3 * float(np.median(each)) for each in (found, of_text))
            self.note(f"{title}: first token, {name}", ms, "ms", note=f"text of that length {ms_of_text:.1f} ms")

    def prepare(self) -> None:
        processor, size = self.engine.input_processor.media._processor, self.sizes.large
        for name in ("pixels", "JPEG", "PNG"):
            times, num_bytes = [], 0
            for _ in range(6):
                data: Any = self.pixels(size)
                if name != "pixels":
                    Image.fromarray(data).save(file := io.BytesIO(), name, quality=90)
                    data = file.getvalue()
                began, wall = time.process_time(), time.perf_counter()
                num_bytes = len(processor.process(Media("image", data)).payload)
                times.append((time.process_time() - began, time.perf_counter() - wall))
            core, wall = (1e3 * float(np.median(each)) for each in zip(*times[1:], strict=True))
            note = f"{num_bytes / 1e6:.2f} MB to the engine; {wall:.1f} ms of wall time"
            self.note(f"prepare {size[0]} x {size[1]} from {name}, one core", core, "ms", 60, note=note)

    def text(self) -> None:
        seeing = self._texts()
        self.llm.shutdown()
        with tempfile.TemporaryDirectory() as directory:
            self.llm = self.start(seeing_models.write(Path(directory, "twin"), seeing_models.text_twin(self.config)))
            self.programs()
            for name, ms_of_twin in self._texts().items():
                title, note = (
                    f"text alone, {name}: speed against a model that sees no images",
                    f"{seeing[name]:.3f} ms, {ms_of_twin:.3f} ms",
                )
                self.note(title, ms_of_twin / seeing[name], "×", 0.99, more=True, note=note)
            self.llm.shutdown()

    def _texts(self) -> dict[str, float]:
        """Milliseconds of a decode step and of a prefill."""
        sizes, found = self.sizes, {}
        for rows in (1, sizes.rows):
            lengths = [sizes.context] * rows
            params = [greedy(sizes.max_model_len - sizes.context)] * rows
            runs = []
            for _ in range(3):
                prompts = [{"prompt_token_ids": self.ids(length)} for length in lengths]
                runs.append(time_decodes(self.engine, prompts, params, num_steps=sizes.steps))
            found[f"decode {rows} at {sizes.context}"] = min(1e3 * run.seconds / run.num_steps for run in runs)
        prefills = [
            self._generate([{"prompt_token_ids": self.ids(sizes.context)} for _ in range(sizes.rows)], 1) for _ in range(5)
        ]
        found[f"prefill {sizes.rows} x {sizes.context}"] = 1e3 * min(prefills[1:])
        return found


def encode_flops(vision: Any, num_patches: int) -> float:
    """Operations of products while an image of so many patches is encoded."""
    D, width, merged = vision.hidden_size, vision.intermediate_size, vision.merge_size**2 * vision.hidden_size
    of_layer = num_patches * (8 * D * D + 4 * D * width) + 4 * num_patches**2 * D
    of_merger = num_patches / vision.merge_size**2 * 2 * (merged * merged + merged * vision.output_size)
    return vision.num_layers * of_layer + (1 + vision.num_deepstack) * of_merger + num_patches * 6 * vision.patch_size**2 * D


PARTS = ("first", "programs", "encode", "between", "together", "same", "prepare", "text")


def main() -> None:
    """Measure the parts, the most important first. A part that fails is reported, and the others run."""
    parser = script_parser(__doc__, 3)
    parser.add_argument("words", nargs="*", metavar="MODEL_DIR or name=value", help="a model, and engine options")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=420.0, help="no part begins after this")
    parser.add_argument("--part-seconds", type=float, default=150.0, help="a part that takes longer is ended")
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
        config = seeing_models.QWEN3_VL_8B
        model = Path(models[0]) if models else Path(directory, "qwen3-vl")
        if not models:
            seeing_models.write(model, seeing_models.tiny(config) if args.tiny else config)
        bench = Bench(args, model)
        parts = {part: getattr(bench, part) for part in PARTS if part in (*args.parts, "programs")}
        limits = {"seconds": args.seconds - (time.monotonic() - began), "part_seconds": args.part_seconds}
        left_out = run_parts(parts, **limits, after_failure=lambda: end_all(bench.engine))
    table = bench.rows.table()
    print(f"\n{table}\n{time.monotonic() - began:.0f} s in all")
    if args.markdown:
        args.markdown.write_text(table)
    if left_out:
        sys.exit(f"left out: {'; '.join(left_out)}")


if __name__ == "__main__":
    main()
