"""Tokens of tiny models in float32: those that plain JAX says of whole prompts, however an engine cuts these into steps."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxllm import LLM, SamplingParams
from scripts.gpu_checks import Outcome, kernels_in_use, skip
from scripts.gpu_checks.tensor_parallel_traffic import full_precision

TIE = 1e-3
"""Difference of logprobs up to which either token may be said."""
NUM_ALONE = 4
STEP_TOKENS, WHOLE_TOKENS = 32, 512
"""Tokens of the steps that cut prompts, and of those that do not."""
ONE_DEVICE: Mapping[str, Mapping[str, Any]] = {"": {}}
ON_TWO_TOO: Mapping[str, Mapping[str, Any]] = {**ONE_DEVICE, " on 2 devices": {"tensor_parallel_size": 2}}
ON_FOUR_TOO: Mapping[str, Mapping[str, Any]] = {**ON_TWO_TOO, " on 4 devices": {"tensor_parallel_size": 4}}
"""Options of engines, by what is added to their titles."""
Prompt = dict[str, Any]


def check(
    title: str,
    directory: Path,
    prompts: Callable[[Any], tuple[Sequence[Prompt], Sequence[Prompt]]],
    *,
    tiny: bool,
    differing: str,
    encoded: str,
    caches_prefixes: bool,
    layouts: Mapping[str, Mapping[str, Any]] = ONE_DEVICE,
    **options: Any,
) -> Iterator[Outcome]:
    """Together in small steps, with little memory; again, from cached prefixes; alone.

    prompts: of a model's config, these and others that differ in `differing` alone. encoded: what is used again when requests share it, in
    the report; empty: nothing is shared. options: of all engines, with blocks that are too few for all requests together.
    """
    on_cpu = jax.default_backend() == "cpu"
    with full_precision():
        plain = {"max_num_batched_tokens": WHOLE_TOKENS, "token_buckets": [WHOLE_TOKENS], "attention_implementation": "xla"}
        with _engine(directory, tiny=tiny, **{**options, **plain}) as llm:
            core: Any = llm.llm_engine.core
            given, others = prompts(core.model_config)
            expected, changed = _answers(llm, given), _answers(llm, others)
        num_changed = sum(_tokens(one) != _tokens(other) for one, other in zip(expected, changed, strict=True))
        yield Outcome(
            f"{title}: answers change with the {differing}",
            num_changed > 0.7 * len(given),
            f"{num_changed} of {len(given)} requests with other {differing}",
        )
        for layout, of_layout in layouts.items():
            name, num_devices = f"{title}{layout}", of_layout.get("tensor_parallel_size", 1)
            if num_devices > len(jax.devices()):
                yield skip(name, f"{len(jax.devices())} visible")
                continue
            kernels = {"attention_implementation": "triton"} if on_cpu and num_devices == 1 else {}  # interpreted
            small = {"max_num_batched_tokens": STEP_TOKENS, "token_buckets": [STEP_TOKENS]}
            with _engine(directory, tiny=tiny, **{**options, **small, **kernels, **of_layout}) as llm:
                core = llm.llm_engine.core
                yield kernels_in_use(name, core.kernels)
                before = core.stats()
                runs = {"together": _answers(llm, given)}
                middle = core.stats()
                runs["again"] = _answers(llm, given[::-1])[::-1]  # the latest are cached still
                after = core.stats()
                runs["alone"] = [answer for prompt in given[:NUM_ALONE] for answer in _answers(llm, [prompt])]
                llm.llm_engine.check_integrity()
            told = {"preemptions": after.num_preemptions - before.num_preemptions}
            if caches_prefixes:
                told["tokens from cached prefixes"] = after.prefix_cache_hits - middle.prefix_cache_hits
            if encoded:
                told[f"uses of {encoded}"] = after.item_cache_hits - before.item_cache_hits
            yield Outcome(f"{name}: what happened", all(told.values()), ", ".join(f"{n} {what}" for what, n in told.items()))
            for run, answers in runs.items():
                yield _compare(f"{name}: tokens, {run}", answers, expected)


def _compare(name: str, answers: Sequence[Any], expected: Sequence[Any]) -> Outcome:
    """Whether the answers to the first prompts are the expected ones."""
    pairs = list(zip(answers, expected, strict=False))
    equal = [_tokens(got) == _tokens(want) for got, want in pairs]
    ties = sum(not same and _is_tie(got, want) for same, (got, want) in zip(equal, pairs, strict=True))
    detail = f"{sum(equal)} of {len(equal)} requests equal plain JAX of whole prompts, {ties} others after a tie"
    return Outcome(name, sum(equal) + ties == len(equal), detail)


def _answers(llm: LLM, prompts: Sequence[Prompt]) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=2)
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]  # type: ignore[arg-type]


def _tokens(answer: Any) -> list[int]:
    return list(answer.token_ids)


def _is_tie(got: Any, expected: Any) -> bool:
    """Whether the first token that differs is about as likely as the expected one."""
    place = next(i for i, (a, b) in enumerate(zip(got.token_ids, expected.token_ids, strict=True)) if a != b)
    likely = expected.logprobs[place]
    token, other = got.token_ids[place], expected.token_ids[place]
    return token in likely and abs(likely[token].logprob - likely[other].logprob) < TIE


@contextlib.contextmanager
def _engine(directory: Path, *, tiny: bool, **options: Any) -> Iterator[LLM]:
    """In float32, with few rows."""
    rows = 4 if tiny else 16
    llm = LLM(
        str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=16,
        max_num_seqs=rows,
        decode_buckets=[rows],
        warmup="lazy",
        use_progress_bar=False,
        **options,
    )
    try:
        yield llm
    finally:
        llm.shutdown()
