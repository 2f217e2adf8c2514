"""Times weights of 4 and 8 bits on a CPU as stored and widened: python scripts/bench_cpu_weights.py [--model FILE.gguf]

Without a model: products of random weights, beside those of float32 weights [inputs, outputs]. Milliseconds are the fastest of a
second's runs, CPU milliseconds the mean of all threads together, which other load on the machine changes less.
With a model: engines as stored and with --dequantize, one after the other. A decode step's time is the difference of two lengths.
If llama-cpp-python is installed, its decode of the same file with as many threads as there are cores is the third.
"""

import argparse
import functools
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.quantization.numbers import NUMBERS, Scheme
from jaxllm.quantization.packed import product

SHAPES = ((1536, 576), (576, 1536), (2048, 2048), (2048, 8192))
"""(outputs, inputs): of SmolLM2-135M, and of Llama 3.2 1B."""
SCHEMES = {
    "Q4_0": Scheme("int4", 32, scale_type="float16"),
    "Q4_1": Scheme("uint4", 32, minimums=True, scale_type="float16", minimum_type="float16"),
    "int4, groups of 128": Scheme("int4", 128, scale_type="bfloat16"),
    "Q8_0": Scheme("int8", 32, scale_type="float16"),
    "int8 by channel": Scheme("int8"),
    "MXFP4": Scheme("e2m1", 32, scale_type="uint8"),
    "fp8 by channel": Scheme("e4m3"),
}
DECODED = 64
"""Steps between the two lengths."""
PROMPT = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a GGUF file")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 128], help="rows of products, or requests at once")
    parser.add_argument("--as", dest="side", choices=("stored", "widened", "llama.cpp"), help="time only this one of a model")
    options = parser.parse_args()
    if options.model is None:
        time_products(options.rows)
    elif options.side is None:
        for side in ("stored", "widened", "llama.cpp"):  # each in a process, whose memory is its own
            command = [sys.executable, __file__, "--model", options.model, "--as", side, "--rows", *map(str, options.rows)]
            subprocess.run(command, check=False)
    elif options.side == "llama.cpp":
        time_llama_cpp(options.model)
    else:
        time_engine(options.model, options.side, options.rows)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds of the fastest run of a second, and CPU milliseconds of the mean."""
    run()
    fastest, count, end, cpu = float("inf"), 0, time.perf_counter() + 1, time.process_time()
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        fastest, count = min(fastest, time.perf_counter() - start), count + 1
    return 1e3 * fastest, 1e3 * (time.process_time() - cpu) / count


def time_products(rows: list[int]) -> None:
    random = np.random.default_rng(0)
    for num_outputs, num_inputs in SHAPES:
        for num_rows in rows:
            x = jnp.asarray(random.standard_normal((num_rows, num_inputs), np.float32))
            wide = jnp.asarray(random.standard_normal((num_inputs, num_outputs), np.float32))
            show(num_outputs, num_inputs, num_rows, "float32", jax.jit(jnp.dot), x, wide)
            for name, scheme in SCHEMES.items():
                run = jax.jit(lambda x, arrays, scheme=scheme: product(arrays, scheme, x))
                show(num_outputs, num_inputs, num_rows, name, run, x, weight(scheme, num_outputs, num_inputs))


def show(num_outputs: int, num_inputs: int, num_rows: int, name: str, run: Callable, x: jax.Array, weight: object) -> None:
    fastest, cpu = timed(lambda: run(x, weight).block_until_ready())
    speed = sum(array.nbytes for array in jax.tree.leaves(weight)) / fastest / 1e6
    print(
        f"{num_outputs} x {num_inputs}, {num_rows:3} rows, {name:20} {fastest:7.3f} ms, CPU {cpu:7.3f} ms, {speed:5.1f} GB/s",
        flush=True,
    )


def weight(scheme: Scheme, num_outputs: int, num_inputs: int) -> dict[str, jax.Array]:
    random, number = np.random.default_rng(0), NUMBERS[scheme.number]
    codes = random.integers(0, 127, (num_outputs, num_inputs // number.per_value), np.uint8).view(number.code_type)
    groups = (num_outputs, num_inputs // (scheme.group or num_inputs))
    scale = np.full(groups, 120) if scheme.scale_type == "uint8" else random.uniform(0.01, 0.02, groups)
    arrays = {"codes": jnp.asarray(codes), "scale": jnp.asarray(scale, scheme.scale_type)}
    return arrays | ({"minimum": jnp.ones(groups, scheme.minimum_type)} if scheme.minimums else {})


def time_engine(model: str, side: str, rows: list[int]) -> None:
    from jaxllm import LLM, SamplingParams

    begin, cpu = time.perf_counter(), time.process_time()
    llm = LLM(
        model,
        dequantize=side == "widened",
        max_model_len=1024,
        max_num_seqs=max(rows),
        enable_prefix_caching=False,
        use_progress_bar=False,
    )
    print(f"{side}: loaded in {time.perf_counter() - begin:.1f} s, CPU {time.process_time() - cpu:.1f} s", flush=True)

    def run(prompts: list[list[int]], length: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        begin, cpu = time.perf_counter(), time.process_time()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu)

    for count in rows:
        prompts = [list(range(100 + i, 116 + i)) for i in range(count)]
        run(prompts, 8)
        pairs = [(run(prompts, 8), run(prompts, 8 + DECODED)) for _ in range(3)]
        wall, cpu_time = (min(long[i] - short[i] for short, long in pairs) / DECODED for i in (0, 1))
        print(f"{side}: a step of {count} requests {wall:.2f} ms, CPU {cpu_time:.2f} ms", flush=True)
    prompt = [[100 + 7919 * i % 30000 for i in range(PROMPT)]]
    run(prompt, 1)
    runs = [run(prompt, 1) for _ in range(4)]
    wall, cpu_time = (min(each[i] for each in runs) for i in (0, 1))
    print(f"{side}: a prompt of {PROMPT} tokens {wall:.0f} ms, CPU {cpu_time:.0f} ms", flush=True)
    print(f"{side}: largest memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB", flush=True)


def time_llama_cpp(model: str) -> None:
    try:
        from llama_cpp import Llama
    except ImportError:
        print("llama.cpp: llama-cpp-python is not installed")
        return
    begin, cpu = time.perf_counter(), time.process_time()
    llama = Llama(model, n_ctx=1024, n_threads=os.cpu_count(), n_threads_batch=os.cpu_count(), verbose=False)
    print(f"llama.cpp: loaded in {time.perf_counter() - begin:.1f} s, CPU {time.process_time() - cpu:.1f} s")

    def run(prompt: list[int], length: int) -> tuple[float, float]:
        llama.reset()
        tokens = llama.generate(prompt, temp=0.0)
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(length):
            next(tokens)
        return 1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - cpu)

    measured = functools.partial(run, list(range(100, 116)))
    pairs = [(measured(8), measured(8 + DECODED)) for _ in range(3)]
    wall, cpu_time = (min(long[i] - short[i] for short, long in pairs) / DECODED for i in (0, 1))
    print(f"llama.cpp: a step of 1 request {wall:.2f} ms, CPU {cpu_time:.2f} ms")
    runs = [run([100 + 7919 * i % 30000 for i in range(PROMPT)], 1) for _ in range(4)]
    wall, cpu_time = (min(each[i] for each in runs) for i in (0, 1))
    print(f"llama.cpp: a prompt of {PROMPT} tokens {wall:.0f} ms, CPU {cpu_time:.0f} ms")


if __name__ == "__main__":
    main()
