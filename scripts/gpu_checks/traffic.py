"""Requests of every kind at once, and what an engine makes of them: so that engines over several devices can be compared with one's.

The demo model, whose tokenizer bad words and structured outputs need.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm import LLM, PoolingParams, SamplingParams
from jaxllm.structured_outputs import StructuredOutputsParams

TOLERANCE = 1e-3
"""Tolerance of logprobs, absolute, and of vectors, relative to their largest number: float32 sums in another order."""
NUDGE = 1e-4
"""Added to a logit to see whether a token was as likely as another."""
BEGINNING = list(range(60, 92))
"""Common beginning of many prompts: two blocks of the cache."""


@dataclass(frozen=True)
class Size:
    """How much there is of it."""

    num_each: int
    """Requests of each kind."""
    num_tokens: int
    rows: int
    step_tokens: int
    max_model_len: int

    def options(self, **more: Any) -> dict[str, Any]:
        """Options of the engine: few programs, and prompts that are cut into chunks and mixed with decodes."""
        return {
            "dtype": "float32",
            "max_num_seqs": self.rows,
            "max_num_batched_tokens": self.step_tokens,
            "decode_buckets": [self.rows],
            "token_buckets": [self.step_tokens],
            "max_model_len": self.max_model_len,
            "warmup": "lazy",
            "pooler_config": {"pooling_type": "mean"},
            "use_progress_bar": False,
            # So few blocks that requests are preempted, enough for one of the longest.
            "num_gpu_blocks_override": 2 + self.rows * self.max_model_len // 64,
            **more,
        }


FULL = Size(num_each=4, num_tokens=32, rows=32, step_tokens=128, max_model_len=256)
TINY = Size(num_each=1, num_tokens=10, rows=6, step_tokens=48, max_model_len=96)


@dataclass(frozen=True)
class Answer:
    """Compared parts of one request's result."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    """Logprobs of the tokens, of the likeliest at each place, and of the prompt, as far as they were asked for."""
    reported: tuple[int, ...] = ()
    """The tokens that these are of."""


def kinds(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Sampling parameters by what they try."""
    seeded = {"temperature": 0.9, "seed": 1}
    found: dict[str, dict[str, Any]] = {
        "greedy": {},
        "seeded": {"temperature": 1.0, "seed": 1},
        "top_k, top_p and min_p": {**seeded, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        "penalties, seeded": {**seeded, "presence_penalty": 1.0, "repetition_penalty": 1.1},
        "logit bias": {"logit_bias": {100: 4.0, 101: -4.0}},
        "allowed tokens": {**seeded, "allowed_token_ids": list(range(40, 140))},
        "bad words": {"bad_words": ["the", "a", " the", "=", " ="]},
        "logprobs": {"logprobs": 3},
        "logprobs, seeded": {**seeded, "logprobs": 2},
        "prompt logprobs": {"prompt_logprobs": 0},
        "long": {"max_tokens": 2 * num_tokens},
    }
    if importlib.util.find_spec("llguidance"):
        regex = StructuredOutputsParams(regex="[a-z]{3,8}( [a-z]{3,8}){2,40}")
        schema = (
            '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}'
        )
        found["structured"] = {"structured_outputs": regex}
        found["structured, seeded"] = {**seeded, "logprobs": 2, "structured_outputs": StructuredOutputsParams(json=schema)}
    return {name: {"temperature": 0.0, "max_tokens": num_tokens, **params} for name, params in found.items()}


def requests(size: Size) -> Iterator[tuple[str, list[int], SamplingParams]]:
    """(kind, prompt, parameters), the kinds mixed; prompts of one token up to several steps, most with a common beginning."""
    for i in range(size.num_each):
        for k, (kind, params) in enumerate(kinds(size.num_tokens).items()):
            own = [40 + (7 * i + 3 * j + 11 * k) % 500 for j in range(1 + (9 * i + 5 * k) % (size.max_model_len // 3))]
            prompt = own if (i + k) % 4 == 0 else BEGINNING[: size.max_model_len // 3] + own[: size.max_model_len // 4]
            if "seed" in params:
                params = {**params, "seed": 17 * i + k}
            ends = kind.startswith("structured")
            yield kind, prompt, SamplingParams(**params, ignore_eos=not ends, detokenize=False)


def answers(llm: LLM, size: Size, only: Sequence[str] = ()) -> dict[str, list[Answer]]:
    """Answers of the engine, by kind; all requests are there from the start."""
    asked = [request for request in requests(size) if not only or request[0] in only]
    prompts, params = [prompt for _, prompt, _ in asked], [params for _, _, params in asked]
    found: dict[str, list[Answer]] = {}
    for (kind, _, _), output in zip(asked, llm.generate(prompts, params, use_tqdm=False), strict=True):  # type: ignore[arg-type]
        places = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
        scores = [(token, entry.logprob) for place in places if place for token, entry in sorted(place.items())]
        found.setdefault(kind, []).append(
            Answer(
                tuple(output.outputs[0].token_ids),
                tuple(score for _, score in scores),
                tuple(token for token, _ in scores),
            )
        )
    return found


def vectors(llm: LLM, size: Size) -> list[np.ndarray]:
    """Means of the hidden states of some prompts."""
    prompts = [prompt for kind, prompt, _ in requests(size) if kind in ("greedy", "seeded", "logit bias")]
    outputs = llm.encode(prompts, PoolingParams(use_activation=False), pooling_task="embed", use_tqdm=False)  # type: ignore[arg-type]
    return [np.asarray(output.outputs.data, np.float32) for output in outputs]


def differing(found: Mapping[str, Sequence[Answer]], expected: Mapping[str, Sequence[Answer]]) -> list[tuple[str, int]]:
    """(kind, index) of the requests that have other tokens, or logprobs that are off by more than `TOLERANCE`."""
    return [
        (kind, i)
        for kind, many in found.items()
        for i, (a, b) in enumerate(zip(many, expected[kind], strict=True))
        if not _equal(a, b)
    ]


def off_by(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference of vectors, relative to the largest number of each."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, expected, strict=True))


def is_tie(llm: LLM, size: Size, kind: str, index: int, expected: Answer) -> bool:
    """Whether an engine whose answer to a request is another one gives the expected token where they part, if that is favoured by `NUDGE`.

    Then two tokens were as likely as float32 sums are exact, and either is right.
    """
    found = answers(llm, size, (kind,))[kind][index]
    both = zip(found.tokens, expected.tokens, strict=False)
    where = next((i for i, (a, b) in enumerate(both) if a != b), None)
    if where is None:
        return found == expected  # by chance, this time
    _, prompt, params = [request for request in requests(size) if request[0] == kind][index]
    favoured = dict(params.logit_bias or {})
    favoured[expected.tokens[where]] = favoured.get(expected.tokens[where], 0.0) + NUDGE
    params = dataclasses.replace(params, logit_bias=favoured)
    [output] = llm.generate([prompt], params, use_tqdm=False)  # type: ignore[arg-type, list-item]
    return tuple(output.outputs[0].token_ids[: where + 1]) == expected.tokens[: where + 1]


def off_in_scores(found: Sequence[Answer], expected: Sequence[Answer]) -> float:
    """The mean difference of the logprobs of answers."""
    pairs = zip(found, expected, strict=True)
    return float(np.mean(np.concatenate([np.abs(np.subtract(a.logprobs, b.logprobs)) for a, b in pairs])))


def _equal(a: Answer, b: Answer) -> bool:
    if a.tokens != b.tokens or len(a.logprobs) != len(b.logprobs):
        return False
    # Of tokens that are as likely as each other, another one may be reported.
    return bool(np.allclose(a.logprobs, b.logprobs, rtol=0, atol=TOLERANCE)) if a.logprobs else True
