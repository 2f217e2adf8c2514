"""Runs the work of a recorded vLLM measurement through `LLM` with dummy weights and prints both side by side.

usage: bench_h200.py MODEL_DIR [--recorded FILE] [--mix FILE] [--rows tpot1,tpot64,…] [--json FILE] [engine options as name=value …]

Method, the same as the record's: token-id prompts from numpy default_rng(0).integers(0, vocab_size - 256), greedy, ignore_eos, no
detokenizing, prefix caching off, every row run twice and the faster kept; time per output token = (time of +257 tokens minus time
of +1 token) / 256; the whole `LLM.generate` call is timed, nothing is left out.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from jaxllm import LLM, SamplingParams

BATCHES = (1, 16, 64, 256)


def main() -> None:
    """Measure the asked rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--recorded", type=Path, help="JSON with vLLM's rows")
    parser.add_argument("--mix", type=Path, help="JSON with [prompt, output] lengths")
    parser.add_argument("--rows", default="1,16,64,256,mixed,128")
    parser.add_argument("--json", type=Path)
    parser.add_argument("options", nargs="*", help="engine options, name=value")
    args = parser.parse_intermixed_args()
    options = {"load_format": "dummy", "enable_prefix_caching": False, "skip_tokenizer_init": True, "max_model_len": 4096}
    options |= {name: json.loads(value) for name, value in (option.split("=", 1) for option in args.options)}
    started = time.perf_counter()
    llm = LLM(model=str(args.model), **options)
    core = llm.llm_engine.core
    results = {"engine_start_s": time.perf_counter() - started, "programs": len(core.runner.programs)}
    print(f"engine start {results['engine_start_s']:.1f} s, {results['programs']} programs", flush=True)
    llm.llm_engine.finish_compiling()
    vocab_size = core.model_config.vocab_size
    recorded = _recorded(args.recorded, args.model.name)
    for row in args.rows.split(","):
        if row == "mixed":
            lengths = json.loads(args.mix.read_text())["requests"]
            results["mixed_1000"] = _measure(llm, lengths, vocab_size)
        elif row == "128":
            results["1000x128+128"] = _measure(llm, [(128, 128)] * 1000, vocab_size)
        else:
            batch = int(row)
            short = _measure(llm, [(1024, 1)] * batch, vocab_size)
            long = _measure(llm, [(1024, 257)] * batch, vocab_size)
            results[f"tpot {batch}"] = {
                "ms": (long["seconds"] - short["seconds"]) / 256 * 1e3,
                "prefill_tok_s": batch * 1024 / short["seconds"],
            }
        name, values = list(results.items())[-1]
        print(name, _describe(values), "| vLLM", _describe(recorded.get(name, {})), flush=True)
    results["compiled_after_warmup"] = core.num_compiled_after_warmup
    print("compiled after warm-up:", results["compiled_after_warmup"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def _measure(llm: LLM, lengths: list[tuple[int, int]], vocab_size: int) -> dict[str, float]:
    core = llm.llm_engine.core
    best: dict[str, float] = {}
    for attempt in range(2):
        rng = np.random.default_rng(attempt)
        prompts = [{"prompt_token_ids": rng.integers(0, vocab_size - 256, n).tolist()} for n, _ in lengths]
        params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n, detokenize=False) for _, n in lengths]
        steps, dispatch, wait = core.runner.num_steps, core.runner.dispatch_seconds, core.loop.wait_seconds
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        num_out = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert num_out == sum(n for _, n in lengths), "not every request got all its tokens"
        steps = core.runner.num_steps - steps
        values = {
            "seconds": seconds,
            "out_tok_s": num_out / seconds,
            "steps": steps,
            "dispatch_ms_per_step": (core.runner.dispatch_seconds - dispatch) / steps * 1e3,
            "wait_ms_per_step": (core.loop.wait_seconds - wait) / steps * 1e3,
        }
        if not best or seconds < best["seconds"]:
            best = values
    return best


def _recorded(path: Path | None, model: str) -> dict[str, dict[str, float]]:
    rows = json.loads(path.read_text()).get(model, []) if path else []
    return {row["name"]: row for row in rows if "name" in row}


def _describe(values: dict[str, float]) -> str:
    shown = {k: v for k, v in values.items() if isinstance(v, (int, float))}
    return ", ".join(f"{name} {value:.3f}" if value < 100 else f"{name} {value:.0f}" for name, value in shown.items())


if __name__ == "__main__":
    main()
