"""Models with random weights through `LLM`: many requests together and alone, preempted, with and without cached prefixes.

Any error between a request and its tokens (a wrong page, mask, row, position, a prefix of another request) moves logprobs
or tokens farther from exact ones than a 16-bit type does; `scoring.judge` compares that with the plain path in the same
run.
"""

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm import LLM, SamplingParams
from jaxllm.engine import prepare
from jaxllm.kernel_policy import MORE_THAN_ANY, KernelPolicy, platform_policy
from scripts.gpu_checks import Outcome, kernels_in_use, scoring, shapes
from scripts.gpu_checks.sampled_apart import sampling_apart
from scripts.gpu_checks.scoring import Answer, Scores
from scripts.kernels.compiling import first_line

LONG = 600
"""Tokens of a prompt that waits until the cache is full."""
PLAIN_PATH = "xla"
"""The attention implementation of the engines that ours is compared with."""


@dataclass(frozen=True)
class Load:
    """Requests and the limits under which they run."""

    lengths: tuple[int, ...]
    """Lengths of prompts with nothing in common."""
    shared: tuple[tuple[int, tuple[int, ...]], ...]
    """Lengths of common beginnings, each with the lengths of what follows."""
    num_tokens: int
    num_alone: int
    num_blocks: int
    max_model_len: int
    options: dict[str, Any]
    """Options of engines that need not run with the default sizes."""
    reference_options: dict[str, Any]
    """Options of the plain and the exact engine."""

    def prompts(self, vocab_size: int) -> list[tuple[int, ...]]:
        """Random tokens in random order, but long ones last: the many before them fill the cache and then grow."""
        rng = np.random.default_rng(0)
        found = [rng.integers(0, vocab_size, length) for length in self.lengths]
        for length, more in self.shared:
            begin = rng.integers(0, vocab_size, length)
            found += [np.concatenate([begin, rng.integers(0, vocab_size, n)]) for n in more]
        order = sorted(rng.permutation(len(found)), key=lambda i: len(found[i]) >= LONG)
        return [tuple(int(token) for token in found[i]) for i in order]


FULL = Load(
    lengths=(
        *(1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65),
        *(100, 111, 120, 127, 128, 129, 137, 150, 163, 180, 200, 211, 230, 255, 256, 257),
        *(700, 800, 1000, 1300, 1700, 2048, 2500, 3000),
    ),
    shared=(
        (320, (1, 5, 16, 17, 40, 60, 64, 77, 90, 100, 128, 150, 160, 170, 180, 200)),
        (1008, (1, 2, 15, 16, 17, 30, 48, 64)),
    ),
    num_tokens=32,
    num_alone=12,
    num_blocks=300,
    max_model_len=4096,
    options={"max_num_seqs": 64, "token_buckets": [256, 1024, 3072], "decode_buckets": [8, 64]},
    reference_options={"max_num_seqs": 64, "max_num_batched_tokens": 3072, "token_buckets": [3072], "decode_buckets": [64]},
)
_TINY_SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "token_buckets": [32], "decode_buckets": [8]}
TINY = Load(
    lengths=(1, 2, 15, 16, 17, 40),
    shared=((32, (1, 5)),),
    num_tokens=10,
    num_alone=2,
    num_blocks=9,
    max_model_len=64,
    options=_TINY_SIZES,
    reference_options=_TINY_SIZES,
)


@dataclass(frozen=True)
class Model:
    """Shapes and options of the checked engine."""

    name: str
    shapes: shapes.Shapes
    num_layers: int
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the plain and the exact engine too."""
    default_sizes: bool = False
    """Run with all default buckets, for as many requests as are the default of a GPU with 64 GiB."""

    @property
    def title(self) -> str:
        layers = f"{self.num_layers} of {self.shapes['num_hidden_layers']} layers"
        return f"{self.name} ({layers}{', default sizes' * self.default_sizes})"


FP8 = {"quantization": "fp8"}
MODELS = (
    Model("Llama-3.1-8B", shapes.LLAMA_8B, 4, default_sizes=True),
    Model("Qwen3-0.6B", shapes.QWEN3_0_6B, 6),
    Model("Llama-3.1-8B fp8", shapes.LLAMA_8B, 4, FP8),
    Model("Llama-3.1-8B fp8, fp8 cache", shapes.LLAMA_8B, 4, FP8 | {"kv_cache_dtype": "fp8"}),
)


def check(
    *, tiny: bool, deadline: float, share: tuple[int, int] = (0, 1), models: Sequence[Model] = MODELS, **options: Any
) -> Iterator[Outcome]:
    """The models of this share (index, number of shares), none begun after the deadline (`time.perf_counter`).

    `options`: for the checked engine instead of the default ones.
    """
    index, num_shares = share
    for model in models[index::num_shares]:
        if time.perf_counter() > deadline:
            yield Outcome(f"engine, {model.name}", False, "not run for lack of time (--seconds)")
            continue
        if tiny:
            model = Model(model.name, shapes.tiny(model.shapes), 1, model.options)
            if jax.default_backend() == "cpu":
                options = {"attention_implementation": "triton", **options}  # interpreted
        # Names kernels where unverified ones shall run too.
        named = {"attention_implementation": "mosaic"} if model.options and jax.default_backend() != "cpu" else {}
        try:
            yield from check_model(model, TINY if tiny else FULL, **{**named, **options})
        except Exception as problem:
            yield Outcome(f"engine, {model.title}", False, first_line(problem, limit=1000))


def check_model(model: Model, load: Load, **options: Any) -> Iterator[Outcome]:
    """One model: the checked engine twice, with and without prefix caching, then the plain and the exact one."""
    prompts = load.prompts(model.shapes["vocab_size"])
    alone = prompts[:: len(prompts) // load.num_alone][: load.num_alone]
    reported = {"logprobs": 1}
    runs: list[_Run] = []
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(model.shapes | {"num_hidden_layers": model.num_layers}))
        ours = {**({"max_num_seqs": 1024} if model.default_sizes else load.options), **model.options, **options}
        with _engine(directory, load, dtype="bfloat16", **ours) as llm:
            core: Any = llm.llm_engine.core
            yield kernels_in_use(f"engine, {model.title}", core.kernels)
            with sampling_apart(core) as sizes:
                run = _run(llm, "together, sampled apart", prompts, load, together=True, hits=True, **reported)
            runs.append(run if sizes else replace(run, faults=[*run.faults, "no decode was sampled apart"]))
            with sampling_apart(core, False):
                runs.append(_run(llm, "together", prompts, load, together=True, hits=True, **reported))
            runs.append(_run(llm, "together, tokens only", prompts, load, together=True, hits=True))
            llm.reset_prefix_cache()
            runs.append(_run(llm, "alone", alone, load, **reported))
        with _engine(directory, load, dtype="bfloat16", enable_prefix_caching=False, **ours) as llm:
            name = "no prefix caching, prompts scored"
            runs.append(_run(llm, name, prompts, load, together=True, hits=False, prompt_logprobs=0, **reported))
            runs.append(_run(llm, "no prefix caching, alone, tokens only", alone, load, hits=False))
        sequences = list(dict.fromkeys(answer.sequence for run in runs for answer in run.answers))
        plain, exact = _references(directory, load, model.options, sequences)
    for run in runs:
        judged = scoring.judge(f"engine, {model.title}: {run.name}", run.answers, plain, exact)
        yield Outcome(judged.name, judged.passed and not run.faults, "; ".join([*run.faults, run.told, judged.detail]))


@dataclass(frozen=True)
class _Run:
    """Answers, and what the scheduler counted meanwhile."""

    name: str
    answers: list[Answer]
    told: str
    faults: list[str]


def _run(
    llm: LLM,
    name: str,
    prompts: Sequence[tuple[int, ...]],
    load: Load,
    *,
    together: bool = False,
    hits: bool | None = None,
    **reported: int,
) -> _Run:
    """Greedy answers to prompts, together or one by one. hits: whether cached prefixes must be found, or none."""
    params = SamplingParams(temperature=0.0, max_tokens=load.num_tokens, ignore_eos=True, detokenize=False, **reported)  # type: ignore[arg-type]
    engine: Any = llm.llm_engine
    before = engine.core.stats()
    lists = [list(prompt) for prompt in prompts]
    calls = [lists] if together else [[prompt] for prompt in lists]
    found = [output for call in calls for output in llm.generate(call, params, use_tqdm=False)]  # type: ignore[arg-type]
    after = engine.core.stats()
    engine.check_integrity()
    num_preemptions = after.num_preemptions - before.num_preemptions
    num_hits = after.prefix_cache_hits - before.prefix_cache_hits
    faults = []
    if together and num_preemptions == 0:
        faults.append("no request was preempted, so that this checks less than it should")
    if hits is not None and hits != (num_hits > 0):
        faults.append(f"{num_hits} tokens came from cached prefixes")
    lengths = [len(output.outputs[0].token_ids) for output in found]
    if lengths != [load.num_tokens] * len(prompts):
        faults.append(f"answers of {min(lengths)} to {max(lengths)} tokens instead of {load.num_tokens}")
    told = f"{len(prompts)} requests, {num_preemptions} preemptions, {num_hits} tokens from cached prefixes"
    return _Run(name, scoring.answers(found), told, faults)


def _references(
    directory: str, load: Load, options: dict[str, Any], sequences: Sequence[tuple[int, ...]]
) -> tuple[dict[tuple[int, ...], Scores], dict[tuple[int, ...], Scores]]:
    """Scores by the plain engine, and by the exact one with the same weights."""
    options = {
        **load.reference_options,
        **options,
        "attention_implementation": PLAIN_PATH,
        "warmup": "lazy",
        # On a GPU its programs would push those of the checked engine out of the store before they are loaded again.
        "compilation_cache": jax.default_backend() == "cpu",
        "enable_prefix_caching": False,
    }
    with _engine(directory, load, dtype="bfloat16", **options) as llm:
        params = _params(llm)
        dtypes, sums = [x.dtype for x in params], _checksums(params, [x.dtype for x in params])
        plain = scoring.score(llm, sequences)
        del params
    with _activations_as_they_are(), _engine(directory, load, dtype="float32", **options) as llm:
        core: Any = llm.llm_engine.core
        # Made in float32: what plain holds in 16 bits has to be rounded.
        core.runner.params = tuple(
            _rounded(x) if x.dtype != dtype else x for x, dtype in zip(core.runner.params, dtypes, strict=True)
        )
        if _checksums(core.runner.params, dtypes) != sums:
            raise RuntimeError("the exact engine has other weights than the plain one")
        return plain, scoring.score(llm, sequences)


def _params(llm: LLM) -> tuple[jax.Array, ...]:
    core: Any = llm.llm_engine.core
    return core.runner.params  # type: ignore[no-any-return]


# A cast there and back would be taken out by the compiler.
_rounded = jax.jit(lambda x: lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), donate_argnums=0)


def _checksums(params: Sequence[jax.Array], dtypes: Sequence[Any]) -> list[int]:
    """A sum of the bits of each array in the given type, which no order of summing changes."""
    return [int(_checksum(x, dtype)) for x, dtype in zip(params, dtypes, strict=True)]


def _checksum(x: jax.Array, dtype: Any) -> jax.Array:
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[jnp.dtype(dtype).itemsize]

    def bits(x: jax.Array) -> jax.Array:
        return jnp.sum(lax.bitcast_convert_type(x.astype(dtype), unsigned).astype(jnp.uint32))

    return jax.jit(bits)(x)


@contextlib.contextmanager
def _activations_as_they_are() -> Iterator[None]:
    """Engines that are made meanwhile quantise no activations, in steps of any size: small steps of the checked engine do not either."""

    def policy(*, on_gpu: bool, **_: bool) -> KernelPolicy:
        return replace(platform_policy(on_gpu=on_gpu), max_weight_only_rows=MORE_THAN_ANY)

    with mock.patch.object(prepare, "platform_policy", policy):
        yield


@contextlib.contextmanager
def _engine(directory: str, load: Load, **options: Any) -> Iterator[LLM]:
    """An engine in a small cache, whose memory is given back at the end."""
    llm = LLM(
        directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=load.max_model_len,
        num_gpu_blocks_override=load.num_blocks,
        use_progress_bar=False,
        **options,
    )
    try:
        yield llm
    finally:
        llm.shutdown()
