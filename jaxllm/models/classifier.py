"""The heads of classifiers: what a config.json says of classes, and what turns scores into probabilities."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxllm.errors import ModelLoadError, shortened
from jaxllm.files import read_json
from jaxllm.model_config import ModelConfig
from jaxllm.model_parts import Classifier
from jaxllm.model_parts.encoder import ClassActivation
from jaxllm.models.config_reader import ConfigReader
from jaxllm.models.registry import CLASSIFIER
from jaxllm.pooling_config import PoolingConfig

MAX_CLASSES = 2**14
MAX_TOKENIZER_BYTES = 128 * 2**20
"""As `jaxllm.text.tokenizer_files` has it."""
_OF_PROBLEM: dict[str, ClassActivation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_OF_FUNCTION: dict[str, ClassActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
}
"""By the names that sentence-transformers writes."""


def is_classifier(c: ConfigReader) -> bool:
    """Whether the checkpoint has a head that scores classes."""
    names = c.raw.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith(CLASSIFIER)


def read_classifier(c: ConfigReader, out: str, **parts: Any) -> Classifier:
    """The head whose last layer is called `out`."""
    labels = _labels(c)
    return Classifier(labels, out, _activation(c, len(labels)), **parts)


def with_classifier(config: ModelConfig, c: ConfigReader, directory: Path) -> ModelConfig:
    """The config of a decoder with the head of a classifier, if the checkpoint has one: a product of the last token's hidden state.

    A reranker that was made to answer yes or no names these tokens, or the second alone, in `classifier_from_token`, as vLLM has it.
    """
    if config.encoder is not None or not is_classifier(c):
        return config
    names = c.raw.get("classifier_from_token")
    if names is None:
        classifier = read_classifier(c, "score", bias=False)
    else:
        out = config.names.embedding if config.tie_word_embeddings else config.names.head
        ids = _token_ids(names, directory, config.vocab_size, c.faults)
        one = c.with_values(id2label=None, num_labels=1)
        classifier = read_classifier(one, out, bias=False, token_ids=ids)
    return replace(config, classifier=classifier, pooling=PoolingConfig("last"))


def _labels(c: ConfigReader) -> tuple[str, ...]:
    """The names of the classes in order. transformers leaves out two that have no names."""
    given = c.raw.get("id2label")
    if not given:
        return tuple(f"LABEL_{i}" for i in range(min(c.integer("num_labels", 2), MAX_CLASSES)))
    if not isinstance(given, dict) or not 0 < len(given) <= MAX_CLASSES or {*given} != {str(i) for i in range(len(given))}:
        c.faults.append(f"id2label is {shortened(repr(given))}, must name the classes 0, 1, …, at most {MAX_CLASSES}")
        return ("LABEL_0",)
    return tuple(str(given[str(i)]) for i in range(len(given)))


def _activation(c: ConfigReader, num_classes: int) -> ClassActivation:
    """As vLLM chooses it: by the kind of problem, else as sentence-transformers wrote it, else by the number of classes."""
    problem = c.raw.get("problem_type")
    if problem is not None:
        if str(problem) not in _OF_PROBLEM:
            c.faults.append(f"problem_type is {problem!r}, supported: {', '.join(_OF_PROBLEM)}")
        return _OF_PROBLEM.get(str(problem), "softmax")
    name = c.within("sentence_transformers").raw.get("activation_fn", c.raw.get("sbert_ce_default_activation_function"))
    if name is not None:
        if str(name) not in _OF_FUNCTION:
            c.faults.append(f"the activation of scores is {name!r}, supported: {', '.join(_OF_FUNCTION)}")
        return _OF_FUNCTION.get(str(name), "sigmoid")
    return "softmax" if num_classes > 1 else "sigmoid"


def _token_ids(names: Any, directory: Path, vocab_size: int, faults: list[str]) -> tuple[int, ...]:
    """The ids of one or two tokens in tokenizer.json."""
    if not isinstance(names, list) or len(names) not in (1, 2) or not all(isinstance(name, str) for name in names):
        faults.append(f'classifier_from_token is {shortened(repr(names))}, must be one or two tokens, such as ["no", "yes"]')
        return (0,)
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"classifier_from_token is {json.dumps(names)}, but {directory} has no tokenizer.json that knows their ids"
        )
    model = (read_json(file, MAX_TOKENIZER_BYTES, ModelLoadError) or {}).get("model") or {}
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = tuple(vocabulary.get(name, -1) if isinstance(vocabulary, dict) else -1 for name in names)
    if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
        faults.append(f"classifier_from_token is {json.dumps(names)}, must be tokens of the vocabulary of {file}")
        return (0,)
    return ids
