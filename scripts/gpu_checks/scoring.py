"""Compares an engine's answers with exact ones and with the plain path's: measures the noise of a 16-bit type.

Exact is a float32 engine with the same weights, plain a bfloat16 engine with plain XLA in place of every kernel. Both score
the checked engine's output by teacher forcing (`prompt_logprobs`), so that all three are compared after the same tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.outputs import Logprob, RequestOutput
from scripts.gpu_checks import Outcome

FACTOR, REQUEST_FACTOR, WORST_FACTOR = 1.5, 2.0, 2.5
"""How much farther from exact than the plain path logprobs may be: rms of all, rms of the worst request, worst token."""
AGREEMENT_MARGIN = 0.05
"""How much rarer than the plain path's first choices the tokens may be exact's."""
MOST = 0.3
"""If the plain path is off by more (rms, in nats), the comparison is not meaningful."""
NOISE_FLOOR = 1e-4
"""In nats: below it two float32 softmaxes differ too."""


@dataclass(frozen=True)
class Answer:
    """The checked engine's output for a prompt, with its own logprobs as far as they were requested."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: np.ndarray | None = None
    """[tokens]"""
    prompt_logprobs: np.ndarray | None = None
    """[prompt - 1]: the first token has none."""

    @property
    def sequence(self) -> tuple[int, ...]:
        return self.prompt + self.tokens


@dataclass(frozen=True)
class Scores:
    """Scores of N tokens: the logprob of each but the first, and the likeliest token in its place with its logprob, all [N - 1]."""

    logprobs: np.ndarray
    best_ids: np.ndarray
    best_logprobs: np.ndarray


def answers(outputs: Iterable[RequestOutput]) -> list[Answer]:
    """Output of an engine."""
    return [_answer(output) for output in outputs]


def _answer(output: RequestOutput) -> Answer:
    completion = output.outputs[0]
    if completion.finish_reason == "error":
        raise RuntimeError(f"a request ended with an error: {completion.stop_reason}")
    of_tokens = of_prompt = None
    if completion.logprobs is not None:
        of_tokens = _of(completion.token_ids, completion.logprobs)
    if output.prompt_logprobs is not None:
        of_prompt = _of(output.prompt_token_ids[1:], output.prompt_logprobs[1:])
    return Answer(tuple(output.prompt_token_ids), tuple(completion.token_ids), of_tokens, of_prompt)


def _of(token_ids: Sequence[int], positions: Sequence[dict[int, Logprob] | None]) -> np.ndarray:
    found = [position[token].logprob for token, position in zip(token_ids, positions, strict=True) if position is not None]
    return np.array(found, np.float64)


def score(llm: LLM, sequences: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], Scores]:
    """The engine's scores of whole sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = llm.generate([list(sequence) for sequence in sequences], params, use_tqdm=False)
    return {sequence: _scores(output) for sequence, output in zip(sequences, outputs, strict=True)}


def _scores(output: RequestOutput) -> Scores:
    assert output.prompt_logprobs is not None
    positions = [position for position in output.prompt_logprobs[1:] if position is not None]
    best = [min(position.items(), key=lambda item: (item[1].rank or 0, -item[1].logprob)) for position in positions]
    return Scores(
        _of(output.prompt_token_ids[1:], positions),
        np.array([token for token, _ in best]),
        np.array([logprob.logprob for _, logprob in best], np.float64),
    )


def judge(
    name: str, found: Sequence[Answer], plain: dict[tuple[int, ...], Scores], exact: dict[tuple[int, ...], Scores]
) -> Outcome:
    """Logprobs at most so much farther from exact than the plain path's, and tokens about as often exact's first choice.

    A greedy token that is not exact's first choice must be nearly as likely: only as much less as the noise explains.
    """
    errors, plain_errors, agree, plain_agree, regrets = [], [], [], [], []
    for answer in found:
        ours = plain[answer.sequence], exact[answer.sequence]
        written = slice(len(answer.prompt) - 1, None)
        plain_errors.append((ours[0].logprobs - ours[1].logprobs)[written])
        agree.append(ours[1].best_ids[written] == np.array(answer.tokens))
        plain_agree.append(ours[1].best_ids[written] == ours[0].best_ids[written])
        regrets.append((ours[1].best_logprobs - ours[1].logprobs)[written])
        if answer.logprobs is not None:
            errors.append(answer.logprobs - ours[1].logprobs[written])
        if answer.prompt_logprobs is not None:
            before = slice(0, len(answer.prompt) - 1)
            errors[-1] = np.concatenate([answer.prompt_logprobs - ours[1].logprobs[before], errors[-1]])
            plain_errors[-1] = (ours[0].logprobs - ours[1].logprobs)[: before.stop + len(answer.tokens)]
    noise, noise_request, noise_worst = _sizes(plain_errors)
    passed = noise < MOST
    details = []
    if errors:
        size, size_request, size_worst = _sizes(errors)
        passed &= size <= FACTOR * noise + NOISE_FLOOR
        passed &= size_request <= REQUEST_FACTOR * noise_request + NOISE_FLOOR
        passed &= size_worst <= WORST_FACTOR * noise_worst + NOISE_FLOOR
        details.append(
            f"logprobs off by {size:.1e} (plain {noise:.1e}, allowed x{FACTOR}), worst request {size_request:.1e} "
            f"({noise_request:.1e}, x{REQUEST_FACTOR:g}), worst token {size_worst:.1e} ({noise_worst:.1e}, x{WORST_FACTOR})"
        )
    agreement, plain_agreement = (float(np.concatenate(parts).mean()) for parts in (agree, plain_agree))
    regret, allowed = float(np.concatenate(regrets).max()), 2 * WORST_FACTOR * noise_worst + NOISE_FLOOR
    passed &= agreement >= plain_agreement - AGREEMENT_MARGIN and regret <= allowed
    num_tokens = sum(len(answer.tokens) for answer in found)
    details.append(
        f"{agreement:.1%} of {num_tokens} tokens are exact's first choice (plain {plain_agreement:.1%}, "
        f"margin {AGREEMENT_MARGIN:.0%}), others at most {regret:.1e} less likely (allowed {allowed:.1e})"
    )
    return Outcome(name, bool(passed), "; ".join(details))


def _sizes(errors: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Sizes of errors by request: rms of all, largest rms of a request, largest; NaN if anything is not finite."""
    together = np.concatenate(errors)
    if not np.isfinite(together).all():
        return (float("nan"),) * 3
    by_request = [float(np.sqrt(np.mean(part**2))) for part in errors if len(part)]
    return float(np.sqrt(np.mean(together**2))), max(by_request), float(np.abs(together).max())
