"""The demo model in float32: an engine with the device's kernels gives the tokens of one with the reference attention."""

import random
from collections.abc import Iterator

import jax

from jaxllm import LLM, SamplingParams
from scripts.gpu_checks import Outcome

TEXT = "the city river seven runs under a bridge and twelve green boats carry letters to my old friend in winter"


def check(*, tiny: bool) -> Iterator[Outcome]:
    """Greedy and seeded, 32 requests of differing lengths that join and leave the batch."""
    count, num_tokens = (3, 4) if tiny else (32, 64)
    rng = random.Random(0)
    prompts = [" ".join(rng.choices(TEXT.split(), k=rng.randint(1, 8 if tiny else 100))) for _ in range(count)]
    lengths = [rng.randint(num_tokens // 2, num_tokens) for _ in range(count)]
    greedy = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    seeded = [SamplingParams(temperature=1.0, seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]
    kinds = {"greedy": greedy, "seeded": seeded}
    found = {}
    kernels = "auto" if jax.default_backend() != "cpu" else "triton"  # there interpreted
    used = ""
    for implementation in (kernels, "reference"):
        rows = 4 if tiny else 32
        llm = LLM(
            "demo",
            dtype="float32",
            attention_implementation=implementation,
            max_num_seqs=rows,
            max_num_batched_tokens=32 if tiny else 512,
            decode_buckets=[rows],
            token_buckets=[32 if tiny else 512],
            max_model_len=64 if tiny else 512,
            num_gpu_blocks_override=33 if tiny else 1025,
            enable_prefix_caching=False,
            warmup="lazy",
            use_progress_bar=False,
        )
        used = used or llm.llm_engine.config.compile.attention_implementation
        for kind, params in kinds.items():
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[implementation, kind] = [list(output.outputs[0].token_ids) for output in outputs]
        llm.shutdown()
    for kind in kinds:
        equal = sum(a == b for a, b in zip(found[kernels, kind], found["reference", kind], strict=True))
        yield Outcome(
            f"demo model, {kind} tokens",
            equal == count,
            f"{equal} of {count} requests ({sum(lengths)} tokens) equal with {used} and reference attention",
        )
