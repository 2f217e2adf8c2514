"""Sampling of one request, done slowly and plainly in float64 NumPy: what jaxllm.sampling must agree with."""

import numpy as np

from jaxllm.sampling_params import SamplingParams


def processed_logits(logits, params: SamplingParams, token_ids=(), num_prompt_tokens=0, eos_token_ids=()) -> np.ndarray:
    """The logits of one row [V] after everything that comes before the temperature."""
    logits = np.array(logits, np.float64)
    prompt, outputs = list(token_ids[:num_prompt_tokens]), list(token_ids[num_prompt_tokens:])
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if params.allowed_token_ids is not None:
        logits[[token for token in range(len(logits)) if token not in params.allowed_token_ids]] = -np.inf
    if len(outputs) < params.min_tokens:
        masked = logits.copy()
        masked[[*params.stop_token_ids, *([] if params.ignore_eos else eos_token_ids)]] = -np.inf
        if np.any(masked > -np.inf):
            logits = masked
    for token in set(prompt + outputs):
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(outputs):
        logits[token] -= params.frequency_penalty * outputs.count(token) + params.presence_penalty
    for *beginning, last in params.bad_words_token_ids or []:
        if outputs[len(outputs) - len(beginning) :] == beginning:
            logits[last] = -np.inf
    if params.top_n_sigma > 0 and np.any(logits > -np.inf):
        lowest = logits.max() - params.top_n_sigma * np.std(logits[logits > -np.inf])
        logits[logits < lowest] = -np.inf
    return logits


def kept(logits, params: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Which tokens of one row survive temperature, min_p, top_k and top_p: bool[V].

    `slack` shifts the borders of min_p and top_p outward (or inward, if negative) by this much, relatively: what lies
    between is decided by rounding.
    """
    probability = probabilities(logits, params)
    keep = probability >= params.min_p * probability.max() * (1 - slack)
    if params.top_k:
        keep &= probability >= np.sort(probability)[::-1][min(params.top_k, len(probability)) - 1]
    if params.top_p < 1:
        probability = np.where(keep, probability, 0)
        target = params.top_p * (1 + slack) * probability.sum()
        for candidate in np.unique(probability)[::-1]:  # from the likeliest down, equals together
            top = probability >= candidate
            if probability[top].sum() >= target:
                keep &= top
                break
    return keep


def probabilities(logits, params: SamplingParams, keep=None) -> np.ndarray:
    """Distribution of the draw of one row, over the tokens to keep (default: all)."""
    logits = np.array(logits, np.float64)
    if params.temperature == 0:
        return (np.arange(len(logits)) == np.argmax(logits)).astype(float)
    weight = np.exp((logits - logits.max()) / params.temperature)
    weight = weight if keep is None else np.where(keep, weight, 0)
    return weight / weight.sum()
