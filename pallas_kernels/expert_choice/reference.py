"""The choice in NumPy and float64, on the host, by a stable sort."""

from typing import Any

import numpy as np

from pallas_kernels.expert_choice.rule import Rule


def choose_experts(logits: Any, bias: Any = None, *, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Expert ids int64 [T, k] and weights float64 [T, k]."""
    logits_TE = np.asarray(logits, np.float64)
    if rule.scoring == "sparsemixer":
        return _sparsemixer(logits_TE, rule.jitter)
    expert_Tk = largest(choice(logits_TE, bias, rule=rule), rule.top_k)
    return expert_Tk, weights(logits_TE, expert_Tk, rule=rule)


def choice(logits: Any, bias: Any = None, *, rule: Rule) -> np.ndarray:
    """What experts are chosen by [T, E]: -inf outside of the chosen groups. Not for sparsemixer."""
    logits_TE = np.asarray(logits, np.float64)
    if rule.scoring == "softmax_of_chosen":
        return logits_TE
    choice_TE = _scores(logits_TE, rule.scoring) + (0.0 if bias is None else np.asarray(bias, np.float64))
    if rule.num_groups == 1:
        return choice_TE
    choice_TGe = choice_TE.reshape(len(choice_TE), rule.num_groups, -1)
    group_TG = -np.sort(-choice_TGe, axis=-1)[:, :, : 1 + rule.sums_two].sum(axis=-1)
    is_chosen_TG = np.zeros(group_TG.shape, bool)
    np.put_along_axis(is_chosen_TG, largest(group_TG, rule.top_groups), True, axis=1)
    return np.where(is_chosen_TG[:, :, None], choice_TGe, -np.inf).reshape(choice_TE.shape)


def weights(logits: Any, expert_Tk: np.ndarray, *, rule: Rule) -> np.ndarray:
    """Weights [T, k] of these experts. Not for sparsemixer."""
    logits_TE = np.asarray(logits, np.float64)
    if rule.scoring == "softmax_of_chosen":
        return _scores(np.take_along_axis(logits_TE, expert_Tk, axis=1), "softmax") * rule.scale
    weight_Tk = np.take_along_axis(_scores(logits_TE, rule.scoring), expert_Tk, axis=1)
    if rule.renormalize:
        weight_Tk = weight_Tk / np.maximum(weight_Tk.sum(axis=1, keepdims=True), 1e-20)
    return weight_Tk * rule.scale


def largest(values_TN: np.ndarray, k: int) -> np.ndarray:
    """Indices [T, k] of the largest in order, of equals the lowest first."""
    return np.argsort(-values_TN, axis=1, kind="stable")[:, :k]


def _scores(logits_TE: np.ndarray, scoring: str) -> np.ndarray:
    if scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits_TE))
    exp_TE = np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True))
    return exp_TE / exp_TE.sum(axis=1, keepdims=True)


def _sparsemixer(logits_TE: np.ndarray, jitter: float) -> tuple[np.ndarray, np.ndarray]:
    expert_T2, weight_T2 = np.zeros((len(logits_TE), 2), int), np.zeros((len(logits_TE), 2))
    for token, logits_E in enumerate(logits_TE):
        left_E = logits_E.copy()
        for i in range(2):
            expert = left_E.argmax()
            distance_E = (left_E[expert] - logits_E) / np.maximum(np.abs(logits_E), left_E[expert])
            close_E = np.where(distance_E > 2 * jitter, -np.inf, left_E)
            expert_T2[token, i], weight_T2[token, i] = expert, _scores(close_E[None], "softmax")[0, expert]
            left_E[expert] = -np.inf
    return expert_T2, weight_T2
