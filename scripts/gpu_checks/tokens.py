"""The demo model in float32: an engine with the device's kernels gives the tokens, logprobs and vectors of one with the reference
attention, also where decodes are sampled apart."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm import LLM, PoolingParams, SamplingParams
from jaxllm.outputs import CompletionOutput
from jaxllm.structured_outputs import StructuredOutputsParams
from scripts.gpu_checks import Outcome, wide_heads
from scripts.gpu_checks.sampled_apart import sampling_apart

TOLERANCE = 1e-3
"""Tolerance of a prompt's vectors, relative to the largest number in them, and of logprobs."""
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
    asking = asking_for_more(lengths)
    found, vectors, scored, more = {}, {}, {}, {}
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
        for name, params in asking.items():
            for is_apart in (True, False) if implementation == kernels else (False,):
                with sampling_apart(llm.llm_engine.core, is_apart) as sizes:
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                if is_apart and not sizes:
                    raise RuntimeError(f"no decode of the requests with {name} was sampled apart")
                more[implementation, name, is_apart] = [output.outputs[0] for output in outputs]
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
    for name, is_apart in itertools.product(asking, (True, False)):
        title = f"demo model, {name}, {'a program of its own' if is_apart else 'mixed steps'}"
        yield _alike(title, more[kernels, name, is_apart], more["reference", name, False], used)
    yield _under_a_grammar(scored[kernels], scored["reference"], used)
    expected = vectors["reference", "token_embed"]
    means = [tokens.mean(axis=0) for tokens in expected]
    for name, pairs in {
        "vectors of tokens": zip(vectors[kernels, "token_embed"], expected, strict=True),
        "means of vectors": zip(vectors[kernels, "embed"], means, strict=True),
    }.items():
        worst = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
        yield Outcome(f"demo model, {name}", worst < TOLERANCE, f"off by {worst:.1e} with {used}, at most {TOLERANCE:.0e}")
    yield from wide_heads.check(tiny=tiny)


def asking_for_more(lengths: Sequence[int]) -> dict[str, list[SamplingParams]]:
    """Requests that no decode program serves, greedy and seeded: of one kind together, and of all kinds side by side."""
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4}
    kinds: tuple[dict[str, Any], ...] = (
        penalties | {"logprobs": 3},
        {"logit_bias": {100: 3.0, 101: -4.0}, "logprobs": 0},
        {"allowed_token_ids": list(range(40, 140)), **penalties},
        {"min_tokens": 3, "stop_token_ids": list(range(40, 60)), "logprob_token_ids": [41, 42]},
        {},
        {"structured_outputs": StructuredOutputsParams(regex=GRAMMAR), "ignore_eos": False, "logprobs": 3},
        {"top_n_sigma": 1.5},
        penalties | {"top_k": 40, "top_p": 0.9},
    )

    def requests(of: Callable[[int], dict[str, Any]]) -> list[SamplingParams]:
        return [
            SamplingParams(**{"temperature": (i + i // len(kinds)) % 2, "seed": i, "max_tokens": n, "ignore_eos": True} | of(i))
            for i, n in enumerate(lengths)
        ]

    return {
        "penalties": requests(lambda i: penalties),
        "penalties for half": requests(lambda i: penalties if i % 2 else {}),
        "logprobs": requests(lambda i: {"logprobs": 5}),
        "requests of every kind": requests(lambda i: kinds[i % len(kinds)]),
    }


def _alike(title: str, found: Sequence[CompletionOutput], expected: Sequence[CompletionOutput], used: str) -> Outcome:
    """Tokens equal, logprobs close."""
    equal = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
    off, num_places = _off(found, expected)
    detail = f"{equal} of {len(found)} requests equal with {used} and reference attention"
    if num_places:
        detail += f", logprobs of {num_places} tokens off by {off:.1e}, at most {TOLERANCE:.0e}"
    return Outcome(title, equal == len(found) and off < TOLERANCE, detail)


def _off(found: Sequence[CompletionOutput], expected: Sequence[CompletionOutput]) -> tuple[float, int]:
    """The largest difference of logprobs of the same tokens in the same places, and the number of places."""
    places = [
        (place, other)
        for a, b in zip(found, expected, strict=True)
        for place, other in zip(a.logprobs or [], b.logprobs or [], strict=False)
        if place is not None and other is not None
    ]
    both = [(entry, other[token]) for place, other in places for token, entry in place.items() if token in other]
    return max((abs(a.logprob - b.logprob) for a, b in both if a.logprob != b.logprob), default=0.0), len(places)


def _under_a_grammar(found: Sequence[CompletionOutput], expected: Sequence[CompletionOutput], used: str) -> Outcome:
    """Tokens equal, logprobs close, and those of all that the grammar allows a distribution."""
    equal = sum(a.token_ids == b.token_ids for a, b in zip(found, expected, strict=True))
    off, num_places = _off(found, expected)
    places = [place for answer in found for place in answer.logprobs or [] if place is not None]
    mass_off = max((abs(sum(math.exp(entry.logprob) for entry in place.values()) - 1) for place in places), default=0.0)
    passed = equal == len(found) and num_places > 0 and off < TOLERANCE and mass_off < MASS_TOLERANCE
    detail = (
        f"{equal} of {len(found)} requests equal, {num_places} places off by {off:.1e} with {used}, at most {TOLERANCE:.0e}; "
    )
    return Outcome(
        "demo model, logprobs under a grammar",
        passed,
        f"{detail}probabilities of the allowed tokens off 1 by {mass_off:.1e}, at most {MASS_TOLERANCE:.0e}",
    )
