"""The demo model in float32: an engine with the device's kernels gives the tokens, logprobs and vectors of one with the reference
attention."""

import math
import random
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxllm import LLM, PoolingParams, SamplingParams
from jaxllm.outputs import CompletionOutput
from jaxllm.structured_outputs import StructuredOutputsParams
from scripts.gpu_checks import Outcome

TOLERANCE = 1e-3
"""Of a prompt's vectors, relative to the largest number in them, and of logprobs."""
GRAMMAR = "[01]{1,8}( [01]{1,8}){3}"
"""Few tokens of the demo model's vocabulary are allowed at a time, so that all of them are reported."""
MASS_TOLERANCE = 1e-3
"""How far from 1 the sum of the probabilities of all allowed tokens may be."""
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
    masked = [
        SamplingParams(
            temperature=i % 2, seed=i, logprobs=20, structured_outputs=StructuredOutputsParams(regex=GRAMMAR), max_tokens=n
        )
        for i, n in enumerate(lengths)
    ]
    found, vectors, scored = {}, {}, {}
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
            pooler_config={"pooling_type": "mean"},
            use_progress_bar=False,
        )
        used = used or llm.llm_engine.config.compile.attention_implementation
        for kind, params in kinds.items():
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found[implementation, kind] = [list(output.outputs[0].token_ids) for output in outputs]
        scored[implementation] = [output.outputs[0] for output in llm.generate(prompts, masked, use_tqdm=False)]
        plain = PoolingParams(use_activation=False)
        for task in ("embed", "token_embed"):
            vectors[implementation, task] = [
                output.outputs.data for output in llm.encode(prompts, plain, pooling_task=task, use_tqdm=False)
            ]
        llm.shutdown()
    for kind in kinds:
        equal = sum(a == b for a, b in zip(found[kernels, kind], found["reference", kind], strict=True))
        yield Outcome(
            f"demo model, {kind} tokens",
            equal == count,
            f"{equal} of {count} requests ({sum(lengths)} tokens) equal with {used} and reference attention",
        )
    yield _under_a_grammar(scored[kernels], scored["reference"], used)
    expected = vectors["reference", "token_embed"]
    means = [tokens.mean(axis=0) for tokens in expected]
    for name, pairs in {
        "vectors of tokens": zip(vectors[kernels, "token_embed"], expected, strict=True),
        "means of vectors": zip(vectors[kernels, "embed"], means, strict=True),
    }.items():
        worst = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        yield Outcome(f"demo model, {name}", worst < TOLERANCE, f"off by {worst:.1e} with {used}, at most {TOLERANCE:.0e}")


def _under_a_grammar(found: Sequence[CompletionOutput], expected: Sequence[CompletionOutput], used: str) -> Outcome:
    """Tokens equal, logprobs close, and those of all that the grammar allows a distribution."""
    equal = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
    off, mass_off, num_places = 0.0, 0.0, 0
    for a, b in zip(found, expected, strict=True):
        for place, other in zip(a.logprobs or [], b.logprobs or [], strict=False):
            assert place is not None and other is not None
            off = max(off, *(abs(entry.logprob - other[token].logprob) for token, entry in place.items() if token in other))
            mass_off = max(mass_off, abs(sum(math.exp(entry.logprob) for entry in place.values()) - 1))
            num_places += 1
    passed = equal == len(found) and num_places > 0 and off < TOLERANCE and mass_off < MASS_TOLERANCE
    detail = (
        f"{equal} of {len(found)} requests equal, {num_places} places off by {off:.1e} with {used}, at most {TOLERANCE:.0e}; "
    )
    return Outcome(
        "demo model, logprobs under a grammar",
        passed,
        f"{detail}probabilities of the allowed tokens off 1 by {mass_off:.1e}, at most {MASS_TOLERANCE:.0e}",
    )
