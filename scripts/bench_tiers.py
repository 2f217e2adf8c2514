"""Measures blocks in host memory, files and other engines: copies alone, copies during steps, time saved; a Markdown table with goals.

usage: bench_tiers.py [MODEL_DIR] [--parts copies,launch,…] [--seconds N] [--json FILE] [--markdown FILE] [engine options as name=value …]

copies      GB/s from blocks to host memory and back, by batches of one operation each, on an idle engine, and what each part takes
launch      host time of a step of 64 decodes with host memory and without, on two engines in turn, nothing being copied
never-full  64 requests that fit the cache: tokens/s with host memory and without, and blocks copied
reuse       conversations whose contexts are four times the device's cache, in turn: tokens/s with host memory and without
no-reuse    prompts that never come back, in a cache that is too small for them: tokens/s with host memory and without
preempt     64 requests in a quarter of the cache that they need: tokens/s with host memory and without, preemptions
beside      64 requests decode, without copies, with a store or a load at all times, and with 30 GB/s of either: time of a step, GB/s
reload      a prompt of 2048 and one of 32768 tokens that is in host memory, in a cache of one and of three such prompts: time to the
            first token, against computing it
disk        a prompt of 8192 tokens that an earlier engine left in a directory (in TMPDIR): time to the first token from files, from host
            memory, computed
pd          a prompt of 8192 tokens on one engine, and on a prefill and a decode engine that share memory and the device: time to the
            first token

Parts run in this order, in which the first five share two engines. Weights are random, of Llama-3.1-8B's sizes in bfloat16 unless
MODEL_DIR has another config.json; --tiny: toy sizes. Goals are those of one H200.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu_checks import shapes
from scripts.measuring.command_line import engine_option, script_parser
from scripts.measuring.parts import Rows, run_parts
from scripts.tier_bench import first_tokens, steps, throughput
from scripts.tier_bench.engines import Bench, Engines
from scripts.tier_bench.prefill_decode import prefill_decode
from scripts.tier_bench.sizes import TINY, TINY_OPTIONS, Sizes

PARTS: dict[str, Callable[[Bench], None]] = {
    "copies": steps.copies,
    "launch": steps.launch,
    "never-full": throughput.never_full,
    "reuse": throughput.reuse,
    "no-reuse": throughput.no_reuse,
    "preempt": throughput.preempt,
    "beside": steps.beside,
    "reload": first_tokens.reload,
    "disk": first_tokens.disk,
    "pd": prefill_decode,
}


def main() -> None:
    """Measure the parts. A part that fails is reported, and the others run."""
    parser = script_parser(__doc__, 3)
    parser.add_argument("words", nargs="*", metavar="MODEL_DIR or name=value", help="a model, and engine options")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=540.0, help="no part begins after this")
    parser.add_argument("--part-seconds", type=float, default=180.0, help="a part that takes longer is ended")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, for a machine without a GPU")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_intermixed_args()
    models = [word for word in args.words if "=" not in word]
    options = [engine_option(word) for word in args.words if "=" in word]
    if len(models) > 1:
        parser.error(f"one model at a time, not {', '.join(models)}")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts {', '.join(sorted(unknown))} is unknown; there are {', '.join(PARTS)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        model = Path(models[0]) if models else Path(directory, "llama-8b")
        if not models:
            model.mkdir()
            # Random prompts leave out as many ids as there may be special ones.
            config = (
                shapes.tiny(shapes.LLAMA_8B) | {"vocab_size": 2048, "num_hidden_layers": 1} if args.tiny else shapes.LLAMA_8B
            )
            (model / "config.json").write_text(json.dumps(config))
        sizes, rows = TINY if args.tiny else Sizes(), Rows(model.name, args.json)
        engines = Engines(model, sizes, {**(TINY_OPTIONS if args.tiny else {}), **dict(options)})
        bench = Bench(engines, sizes, rows)
        parts = {name: partial(part, bench) for name, part in PARTS.items() if name in args.parts}
        left_out = run_parts(parts, seconds=args.seconds, part_seconds=args.part_seconds, after_failure=engines.close)
        engines.close()
    table = rows.table()
    print(f"\n{table}\n{time.monotonic() - began:.0f} s in all")
    if args.markdown:
        args.markdown.write_text(table)
    if left_out:
        sys.exit(f"left out: {'; '.join(left_out)}")


if __name__ == "__main__":
    main()
