"""Engines of a golden checkpoint whose token ids have a meaning for grammars."""

from collections.abc import Callable
from pathlib import Path

from jaxllm.engine.core import EngineCore
from jaxllm.structured.token_table import Vocabulary
from jaxllm.text.tokenizer import load_tokenizer
from tests.helpers import engines
from tests.helpers.tiny_tokenizers import write_tokenizer


def core_maker(name: str, directory: Path) -> Callable[..., EngineCore]:
    """Makes engines of a checkpoint with other options. Their tokenizer is written to the directory."""
    tokenizer = load_tokenizer(write_tokenizer(directory))

    def new(**options: object) -> EngineCore:
        core = engines.make_core(name, **options)
        vocabulary = Vocabulary.of(tokenizer, core.model_config.padded_vocab_size, ())
        core._vocabulary = lambda eos_token_ids: vocabulary  # type: ignore[method-assign]
        return core

    return new
